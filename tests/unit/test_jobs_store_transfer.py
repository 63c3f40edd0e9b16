"""A sweep between stores: whole, the same once more, and refused where it is damaged or there is another of its id."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import insert, select

from jobs.blessing import golden_of
from jobs.errors import Conflict, JobsError, SpecError
from jobs.model import Certificate, Interval
from jobs.near_tie import Adjudication, FollowUp
from jobs.noise import Calibration
from jobs.store import Store, revision, transfer
from jobs.store.connect import Database
from jobs.store.revision import head
from jobs.store.rows import new_id
from jobs.store.sweep_rows import SCHEMA, TABLES, Tally, line_of
from jobs.tables import comment, metadata
from jobs.tables import verdict as verdict_table
from orchestrator.conclude import judge_sweep
from reports.render import render
from tests.unit.report_pages import write_html
from tests.unit.store_sweeps import Clock, submitted
from tests.unit.stored_documents import itself, put

pytest_plugins = ("tests.unit.jobs_store_cases",)

NOISE = {
    "metric": "decode_ms_per_token", "card": "sim-h200", "uuid": "SIM-0", "blocks": 8, "sigma": 1 / 3,
    "smallest_detectable": None, "budget_blocks": 2,
}  # fmt: skip
CERTIFICATE = Certificate(
    uuid="SIM-0", card="sim-h200", driver="sim 1", verdict="clear", grade="scripted", samples=3,
    intervals=(Interval(start_s=0.1, end_s=0.2, what="pid 4242 \u2028 came up", pid=4242),),
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sweep.assay"


@pytest.fixture
def sqlite(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'one.sqlite'}", clock) as opened:
        yield opened


def exported(store: Store, sweep_id: str, file: Path) -> Path:
    with file.open("wb") as out:
        store.export_sweep(sweep_id, out)
    return file


def pages(store: Store, sweep_id: str, folder: Path) -> dict[str, bytes]:
    """Every form of a sweep's report, by name."""
    verdict = store.verdict(sweep_id)
    assert verdict is not None
    write_html(verdict, folder, doc=store.judge_input(sweep_id))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return found | {form: render(verdict, form).encode() for form in ("comment", "json", "junit", "text")}


def rewritten(file: Path, change: Callable[[list[bytes]], list[bytes]], *, digests: bool = False) -> None:
    """Change an export's lines; with `digests` the last line is made to fit, as who forges one would."""
    lines = change(gzip.decompress(file.read_bytes()).splitlines(keepends=True))
    if digests:
        tally = Tally()
        for line in lines[:-1]:
            tally.add(line)
        lines[-1] = json.dumps({**json.loads(lines[-1]), **tally.told()}).encode() + b"\n"
    file.write_bytes(gzip.compress(b"".join(lines)))


def rich_sweep(store: Store, clock: Clock, documents: Any) -> tuple[str, str]:
    """A calibration; and a sweep that it is known for, with a golden, a retracted run, an answer of the oracle and two
    verdicts, of which the newer is struck out. The ids of both."""
    calibrating = put(store, itself(documents, 1))
    judge_sweep(store, calibrating)
    cell = store.manifest(calibrating).cells[0].cell
    store.write_calibrations(calibrating, [Calibration(cell=cell, sweep=calibrating, at=str(clock.now), **NOISE)])
    clock.pass_s(1)
    sweep_id = put(store, documents.sweep(null=documents.arm(record={"certificate": CERTIFICATE})))
    verdict = judge_sweep(store, sweep_id)
    clock.pass_s(1)
    doc = store.judge_input(sweep_id)
    assert doc.calibrations, "or nothing rests on the other sweep"
    named: dict[str, Any] = {"golden_id": new_id("gld", clock.now), "reason": "ok", "by": "Ada", "now": clock.now}
    store.write_golden(golden_of(doc, verdict, doc.cells[0], None, **named))
    asked = FollowUp(
        cell=doc.cells[0].plan.cell, base="base", head="head", card="SIM-0", prompt_ids=(1,), base_ids=(5,),
        head_ids=(6,), first=0,
    )  # fmt: skip
    store.write_adjudication(sweep_id, Adjudication(asked=asked, positions=(), failure="no card"))
    for run in doc.cells[0].runs[:2]:
        store.retract(run.run_id, "the fan was blocked", "Ada")
        clock.pass_s(1)
        if run is doc.cells[0].runs[0]:
            judge_sweep(store, sweep_id)
            clock.pass_s(1)
    posted = {"id": "cmt_1", "repository": "a/b", "pull_request": 7, "remote_id": "1", "digest": "d"}
    of_newest = select(verdict_table.c.id).where(verdict_table.c.sweep_id == sweep_id).limit(1).scalar_subquery()
    row = insert(comment).values({**posted, "verdict_id": of_newest, "posted_at": clock.now})
    store._database.write(lambda connection: connection.execute(row))
    return calibrating, sweep_id


