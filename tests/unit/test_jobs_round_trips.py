"""Every number of a verdict is what reading it back gives, in memory and from both stores: its digest stands for it."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.document import Document
from jobs.judge import judge
from jobs.model import JudgeInput, Missing, RunFact, Witness
from jobs.retracted import struck
from jobs.reviewed import Reviewed, Waiver
from jobs.store import Store
from jobs.verdict import Retraction, Verdict
from orchestrator.conclude import judge_sweep
from tests.unit.store_sweeps import Clock
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)

WHOLE = (0, 1, 32, 2**31, 2**53 + 1, 2**63 - 1)
NUMBERS = st.one_of(
    st.sampled_from((*WHOLE, *map(float, WHOLE), *(32e6 * n for n in (1, 2, 3)), -0.0, 0.1, 1e-320, 1e16, 1e300, -1.0)),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.builds(float, st.integers(-(2**40), 2**40)),
)
TIMED = Witness(expr="modelled_ms_per_token >= 0")
NAMES = ("modelled_ns", "min_logit_margin", "htod_bytes", "hits", "segments", "a_counter_of_theirs")


def told(doc: JudgeInput, counters: dict[str, Any], facts: dict[str, Any], gap: float) -> JudgeInput:
    """The document with further figures in every run of head, and gaps of one value in all of them."""

    def run_with(run: RunFact) -> RunFact:
        assert run.record is not None
        generations = tuple(one.model_copy(update={"gaps": (gap,) * len(one.ids)}) for one in run.record.generations)
        own = {"counters": {**run.record.counters, **counters}, "facts": {**run.record.facts, **facts}}
        changed = {"generations": generations, **(own if run.arm == "head" else {})}
        return run.model_copy(update={"record": run.record.model_copy(update=changed)})

    cells = tuple(cell.model_copy(update={"runs": tuple(map(run_with, cell.runs))}) for cell in doc.cells)
    return doc.model_copy(update={"cells": cells})


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counters=st.dictionaries(st.sampled_from(NAMES), st.one_of(NUMBERS, st.just(Missing(missing="lost"))), min_size=1),
    facts=st.dictionaries(st.sampled_from(("weight_bytes", "floor_bytes_per_token", "of_theirs")), NUMBERS),
    gap=st.floats(0, 1e3),
)
def test_a_verdict_is_what_reading_it_gives(
    documents: Any, counters: dict[str, Any], facts: dict[str, Any], gap: float
) -> None:
    cell = {"witnesses": (*documents.plan(()).witnesses, TIMED)}
    verdict = judge(told(documents.sweep(cell=cell), counters, facts, gap))
    assert isinstance(verdict, Verdict)
    again = Verdict.model_validate_json(verdict.canonical())
    assert again == verdict
    assert again.canonical() == verdict.canonical(), "1 == 1.0, and they are written apart"


@pytest.mark.parametrize("nanoseconds", [192e6, 192_000_000, 192e6 + 16])
def test_a_figure_that_comes_out_whole_keeps_its_digest_in_the_store(
    store: Store, clock: Clock, documents: Any, nanoseconds: float
) -> None:
    """2 ms a token, made of nanoseconds, is 2.0 to Python and 2 to a reader."""
    doc = documents.sweep(cell={"witnesses": (TIMED,)})
    sweep_id = put(store, told(doc, {"modelled_ns": nanoseconds}, {}, 0.5))
    verdict = judge_sweep(store, sweep_id)
    kept = store.verdict(sweep_id)
    assert kept is not None
    assert kept.canonical() == verdict.canonical() and kept.digest() == verdict.digest()
    [row] = [row for row in kept.cells[0].exact if row.metric == "modelled_ms_per_token"]
    assert (row.head, type(row.head)) == ((2, int) if nanoseconds == 192e6 else (row.head, float))


def test_every_piece_is_written_as_its_dump_is(documents: Any) -> None:
    """Nothing is dumped to be written: what a piece leaves out, and the names and days in it, are as if it were."""
    day = {"written": "2026-11-01", "expires": "2026-12-31"}
    words = {"metric": "segments", "outcome": "REGRESSED", "reason": "known", "evidence": "e", "by": "Ada"}
    waiver = Waiver.model_validate({"cell": "*", **words, **day})
    head = documents.stable_arm(changes={"segments": 2}, ids=lambda _run, gen: (*documents.IDS[:7], 1 + gen))
    doc = documents.sweep(head=head, reviewed=Reviewed(at="c" * 40, waivers=(waiver,)))
    stamp = doc.stamp.model_copy(update={"created_at": "2026-11-30T00:00:00+00:00"})
    verdict = judge(doc.model_copy(update={"stamp": stamp}), runs_more=False)
    assert isinstance(verdict, Verdict)
    found: Counter[str] = Counter()
    left: list[Any] = [doc, verdict, struck(verdict, [Retraction(kind="sweep", id="swp_1", reason="r", at="t")])]
    while left:
        piece = left.pop()
        if isinstance(piece, Document):
            dump = json.dumps(piece.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
            assert piece.canonical() == dump, type(piece)
            found[type(piece).__name__] += 1
        inner = piece.__dict__ if isinstance(piece, Document) else piece
        left += inner.values() if isinstance(inner, dict) else inner if isinstance(inner, tuple) else ()
    assert {"Waiver", "Finding", "MetricRow", "IdentityRow", "TimeRow", "StruckOut", "Generation"} <= found.keys()
    with pytest.raises(TypeError, match="a datetime has no place in a document"):
        Missing.made(missing=datetime(2026, 1, 1, tzinfo=UTC)).canonical()
