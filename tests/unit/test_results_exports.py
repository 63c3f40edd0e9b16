"""Exports that stand beside results: each comes into an empty store, and its page names the sweep and its verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs import timeline
from jobs.store import Store
from reports.pictures import card
from tests.unit.store_sweeps import Clock

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EXPORTS = sorted(RESULTS.glob("*/*.assay"))
FOLDERS = sorted({file.parent for file in EXPORTS})


def test_there_are_some() -> None:
    assert len(EXPORTS) >= 7


def cited(folder: Path) -> dict[str, tuple[str, str]]:
    """Sweep and verdict of each export, as the folder's page tells them."""
    told = (RESULTS / f"{folder.name}-product.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| `(swp_\w+)` \| (\w+) \|$", told, re.MULTILINE)
    assert set(re.findall(r"swp_\w+", told)) == {sweep for _, sweep, _ in rows}
    return {name: (sweep, verdict) for name, sweep, verdict in rows}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("only", ["dense-noise", pytest.param("*", marks=pytest.mark.slow)])
def test_what_a_page_of_results_cites_is_in_its_exports(folder: Path, only: str, tmp_path: Path) -> None:
    """All of a folder into one store, whatever revision each is of."""
    wanted = cited(folder)
    assert sorted(wanted) == sorted(file.stem for file in folder.glob("*.assay"))
    with Store.open(f"sqlite:///{tmp_path / 'one.sqlite'}", Clock()) as store:
        imported, absent = {}, set()
        for file in folder.glob(f"{only}.assay"):
            made = store.import_sweep(file)
            verdict = store.verdict(made.sweep_id)
            assert verdict is not None
            imported[file.stem] = (made.sweep_id, verdict.outcome)
            absent |= set(made.absent)
    assert imported == {name: wanted[name] for name in imported} and len(imported) == (
        1 if only != "*" else len(wanted)
    )
    assert not absent - {sweep for sweep, _ in imported.values()}, "exports rest on sweeps that are not beside them"


def test_a_run_on_a_card_was_timed_where_its_certificate_says_and_at_the_clock_that_it_shows(tmp_path: Path) -> None:
    """Times by the engine's clock, samples by the watch's: the two meet in one picture."""
    with Store.open(f"sqlite:///{tmp_path / 'one.sqlite'}", Clock()) as store:
        doc = store.judge_input(store.import_sweep(RESULTS / "h200" / "residency.assay").sweep_id)
    records = [run.record for cell in doc.cells for run in cell.runs if run.record is not None]
    assert len(records) >= 6
    for record in records:
        assert record.certificate is not None
        along = timeline.read(record.certificate.during)
        assert along is not None and along.timed_ms is not None and along.warm_up_ms is not None
        start, end = along.timed_ms
        measured = [item for item in record.generations if not item.warmup]
        lasted_ms = sum(item.prefill_ns + sum(item.step_ns) for item in measured) / 1e6
        assert lasted_ms - 1 * len(measured) <= end - start <= 1.2 * lasted_ms + 100, record.run_id
        assert along.warm_up_ms[1] <= start + 1 and end <= along.end_ms + 1_000
        clock = next(
            bar for _, bars in card.build(record.certificate, along).groups for bar in bars if bar.label == "SM clock"
        )
        assert "timed region 1,980 MHz" in clock.reading or clock.reading == "1,980 MHz throughout", clock.reading