def test_a_sweep_comes_whole_to_another_store_and_its_reports_are_equal_byte_by_byte(
    pair: tuple[Store, Store], clock: Clock, documents: Any, file: Path, tmp_path: Path
) -> None:
    store, other = pair
    calibrating, sweep_id = rich_sweep(store, clock, documents)
    submitted(other, "its own")  # rows of its own, so that events are counted from elsewhere
    assert other.import_sweep(exported(store, calibrating, file)).absent == ()
    with file.open("wb") as out:
        told = store.export_sweep(sweep_id, out)
    made = other.import_sweep(file)
    assert (made.sweep_id, made.was_there, made.rows, made.digest) == (sweep_id, False, told.rows, told.digest)
    assert told.rests_on == (calibrating,) and len(told.fallen) == 1
    assert {name for name in told.tables if not told.tables[name]["rows"]} == {"calibration"}
    for one in (calibrating, sweep_id):
        assert pages(other, one, tmp_path / "there") == pages(store, one, tmp_path / "here")
        assert other.judge_input(one) == store.judge_input(one)
        assert other.sweep(one) == store.sweep(one)
        heard = [[replace(event, seq=0) for event in held.events(one)] for held in (store, other)]
        assert heard[0] == heard[1]
    again = exported(other, sweep_id, tmp_path / "again")
    assert again.read_bytes() == file.read_bytes()
    assert judge_sweep(other, sweep_id) == judge_sweep(store, sweep_id)


def test_importing_twice_changes_nothing_and_other_content_is_refused(
    pair: tuple[Store, Store], documents: Any, file: Path
) -> None:
    store, other = pair
    sweep_id = put(store, documents.sweep())
    judge_sweep(store, sweep_id)
    exported(store, sweep_id, file)
    first, second = other.import_sweep(file), other.import_sweep(file)
    assert (first.was_there, second.was_there) == (False, True)
    assert first.digest == second.digest == transfer.read(file).digest
    assert store.import_sweep(file).was_there, "also where it came from"
    assert len(other.events(sweep_id)) == len(store.events(sweep_id))
    assert file.stat().st_size * 4 < len(gzip.decompress(file.read_bytes()))
    store.retract(sweep_id, "the fan was blocked", "Ada")
    exported(store, sweep_id, file)
    with pytest.raises(Conflict, match=r"with other content than in .*: sweep, event"):
        other.import_sweep(file)
    verdict = other.verdict(sweep_id)
    assert verdict is not None and verdict.outcome != "RETRACTED"


def test_a_submission_that_is_there_under_another_id_is_named(
    sqlite: Store, clock: Clock, documents: Any, file: Path, tmp_path: Path
) -> None:
    doc = documents.sweep()
    sweep_id = put(sqlite, doc)
    judge_sweep(sqlite, sweep_id)
    with Store.open(f"sqlite:///{tmp_path / 'two.sqlite'}", clock) as other:
        there = other.submit(doc.manifest, "h" * 64, "0.1")
        with pytest.raises(Conflict, match=f"sweep {there} of this store is of the same submission as {sweep_id}"):
            other.import_sweep(exported(sqlite, sweep_id, file))
        assert [row.id for row in other.sweeps()] == [there]


