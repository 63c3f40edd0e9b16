"""An arm's tree as one file that is named by its sha256: what goes to hosts that do not share the tree's folder.

The same files make the same bytes, whoever packs them and when: sorted names, no times and no owners, of the modes the
bit to execute alone. A pack is checked against its name before anything of it is looked at.
"""

from __future__ import annotations

import gzip
import hashlib
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from jobs.errors import PackError, SpecError
from jobs.whole_trees import walked

CHUNK_BYTES = 64 << 10
"""In which packs are stored and sent; what Ray takes along in a call, up to 100 KiB, never meets its object store."""
MOST_PACK_BYTES = 256 << 20
MOST_TREE_BYTES = 4 << 30
"""Of all files of an unpacked tree: a few bytes could else be made to fill a disk."""


def pack_tree(tree: Path, into: IO[bytes]) -> str:
    """Write the pack of a folder; its digest, or "" where it would have more than MOST_PACK_BYTES.

    Raises SpecError for a tree that changes meanwhile or has a link that leads out of it.
    """
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=into, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(set(walked(tree))):
            try:
                _add(archive, tree, name)
            except OSError as error:
                raise SpecError(f"cannot pack {tree / name}: {error}", "run again once the tree is at rest") from error
            if into.tell() > MOST_PACK_BYTES:
                return ""
    if into.tell() > MOST_PACK_BYTES:
        return ""
    into.seek(0)
    total = hashlib.sha256()
    while data := into.read(CHUNK_BYTES):
        total.update(data)
    return total.hexdigest()


def _add(archive: tarfile.TarFile, tree: Path, name: str) -> None:
    path, info = tree / name, tarfile.TarInfo(name)
    if path.is_symlink():
        target = path.readlink()
        if target.is_absolute() or not (path.parent / target).resolve().is_relative_to(tree.resolve()):
            raise SpecError(f"{path} leads out of its tree, to {target}", "make it a file, or link within the tree")
        info.type, info.linkname = tarfile.SYMTYPE, str(target)
        archive.addfile(info)
        return
    with path.open("rb") as file:
        found = path.stat()
        info.size, info.mode = found.st_size, 0o755 if found.st_mode & stat.S_IXUSR else 0o644
        archive.addfile(info, file)


def unpack(file: Path, digest: str, into: Path) -> None:
    """Put a pack's tree into an empty folder. Raises PackError when the file is not what its name says, with both
    digests, or when it holds what no tree of ours does."""
    with file.open("rb") as packed:
        found = hashlib.file_digest(packed, "sha256").hexdigest()
    if found != digest:
        raise PackError(f"the pack {digest} of an arm came as {found}: changed or cut short", "submit the sweep anew")
    try:
        with tarfile.open(file, "r:gz") as archive:
            members = archive.getmembers()
            for one in members:
                if not (one.isfile() or one.issym()) or ".." in PurePosixPath(one.name).parts:
                    raise PackError(f"the pack {digest} holds {one.name!r}, which is no file of a tree")
            if sum(one.size for one in members) > MOST_TREE_BYTES:
                raise PackError(f"the pack {digest} holds more than {MOST_TREE_BYTES} bytes")
            archive.extractall(into, members, filter="data")
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise PackError(f"the pack {digest} cannot be unpacked: {error}") from error
