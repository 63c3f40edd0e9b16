"""Packs of arms: the same files are the same bytes, changed ones are refused with both digests, a store keeps them."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, delete

from jobs import arm_packs
from jobs.arm_packs import CHUNK_BYTES, pack_tree, unpack
from jobs.errors import PackError, SpecError
from jobs.model import Manifest
from jobs.store import Store, packs
from jobs.whole_trees import program_digest
from tests.unit.store_sweeps import Clock, manifest

pytest_plugins = ("tests.unit.jobs_store_cases",)


def planted(folder: Path, order: int = 1) -> Path:
    """A tree with a program, a link, an empty file and caches; written in one order or the other."""
    files = {
        "engine/__init__.py": b"",
        "engine/a.py": b"A = 1\n",
        "bin/tool": b"#!/bin/sh\n",
        "engine/data.bin": bytes(9999),
    }
    for name, content in list(files.items())[::order]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "bin" / "tool").chmod(0o700 if order == 1 else 0o755)
    (folder / "bin" / "again").symlink_to("tool")
    for apart in ("engine/__pycache__", ".git", ".assay"):
        (folder / apart).mkdir()
        (folder / apart / "x").write_text(str(order))
    return folder


def packed(folder: Path) -> tuple[bytes, str]:
    into = io.BytesIO()
    digest = pack_tree(folder, into)
    return into.getvalue(), digest


def arm_of(pack: str) -> Manifest:
    given = manifest()
    return given.model_copy(update={"arms": tuple(arm.model_copy(update={"pack": pack}) for arm in given.arms)})


def test_the_same_files_are_the_same_pack_whenever_and_in_whatever_order_they_came(tmp_path: Path) -> None:
    one, two = planted(tmp_path / "one"), planted(tmp_path / "two", -1)
    for path in two.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    data, digest = packed(one)
    assert packed(two) == (data, digest)
    assert digest == hashlib.sha256(data).hexdigest()
    (two / "engine" / "a.py").write_text("A = 2\n")
    assert packed(two)[1] != digest
    (two / "engine" / "a.py").write_text("A = 1\n")
    (two / "bin" / "tool").chmod(0o644)
    assert packed(two)[1] != digest, "the bit to execute counts"


def test_a_pack_gives_the_tree_back(tmp_path: Path) -> None:
    tree = planted(tmp_path / "tree")
    data, digest = packed(tree)
    (tmp_path / "pack").write_bytes(data)
    (tmp_path / "back").mkdir()
    unpack(tmp_path / "pack", digest, tmp_path / "back")
    assert program_digest(tmp_path / "back") == program_digest(tree)
    assert (tmp_path / "back" / "bin" / "again").is_symlink()
    assert not (tmp_path / "back" / ".git").exists()


@pytest.mark.parametrize("change", [lambda d: d[:-5], lambda d: b"", lambda d: d[:99] + bytes([d[99] ^ 1]) + d[100:]])
def test_a_pack_that_was_changed_or_cut_is_refused_with_both_digests(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    data, digest = packed(planted(tmp_path / "tree"))
    (tmp_path / "pack").write_bytes(change(data))
    (tmp_path / "back").mkdir()
    with pytest.raises(PackError) as refused:
        unpack(tmp_path / "pack", digest, tmp_path / "back")
    assert digest in str(refused.value) and hashlib.sha256(change(data)).hexdigest() in str(refused.value)
    assert list((tmp_path / "back").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind"), [("../out", tarfile.REGTYPE), ("dev", tarfile.CHRTYPE), ("in", tarfile.LNKTYPE)]
)
def test_a_pack_that_reaches_out_is_refused_though_its_digest_is_right(tmp_path: Path, name: str, kind: bytes) -> None:
    with tarfile.open(tmp_path / "pack", "w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    (tmp_path / "back").mkdir()
    with pytest.raises(PackError, match="no file of a tree"):
        unpack(tmp_path / "pack", hashlib.sha256((tmp_path / "pack").read_bytes()).hexdigest(), tmp_path / "back")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["/etc/passwd", "../../away"])
def test_a_link_that_leads_out_of_its_tree_is_refused_when_it_is_packed(tmp_path: Path, target: str) -> None:
    tree = planted(tmp_path / "tree")
    (tree / "bin" / "far").symlink_to(target)
    with pytest.raises(SpecError, match="leads out of its tree"):
        packed(tree)


def test_a_tree_too_large_is_not_packed_and_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = planted(tmp_path / "tree")
    data, digest = packed(tree)
    (tmp_path / "pack").write_bytes(data)
    (tmp_path / "back").mkdir()
    monkeypatch.setattr(arm_packs, "MOST_TREE_BYTES", 9999)
    with pytest.raises(PackError, match="more than 9999 bytes"):
        unpack(tmp_path / "pack", digest, tmp_path / "back")
    monkeypatch.setattr(arm_packs, "MOST_PACK_BYTES", 100)
    assert packed(tree)[1] == ""


# ---- in a store --------------------------------------------------------------------------------------------------


def test_a_store_gives_a_pack_back_in_chunks_and_takes_it_once(store: Store) -> None:
    data = os.urandom(70 * CHUNK_BYTES + 5)
    digest = hashlib.sha256(data).hexdigest()
    store.put_pack(digest, io.BytesIO(data))
    store.put_pack(digest, io.BytesIO(data))
    chunks = list(store.pack(digest))
    assert b"".join(chunks) == data
    assert {len(one) for one in chunks} == {CHUNK_BYTES, 5}
    assert list(store.pack("0" * 64)) == []


def test_a_pack_cut_off_while_it_is_put_is_not_there_and_can_be_put_again(store: Store) -> None:
    class Breaks(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 65 * CHUNK_BYTES:
                raise OSError("gone")
            return super().read(size)

    data = os.urandom(70 * CHUNK_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(OSError, match="gone"):
        store.put_pack(digest, Breaks(data))
    assert list(store.pack(digest)) == []
    store.put_pack(digest, io.BytesIO(data))
    assert b"".join(store.pack(digest)) == data


KILLED = """
import hashlib, io, os, signal, sys
from datetime import UTC, datetime
from jobs.store import Store, packs
class Kills(io.BytesIO):
    def read(self, size=-1):
        if self.tell() > 40 * 65536: os.kill(os.getpid(), signal.SIGKILL)
        return super().read(size)