def test_what_is_open_is_not_exported(sqlite: Store, file: Path) -> None:
    sweep_id = submitted(sqlite)
    with pytest.raises(SpecError, match=f"is open.*assay cancel {sweep_id}"):
        exported(sqlite, sweep_id, file)


def replaced(old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    def change(lines: list[bytes]) -> list[bytes]:
        assert any(old in line for line in lines)
        return [line.replace(old, new) for line in lines]

    return change


DAMAGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], bool, str]] = {
    "cut off": (lambda lines: lines[:-1], False, "no whole export"),
    "a row lost": (lambda lines: [*lines[:4], *lines[5:]], False, "its digests are not those"),
    "a word changed": (replaced(b'"length"', b'"eos"'), False, "its digests are not those"),
    "newer": (replaced(b'"revision":"', b'"revision":"9'), True, "was exported at revision 9.*use the newer assay"),
    "older in word": (replaced(b'"revision":"' + head().encode(), b'"revision":"0008'), True, "other columns than a"),
    "another form": (replaced(b"assay.export/1", b"assay.export/2"), True, "its form is 'assay.export/2'"),
    "no text at all": (lambda _: [b"hello\n"], False, "a line is no JSON"),
    "empty": (lambda _: [], False, "a line is no JSON"),
    "another column": (replaced(b'"submit_key"', b'"submit_word"'), True, "table sweep has other columns"),
    "an unknown table": (replaced(b'{"table":"seam"', b'{"table":"seams"'), True, "other columns than a"),
    "of another sweep": (replaced(b'"sweep":"swp_', b'"sweep":"swp_X'), True, "does not come back as it is"),
    "a row that is none": (lambda lines: [*lines[:2], b"5\n", *lines[2:]], True, "a row is not as its table"),
    "a row too many": (lambda lines: [*lines[:3], lines[2].replace(b"swp_", b"swp_Z"), *lines[3:]], True, "."),
    "a state that is none": (replaced(b'"judged"', b'"odd"'), True, "."),
    "no manifest": (replaced(b"residency", b"resi\\u0000dency"), True, "."),
    "a document that is none": (replaced(b"cells_expected", b"cells_wanted"), True, "its rows cannot be read"),
}


def test_a_file_that_is_not_as_it_was_written_changes_nothing(
    sqlite: Store, clock: Clock, documents: Any, file: Path, tmp_path: Path
) -> None:
    sweep_id = put(sqlite, documents.sweep())
    judge_sweep(sqlite, sweep_id)
    whole = exported(sqlite, sweep_id, file).read_bytes()
    with Store.open(f"sqlite:///{tmp_path / 'two.sqlite'}", clock) as other:
        for name, (change, forged, says) in DAMAGES.items():
            file.write_bytes(whole)
            rewritten(file, change, digests=forged)
            with pytest.raises(JobsError) as refused:
                other.import_sweep(file)
            assert re.search(says, str(refused.value)), (name, str(refused.value))
            assert other.sweeps() == (), name
        file.write_bytes(whole)
        assert not other.import_sweep(file).was_there


