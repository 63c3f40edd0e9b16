"""What judging many cells costs, by ratios that hold on any machine: no more than in step with the cells."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from benchmarks.judge_cells import fill, judged, sweep
from jobs import collector
from jobs.judge import input_digest, judge, judge_read, normalise
from jobs.model import Missing, Reading, SequenceTokens, as_read
from jobs.store import Store
from jobs.verdict import MetricRow, Verdict

CELL_BYTES = 50_000
"""Of a cell's verdict: 42 rows of metrics, 20 equations, 2 arms. It was 106,000 with a set of told fields in each."""


def test_four_times_the_cells_cost_four_times_the_time() -> None:
    """Twice that is allowed: what grew with the square of the cells would be sixteen times."""
    few, many = sweep(40), sweep(160)
    judged(few)  # imports, caches of expressions
    assert _cpu_s(lambda: judged(many)) < 2 * 4 * _cpu_s(lambda: judged(few))


def test_a_cells_verdict_is_small() -> None:
    doc = sweep(20)
    judged(doc)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        verdict = judged(doc)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(verdict.cells) < CELL_BYTES


def test_the_benchmarks_store_is_judged_as_its_document_is(tmp_path: Path) -> None:
    """Cells that are copied in the store are read back as the first one was measured, and all are judged."""
    url = f"sqlite:///{tmp_path}/store.db"
    fill(url, 3)
    with Store.open(url, lambda: datetime.now(UTC)) as store:
        [row] = store.sweeps()
        verdict = judged(store.judge_input(row.id))
        assert store.judged(row.id, judge_read) == verdict
        store.write_verdict(row.id, verdict, verdict.input_digest)
        kept = store.verdict(row.id)
    direct = judged(sweep(3))
    assert kept == verdict and kept.digest() == verdict.digest()
    assert [cell.outcome for cell in verdict.cells] == ["IMPROVED"] * 3
    assert [row.delta for row in verdict.cells[2].exact] == [row.delta for row in direct.cells[2].exact]


def test_rows_made_without_reading_them_again_are_what_reading_gives() -> None:
    """Every row of a verdict, whether made or validated, is the row that its own JSON gives."""
    verdict = judged(sweep(1))
    again = Verdict.model_validate_json(verdict.canonical())
    assert again == verdict
    made = verdict.cells[0].exact[0]
    told = {**dict(made), "note": "other"}
    assert made.model_copy(update={"note": "other"}) == MetricRow.model_validate(told) == MetricRow.made(**told)
    assert hash(Missing(missing="x")) == hash(Missing.made(missing="x"))


@pytest.mark.parametrize("gap", [0.25, math.nan, -math.inf])
def test_an_input_is_digested_as_its_pieces_dump(gap: float) -> None:
    """Nothing of an input is dumped for its digest, which is nevertheless that of what a dump gives."""
    [cell] = sweep(1).cells
    run = cell.runs[0]
    assert run.record is not None
    [one] = run.record.generations
    tokens = SequenceTokens(ids=one.ids, stop_reason="length", gaps=tuple(gap for _ in one.ids))
    more = {
        "generations": (one.model_copy(update={"further": (tokens,)}),),
        "device": {"odd": [gap, {"b": 1, "a": None}]},
    }
    counters = {**run.record.counters, "segments": Missing(missing="lost\u00e9"), "modelled_ns": 2.0}
    told = run.model_copy(update={"record": run.record.model_copy(update={**more, "counters": counters})})
    doc = normalise(sweep(1).model_copy(update={"cells": (cell.model_copy(update={"runs": (told, *cell.runs[1:])}),)}))
    whole = json.dumps(doc.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    assert input_digest(doc) == hashlib.sha256(whole.encode()).hexdigest()


def test_a_figure_is_kept_as_its_own_json_is_read() -> None:
    whole = (1.0, -0.0, 2.0**62, -(2.0**62), 1e15)
    other = (0.5, 2.0**63, 1e300, math.inf, 3, 2**70, Missing(missing="x"))
    reads = TypeAdapter(Reading)
    for value in (*whole, *other):
        kept, read = as_read(value), reads.validate_python(value)
        assert (type(kept), kept) == (type(read), read), value
    assert [type(as_read(value)) for value in whole] == [int] * 5


def test_much_that_was_built_while_the_collector_waited_is_old() -> None:
    """Else the first search afterwards goes through all of it; little stays young, and nothing is left frozen."""
    for count, is_old in ((2 * collector.MANY, True), (100, False)):
        gc.collect()
        gc.disable()  # so that no search of its own makes anything old
        try:
            with collector.paused():
                made = [[number] for number in range(count)]
            young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
        finally:
            gc.enable()
        assert all((id(one) not in young) is is_old for one in made)
        assert gc.get_freeze_count() == 0


def test_the_collector_works_on_after_a_judgement_and_after_one_that_fails() -> None:
    assert gc.isenabled()
    judge(normalise(sweep(1)))
    assert gc.isenabled()
    try:
        with collector.paused():
            assert not gc.isenabled()
            raise ValueError
    except ValueError:
        assert gc.isenabled()
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled(), "whoever had it off keeps it off"
    finally:
        gc.enable()


def _cpu_s(action: object) -> float:
    """The least of three: what else the machine does only adds."""
    assert callable(action)
    took = []
    for _ in range(3):
        began_s = time.process_time()
        action()
        took.append(time.process_time() - began_s)
    return min(took)
