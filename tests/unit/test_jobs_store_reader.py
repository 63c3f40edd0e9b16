"""A store read in parts says what it says read whole, finds what a filter asks for, and takes no write."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from jobs.errors import SpecError, StoreError
from jobs.store import Store, verdict_parts
from jobs.store.connect import Database
from jobs.store.listing import SweepFilter
from jobs.store.reader import Reader
from jobs.store.verdict_parts import CellFilter
from orchestrator.conclude import judge_sweep
from tests.unit import reports_samples as samples
from tests.unit.conftest import Documents
from tests.unit.reports_parsing import Page
from tests.unit.served_store import LARGE, Served, put
from tests.unit.store_sweeps import measured_sweep, submitted

pytest_plugins = ("tests.unit.jobs_store_cases", "tests.unit.served_store")


def names(served: Served, **asked: str) -> list[str]:
    """The sweeps that fit, by what they are."""
    by_id = {sweep_id: name for name, sweep_id in served.sweeps.items()}
    return [by_id[line.id] for line in served.reader.sweeps(SweepFilter(**asked), 1, 50).rows]  # type: ignore[arg-type]


def test_parts_are_those_of_the_whole(served: Served) -> None:
    for name in ("broken", "large", "hostile", "retracted", "measured"):
        sweep_id = served.sweeps[name]
        whole = served.store.verdict(sweep_id)
        assert whole is not None
        now = served.reader.overview(sweep_id, LARGE, 1000)
        assert now.verdict == whole
        assert dict(now.cells) == Counter(cell.outcome for cell in whole.cells)
        assert now.findings == len(whole.findings)
        assert served.reader.findings(sweep_id, 1, 1000)[1].rows == whole.findings
        paged = [served.reader.cells(sweep_id, CellFilter(), number, 40).verdict.cells for number in (1, 2, 3, 4)]
        assert sorted(cell.cell for page in paged for cell in page) == sorted(cell.cell for cell in whole.cells)
        for cell in whole.cells[:2]:
            part = served.reader.overview(sweep_id, 0, 0)
            assert part.verdict is not None and part.verdict.cells == () and part.verdict.outcome == whole.outcome
            assert cell in served.reader.cells(sweep_id, CellFilter(text=cell.cell), 1, 100).verdict.cells


def test_a_page_of_cells_is_the_worst_first_and_the_next_goes_on(served: Served) -> None:
    sweep_id = served.sweeps["large"]
    pages = [served.reader.cells(sweep_id, CellFilter(), number, 50) for number in (1, 2, 3, 4)]
    assert [len(page.page.rows) for page in pages] == [50, 50, LARGE - 100, 0]
    assert {page.page.total for page in pages} == {LARGE} and pages[0].page.last == 3
    codes = [cell.exit_code for page in pages for cell in page.verdict.cells]
    assert codes == sorted(codes, reverse=True) and set(codes) == {0, 1}


def test_a_page_of_cells_has_the_findings_of_each(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cells a page has: what bounds their number is counted by the cell."""
    sweep_id = served.sweeps["large"]
    whole = served.store.verdict(sweep_id)
    assert whole is not None
    by_cell = Counter(one.cell for one in whole.findings)
    monkeypatch.setattr(verdict_parts, "FINDINGS_OF_A_CELL", max(by_cell.values()))
    for number in (1, 2, 3):
        page = served.reader.cells(sweep_id, CellFilter(), number, 50)
        due = [one for one in whole.findings if one.cell in page.page.rows]
        assert list(page.verdict.findings) == due
    assert len(due) < len(whole.findings)


def test_a_sweep_is_found_by_each_filter(served: Served) -> None:
    assert names(served, state="open") == ["open"]
    assert names(served, verdict="none") == ["open"]
    assert names(served, verdict="RETRACTED") == ["retracted"]
    assert names(served, verdict="VIOLATION") == ["hostile", "broken"]
    assert names(served, text="NIGHTLY of") == ["open"]
    assert names(served, text=served.sweeps["large"]) == ["large"]
    assert names(served, model="MOLLM") == names(served, scenario="/capital/") == ["measured"]
    assert names(served, scenario="cell2", state="open") == ["open"]
    assert names(served, text="100%_\\") == [] == names(served, model="%")
    assert names(served) == ["open", "measured", "bare", "retracted", "hostile", "large", "broken"]


def test_a_list_tells_what_the_verdict_in_force_says(served: Served) -> None:
    told = {line.name: line for line in served.reader.sweeps(SweepFilter(), 1, 50).rows}
    for name, line in told.items():
        whole = served.store.verdict(line.id)
        if whole is None:
            assert (line.verdict, line.cells) == (None, ()) and line.progress == served.store.pending(line.id)
            continue
        assert line.verdict is not None and line.progress is None, name
        assert (line.verdict.outcome, line.verdict.exit_code) == (whole.outcome, whole.exit_code)
        assert line.verdict.headline == whole.headline and line.verdict.struck == whole.struck
        assert dict(line.cells) == Counter(cell.outcome for cell in whole.cells)
        assert dict(line.findings) == Counter(finding.outcome for finding in whole.findings)