@pytest.mark.parametrize("at", ["0005", "0008"])
def test_an_export_of_an_older_revision_is_migrated_as_its_store_would_be(
    at: str, pair: tuple[Store, Store], sqlite: Store, clock: Clock, documents: Any, file: Path, tmp_path: Path
) -> None:
    sweep_id = put(sqlite, documents.sweep())
    verdict = judge_sweep(sqlite, sweep_id)
    older = Database(f"sqlite:///{tmp_path / 'one.sqlite'}")
    older.write(lambda c: command.downgrade(revision._config(c, None), at))
    _written_at(at, tmp_path / "one.sqlite", sweep_id, file)
    revision.upgrade(older)
    older.close()
    _, other = pair
    made = other.import_sweep(file)
    assert (made.sweep_id, made.was_there) == (sweep_id, False)
    assert other.verdict(sweep_id) == verdict and judge_sweep(other, sweep_id) == verdict
    upgraded = exported(sqlite, sweep_id, tmp_path / "upgraded").read_bytes()
    assert exported(other, sweep_id, tmp_path / "again").read_bytes() == upgraded
    assert other.import_sweep(file).was_there, "the same file once more changes nothing"


def _written_at(at: str, store: Path, sweep_id: str, file: Path) -> None:
    """An export as the assay of that revision wrote it: its tables and columns, as they stand in the database."""
    with closing(sqlite3.connect(store)) as rows:
        lines = [line_of({"schema": SCHEMA, "revision": at, "sweep": sweep_id})]
        there = {name for (name,) in rows.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for name in (table.name for table in TABLES if table.name in there):
            columns = [told[1] for told in rows.execute(f"PRAGMA table_info({name})")]
            wanted = [column for column in columns if (name, column) != ("event", "seq")]
            lines.append(line_of({"table": name, "columns": wanted}))
            for row in rows.execute(f"SELECT {', '.join(wanted)} FROM {name} ORDER BY rowid"):
                lines.append(line_of([b64encode(c).decode() if isinstance(c, bytes) else c for c in row]))
    file.write_bytes(gzip.compress(b"".join((*lines, line_of({"rests_on": [], "fallen": []})))))
    rewritten(file, lambda told: told, digests=True)


def test_bytes_that_are_damaged_or_cut_off_are_no_export(sqlite: Store, documents: Any, file: Path) -> None:
    sweep_id = put(sqlite, documents.sweep())
    judge_sweep(sqlite, sweep_id)
    whole = exported(sqlite, sweep_id, file).read_bytes()
    middle = len(whole) // 2
    deep = gzip.compress(b"[" * 200_000 + b"\n")  # as a first line, and as a row
    rows = gzip.decompress(whole).splitlines(keepends=True)
    among = gzip.compress(b"".join((*rows[:2], b"[" * 200_000 + b"\n", *rows[2:])))
    for spoilt in (
        deep,
        among,
        whole[:middle],
        whole[:middle] + bytes(9) + whole[middle + 9 :],
        b"PK" + whole,
        whole[:-1],
    ):
        file.write_bytes(spoilt)
        with pytest.raises(SpecError, match="is no whole export of a sweep"):
            sqlite.import_sweep(file)


def test_a_verdict_that_is_struck_out_by_what_is_elsewhere_does_not_come_alone(
    sqlite: Store, clock: Clock, documents: Any, file: Path, tmp_path: Path
) -> None:
    """Its golden is retracted in the first store; where nothing tells that, it would read as in force."""
    calibrating, sweep_id = rich_sweep(sqlite, clock, documents)
    exported(sqlite, sweep_id, file)
    rewritten(file, lambda lines: [*lines[:-1], json.dumps({**json.loads(lines[-1]), "fallen": ["gld_1"]}).encode()])
    with Store.open(f"sqlite:///{tmp_path / 'two.sqlite'}", clock) as other:
        with pytest.raises(SpecError, match=f"struck out by gld_1.*import what it rests on first: {calibrating}"):
            other.import_sweep(file)
        assert other.sweeps() == ()
        assert other.import_sweep(exported(sqlite, sweep_id, file)).absent == (calibrating,)


def test_every_table_is_exported_or_said_not_to_be() -> None:
    assert set(metadata.tables) - {table.name for table in TABLES} == {"card", "arm_pack", "arm_chunk"}, "of a store"
    for table in TABLES:
        for foreign in table.foreign_keys:
            assert TABLES.index(foreign.column.table) < TABLES.index(table)
