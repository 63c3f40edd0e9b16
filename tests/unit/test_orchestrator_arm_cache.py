"""Trees that were shipped to a worker's host: whole or not at all, checked, kept as long as they are run from."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from jobs import arm_packs
from jobs.arm_packs import CHUNK_BYTES, pack_tree
from jobs.errors import PackError
from jobs.model import ArmPlan, Manifest
from jobs.tables import arm_chunk
from orchestrator.arm_cache import PART_S, ArmCache
from orchestrator.commands.cluster import shipped
from orchestrator.seat import Happening
from tests.unit.orchestrator_field import Field


def tree_of(folder: Path, content: bytes) -> Path:
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "__init__.py").write_text("")
    (folder / "engine" / "data").write_bytes(content)
    return folder


def packed(folder: Path, content: bytes) -> tuple[str, list[bytes]]:
    into = io.BytesIO()
    digest = pack_tree(tree_of(folder, content), into)
    data = into.getvalue()
    return digest, [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]


def ship(cache: ArmCache, pack: str, chunks: list[bytes]) -> bool:
    for position, data in enumerate(chunks):
        cache.take(pack, position, data)
    return cache.finish(pack)


def arm(pack: str) -> ArmPlan:
    return ArmPlan(name="head", role="head", source="path", python_path="/not/here", pack=pack)


def test_a_shipped_tree_stands_in_the_place_of_the_folder_that_is_not_here(tmp_path: Path) -> None:
    content = os.urandom(3 * CHUNK_BYTES)
    pack, chunks = packed(tmp_path / "tree", content)
    cache = ArmCache(tmp_path / "cache")
    assert len(chunks) > 1 and not cache.holds(pack)
    assert ship(cache, pack, chunks) and cache.holds(pack)
    with cache.placed(arm(pack)) as placed:
        assert placed.python_path is not None
        assert (Path(placed.python_path) / "engine" / "data").read_bytes() == content
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [pack]


def test_an_arm_that_was_not_shipped_is_read_where_it_stands(tmp_path: Path) -> None:
    with ArmCache(None).placed(arm("")) as placed:
        assert placed.python_path == "/not/here"


@pytest.mark.parametrize("name", ["../../away", "A" * 64, "0" * 63])
def test_a_name_that_is_no_digest_reaches_no_file(tmp_path: Path, name: str) -> None:
    cache = ArmCache(tmp_path / "cache")
    with pytest.raises(PackError, match="no pack"):
        cache.take(name, 0, b"x")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("fault", ["cut", "changed", "twice"])
def test_a_pack_that_came_otherwise_is_refused_with_both_digests_and_can_be_sent_again(
    tmp_path: Path, fault: str
) -> None:
    pack, chunks = packed(tmp_path / "tree", os.urandom(3 * CHUNK_BYTES))
    wrong = {"cut": chunks[:-1], "changed": [chunks[0], b"x", *chunks[2:]], "twice": [*chunks, chunks[-1]]}[fault]
    cache = ArmCache(tmp_path / "cache")
    assert not ship(cache, pack, wrong)
    with pytest.raises(PackError, match=f"pack {pack} of an arm came as [0-9a-f]{{64}}"), cache.placed(arm(pack)):
        pass
    assert list((tmp_path / "cache").iterdir()) == []
    assert ship(cache, pack, chunks)
    with cache.placed(arm(pack)):
        pass


def test_a_tree_that_was_changed_after_it_came_is_shipped_anew(tmp_path: Path) -> None:
    pack, chunks = packed(tmp_path / "tree", b"1")
    cache = ArmCache(tmp_path / "cache")
    ship(cache, pack, chunks)
    (tmp_path / "cache" / pack / "tree" / "engine" / "data").write_bytes(b"2")
    assert not cache.holds(pack)
    assert ship(cache, pack, chunks) and cache.holds(pack)


def test_a_worker_killed_while_a_pack_comes_or_is_unpacked_leaves_no_half_tree(tmp_path: Path) -> None:
    """Its successor gets the pack anew, and what was left of the first is removed when it is old."""
    pack, chunks = packed(tmp_path / "tree", os.urandom(3 * CHUNK_BYTES))
    cache = ArmCache(tmp_path / "cache")
    for left in ("coming", "unpacking"):
        child = os.fork()
        if not child:
            if left == "coming":
                cache.take(pack, 0, chunks[0])
            else:
                shutil.rmtree = lambda *_a, **_k: None  # type: ignore[assignment]
                os.rename = Path.rename = lambda *_a: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
                ship(cache, pack, chunks)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert not cache.holds(pack)
        assert list((tmp_path / "cache").iterdir()), "something was left"
    for path in (tmp_path / "cache").iterdir():
        os.utime(path, (time.time() - 2 * PART_S,) * 2)
    assert ship(cache, pack, chunks) and cache.holds(pack)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [pack]


def test_the_least_used_trees_make_room_and_none_that_is_run_from(tmp_path: Path) -> None:
    cache, packs = ArmCache(tmp_path / "cache", most_bytes=250_000), list[str]()
    for number in range(3):
        pack, chunks = packed(tmp_path / f"tree{number}", os.urandom(100_000))
        packs.append(pack)
        if number < 2:
            ship(cache, pack, chunks)
            os.utime(tmp_path / "cache" / pack / "tree.sha256", (number, number))
    with cache.placed(arm(packs[0])):
        os.utime(tmp_path / "cache" / packs[0] / "tree.sha256", (0, 0))
        ship(cache, packs[2], chunks)
        assert [cache.holds(pack) for pack in packs] == [True, False, True], "the oldest is in use"
    with (tmp_path / "cache" / packs[0] / "tree.sha256").open() as mark:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- under a dispatcher ------------------------------------------------------------------------------------------


def submitted(field: Field) -> tuple[str, Manifest]:
    """A sweep whose arms were shipped; the folder that they were packed from is gone."""
    _, manifest = field.submit({"base": {}, "head": {}})
    again = shipped(manifest, field.store)
    assert {arm.pack for arm in again.arms} != {""} and len({arm.pack for arm in again.arms}) == 1
    (field.root / "arm").rename(field.root / "gone")
    return field.store.submit(again, "h" * 64, "test", key="shipped"), again


@pytest.fixture
def field(tmp_path: Path) -> Field:
    made = Field(tmp_path)
    made.works = replace(made.works, packs=tmp_path / "packs")
    return made


def test_a_tree_that_makes_room_while_it_is_about_to_be_locked_is_not_run_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, chunks = packed(tmp_path / "tree", b"x")
    cache, other = ArmCache(tmp_path / "cache"), ArmCache(tmp_path / "cache", most_bytes=0)
    assert ship(cache, pack, chunks)
    lock = fcntl.flock

    def late(file: object, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        other._make_room("")
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(PackError, match="not on this host: it was not shipped here"), cache.placed(arm(pack)):
        pass
    assert not cache.holds(pack) and ship(cache, pack, chunks) and cache.holds(pack)


def test_a_sweep_whose_arms_are_not_on_the_host_is_measured_from_their_packs(field: Field) -> None:
    sweep_id, manifest = submitted(field)
    left = field.work(sweep_id, manifest)
    assert (left.complete, left.pending, left.exhausted) == (4, 0, 0)
    runs = [run for cell in field.store.judge_input(sweep_id).cells for run in cell.runs]
    for run in runs:
        assert run.record is not None
        assert run.record.module_path.startswith(str(field.root / "packs"))
        assert run.record.engine_digest == manifest.arms[0].tree_digest


def test_a_pack_damaged_in_the_store_costs_the_attempts_and_says_both_digests(field: Field) -> None:
    sweep_id, manifest = submitted(field)
    with field.store._database._engine.begin() as connection:
        connection.execute(update(arm_chunk).values(data=b"something else"))
    left = field.work(sweep_id, manifest)
    assert (left.complete, left.pending, left.exhausted) == (0, 0, 4)
    (pack,) = {arm.pack for arm in manifest.arms}
    for run in (run for cell in field.store.judge_input(sweep_id).cells for run in cell.runs):
        assert {one.state for one in run.attempts} == {"failed"}
        assert all(f"the pack {pack} of an arm came as " in one.reason for one in run.attempts)


def test_an_arm_too_large_to_be_shipped_is_read_where_it_stands_and_that_is_said(
    field: Field, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, manifest = field.submit({"base": {}, "head": {}})
    monkeypatch.setattr(arm_packs, "MOST_PACK_BYTES", 100)
    assert {arm.pack for arm in shipped(manifest, field.store).arms} == {""}
    assert f"{field.root / 'arm'} is not shipped" in capsys.readouterr().err


def test_a_tree_that_made_room_meanwhile_is_shipped_again_for_the_next_attempt(field: Field) -> None:
    sweep_id, manifest = submitted(field)

    def meanwhile(happening: Happening) -> None:
        if happening.kind == "end" and not happening.text and not gone:
            shutil.rmtree(field.root / "packs")
            gone.append(happening)

    gone: list[Happening] = []
    field.heard = Hears(meanwhile)
    left = field.work(sweep_id, manifest)
    assert gone and (left.complete, left.pending, left.exhausted) == (4, 0, 0)
    states = [a.state for cell in field.store.judge_input(sweep_id).cells for run in cell.runs for a in run.attempts]
    assert sorted(states) == ["failed", *["measured"] * 4]


class Hears(list[Happening]):
    """Does something at what it hears."""

    def __init__(self, act: Callable[[Happening], None]) -> None:
        self.act = act

    def append(self, happening: Happening, /) -> None:
        super().append(happening)
        self.act(happening)