data = bytes(50 * 65536)
Store.open(sys.argv[1], lambda: datetime.now(UTC)).put_pack(hashlib.sha256(data).hexdigest(), Kills(data))
"""


def test_a_submitter_killed_while_it_ships_leaves_nothing_of_a_pack(store_url: str) -> None:
    with Store.open(store_url, lambda: datetime.now(UTC)) as store:
        done = subprocess.run([sys.executable, "-P", "-c", KILLED, store_url], check=False, env=own_path())
        assert done.returncode == -signal.SIGKILL
        data = bytes(50 * CHUNK_BYTES)
        digest = hashlib.sha256(data).hexdigest()
        assert list(store.pack(digest)) == []
        store.put_pack(digest, io.BytesIO(data))
        assert b"".join(store.pack(digest)) == data


def own_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_pack_stays_as_long_as_an_open_sweep_needs_it_and_is_asked_for_at_submission(
    store: Store, clock: Clock
) -> None:
    data = b"needed"
    digest = hashlib.sha256(data).hexdigest()
    with pytest.raises(SpecError, match=r"arm base, pack [0-9a-f]{12}, is not in this store"):
        store.submit(arm_of(digest), "h" * 64, "0")
    store.put_pack(digest, io.BytesIO(data))
    sweep_id = store.submit(arm_of(digest), "h" * 64, "0", key="one")
    old = hashlib.sha256(b"old").hexdigest()
    store.put_pack(old, io.BytesIO(b"old"))
    clock.pass_s(40 * 86400)
    store.put_pack(hashlib.sha256(b"new").hexdigest(), io.BytesIO(b"new"))
    assert (list(store.pack(old)), list(store.pack(digest))) == ([], [data])
    assert store.manifest(sweep_id).arms[0].pack == digest


def test_a_pack_that_is_put_again_while_old_ones_are_dropped_is_there_afterwards(
    store: Store, store_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the look for old ones and their removal: its submitter was told that it is kept."""
    data = b"wanted again"
    digest = hashlib.sha256(data).hexdigest()
    store.put_pack(digest, io.BytesIO(data))
    clock.pass_s(40 * 86400)
    with Store.open(store_url, clock) as other:
        again = threading.Thread(target=other.put_pack, args=(digest, io.BytesIO(data)))

        def put_first(table: Table) -> Any:
            if again.ident is None:
                again.start()
                again.join(0.5)
            return delete(table)

        monkeypatch.setattr(packs, "delete", put_first)
        store.put_pack(hashlib.sha256(b"new").hexdigest(), io.BytesIO(b"new"))
        again.join(30)
        assert not again.is_alive()
    assert list(store.pack(digest)) == [data]