def test_a_retracted_run_strikes_its_cell_alone_in_counts_and_filters(store: Store, store_url: str) -> None:

    doc = Documents().sweep()
    [cell] = doc.cells
    twin = cell.model_copy(update={"plan": cell.plan.model_copy(update={"cell": "twin"})})
    manifest = doc.manifest.model_copy(update={"cells": (cell.plan, twin.plan)})
    sweep_id = measured_sweep(store, doc.model_copy(update={"manifest": manifest, "cells": (cell, twin)}))
    judge_sweep(store, sweep_id, final=True)
    gone = next(one for one in store.judge_input(sweep_id).cells if one.plan.cell == "twin").runs[0].run_id
    store.retract(gone, "the card was swapped", "ada")
    whole = store.verdict(sweep_id)
    assert whole is not None
    reader = Reader(store_url, lambda: datetime.now(UTC))
    now = reader.overview(sweep_id, 10, 10)
    assert now.verdict == whole
    assert now.cells == (("RETRACTED", 1), ("IMPROVED", 1))
    struck = reader.cells(sweep_id, CellFilter(outcome="RETRACTED"), 1, 10)
    assert [(one.cell, one.exit_code) for one in struck.verdict.cells] == [("twin", 3)]
    assert reader.cells(sweep_id, CellFilter(outcome="IMPROVED"), 1, 10).page.rows == (cell.plan.cell,)
    assert [line.id for line in reader.sweeps(SweepFilter(verdict="RETRACTED"), 1, 10).rows] == [sweep_id]
    assert reader.sweeps(SweepFilter(verdict="IMPROVED"), 1, 10).rows == ()
    reader.close()


def test_the_newest_answer_to_the_same_question_supersedes(store: Store, store_url: str) -> None:
    first, other, last = (submitted(store, key=key) for key in "abc")
    for one in (first, other, last):
        put(store, one, samples.verdict())
    [cell] = samples.verdict().cells
    arms = tuple(arm.model_copy(update={"engine_digest": "e" * 64}) for arm in cell.arms)
    engine = cell.model_copy(update={"arms": arms})
    put(store, other, samples.verdict().model_copy(update={"cells": (engine,)}))
    reader = Reader(store_url, lambda: datetime.now(UTC))
    told = {line.id: line.superseded_by for line in reader.sweeps(SweepFilter(), 1, 10).rows}
    assert told == {last: "", other: "", first: last}
    store.retract(last, "the fan had failed", "ada")
    assert {line.superseded_by for line in reader.sweeps(SweepFilter(), 1, 10).rows} == {""}
    reader.close()


def test_a_cell_is_read_with_its_own_rows(served: Served) -> None:
    doc = served.store.judge_input(served.sweeps["measured"])
    [cell] = doc.cells
    part = served.reader.cell(served.sweeps["measured"], cell.plan.cell, 1, 50)
    assert part.doc == doc.model_copy(update={"stamp": doc.stamp.model_copy(update={"cards": ()})})
    assert part.verdict == served.store.verdict(served.sweeps["measured"])
    assert part.blocks == cell.plan.blocks
    first = served.reader.cell(served.sweeps["measured"], cell.plan.cell, 1, 1).doc.cells[0].runs
    assert {run.block for run in first} == {0} and served.reader.cell(part.row.id, cell.plan.cell, 999, 1).doc.cells[
        0
    ].runs == ()
    with pytest.raises(SpecError, match="has no cell 'nowhere'"):
        served.reader.cell(part.row.id, "nowhere", 1, 1)


def test_both_stores_give_the_same_pages(served: Served) -> None:
    """Every kind of page is there, whichever database answers."""
    at, measured = f"/sweeps/{served.sweeps['large']}", f"/sweeps/{served.sweeps['measured']}"
    [cell] = served.store.judge_input(served.sweeps["measured"]).cells
    name = cell.plan.cell.replace("%", "%25")
    paths = ("/?model=smol&scenario=cap", at, f"{at}/cells?text=1", f"{at}/findings", f"{measured}/progress")
    for path in (
        *paths,
        f"{measured}/cell?name={name}",
        f"{measured}/scenario?name={name}",
        f"/sweeps/{served.sweeps['open']}",
    ):
        answer = served.client().get(path)
        assert answer.status_code == 200 and Page(answer.text).unbalanced == [], path
    api = [path.replace("/sweeps/", "/api/v1/sweeps/") for path in (at, f"{at}/cells", f"{measured}/cell?name={name}")]
    for path in (*api, "/api/v1/sweeps", f"/api/v1/runs/{cell.runs[0].run_id}", "/api/v1/cards"):
        assert served.client().get(path).json() is not None


def test_the_database_itself_refuses_a_write(served: Served) -> None:
    database = Database(served.url, read_only=True)
    with pytest.raises(StoreError, match=r"read-?only"):
        database.write(lambda c: c.execute(text("UPDATE sweep SET name = 'mine'")))
    with pytest.raises(StoreError, match=r"read-?only"):
        database.read(lambda c: c.execute(text("DELETE FROM verdict")))
    database.close()


def test_a_store_that_is_missing_or_of_another_revision_is_refused(
    tmp_path: Path, store_url: str, store: Store
) -> None:
    with pytest.raises(StoreError, match=r"no store at .*assay db upgrade"):
        Reader(f"sqlite:///{tmp_path / 'none.sqlite'}", store._clock)
    assert not (tmp_path / "none.sqlite").exists()
    reader = Reader(store_url, store._clock)
    assert reader.sweeps(SweepFilter(), 1, 1).total == 0
    database = Database(store_url)
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '0009'")))
    with pytest.raises(StoreError, match=r"at revision 0009, this assay needs .*assay db upgrade"):
        reader.sweeps(SweepFilter(), 1, 1)
    with pytest.raises(StoreError, match="at revision 0009"):
        Reader(store_url, store._clock)
    database.close()
    reader.close()


def test_a_file_that_goes_away_is_told_and_not_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    Store.open(f"sqlite:///{file}", lambda: datetime.now(UTC)).close()
    reader = Reader(f"sqlite:///{file}", lambda: datetime.now(UTC))
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="unable to open"):
        reader.sweeps(SweepFilter(), 1, 1)
    assert not file.exists()
    reader.close()
