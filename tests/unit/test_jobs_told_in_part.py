"""What is told in part reads as told by nobody: times of some generations or runs, counters among facts, lost runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import AttemptFact, Gate, Generation, JudgeInput, RunFact, Witness
from jobs.reviewed import Expectation
from jobs.verdict import Verdict

TIME = Gate(time="block")
Change = Callable[[RunFact, Generation], dict[str, Any]]


def judged(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def of_head(documents: Any, doc: JudgeInput, change: Change) -> JudgeInput:
    """The document with generations of head changed."""

    def changed(run: RunFact) -> RunFact:
        if run.arm != "head" or run.record is None:
            return run
        told = tuple(one.model_copy(update=change(run, one)) for one in run.record.generations)
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": told})})

    made: JudgeInput = documents.replace_runs(doc, changed)
    return made


@pytest.mark.parametrize(
    ("field", "nothing", "metric"),
    [("step_ns", (), "decode_ms_per_token"), ("prefill_ns", 0, "prefill_ms")],
)
@pytest.mark.parametrize("by_run", [False, True])
def test_times_of_the_fast_ones_alone_are_no_sample(
    documents: Any, field: str, nothing: Any, metric: str, by_run: bool
) -> None:
    """A program that leaves out the times of slow generations, or of slow runs, would choose its own median."""
    doc = documents.sweep(cell={"blocks": 6}, gate=TIME)
    assert judged(doc).exit_code == 0
    told = of_head(
        documents,
        doc,
        lambda run, one: {field: nothing} if (run.position > 2 if by_run else one.index != 1) else {},
    )
    verdict = judged(told)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    row = next(row for row in verdict.cells[0].time if row.metric == metric)
    assert row.klass == "NO_VALID_SAMPLE"
    if by_run:
        assert "6 of 12 runs of head gave no time" in row.note
    else:
        assert "2 of 3 generations" in row.head_median.missing  # type: ignore[union-attr]


def test_times_that_are_worse_where_they_are_told_stay_worse(documents: Any) -> None:
    slow = documents.stable_arm(step_ns=lambda block, run: 30_000_000 + 1000 * block + run)
    doc = documents.sweep(head=slow, cell={"blocks": 12}, gate=TIME)
    told = of_head(documents, doc, lambda run, _one: {"step_ns": ()} if run.position > 2 else {})
    assert judged(told).outcome == "TIME_WORSE"


def test_a_fact_by_a_counter_s_name_is_no_counter(documents: Any) -> None:
    """Else it would be compared and met witnesses, and what looks for impossible counters would not see it."""

    def among_facts(run: RunFact) -> RunFact:
        record = run.record
        if run.arm != "head" or record is None:
            return run
        counters = {n: v for n, v in record.counters.items() if n not in ("fallbacks", "captures", "replays")}
        facts = {**record.facts, "fallbacks": -5, "captures": 5}
        return run.model_copy(update={"record": record.model_copy(update={"counters": counters, "facts": facts})})

    plain = documents.sweep(cell={"witnesses": (Witness(expr="captures > 0"),)})
    assert judged(plain).exit_code == 0
    verdict = judged(documents.replace_runs(plain, among_facts))
    assert (verdict.outcome, verdict.exit_code) == ("VACUOUS", 3)
    verdict = judged(documents.replace_runs(documents.sweep(), among_facts))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "fallbacks gates and could not be compared: head: not recorded" in verdict.headline


@pytest.mark.parametrize("arm", ["base", "head"])
def test_runs_that_were_made_besides_do_not_stand_in_for_planned_ones(documents: Any, arm: str) -> None:
    doc = documents.sweep(cell={"blocks": 6})
    plan = doc.cells[0].plan.model_copy(update={"blocks": 2, "fresh_blocks": 4})
    cells = (doc.cells[0].model_copy(update={"plan": plan}),)
    manifest = doc.manifest.model_copy(update={"cells": (plan,)})
    doc = doc.model_copy(update={"cells": cells, "manifest": manifest})
    assert judged(doc).exit_code == 0
    short = documents.replace_runs(doc, lambda run: None if (run.arm, run.block) == (arm, 0) else run)
    verdict = judged(short)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert f"2 of 12 runs of {arm} are missing" in verdict.headline


def test_without_an_identity_gate_a_program_that_tells_no_ids_is_compared(documents: Any) -> None:
    def counters(_steps: int) -> Any:
        return documents.lru(96)

    silent: dict[str, Any] = {"ids": lambda _run, _generation: (), "counters": counters, "emitted": 0}
    base, head = documents.arm(**silent), documents.arm(**silent)
    off = judged(documents.sweep(base=base, head=head, gate=Gate(identity="off")))
    assert (off.outcome, off.exit_code, off.findings) == ("PASS", 0, ())
    assert judged(documents.sweep(base=base, head=head)).exit_code != 0
    worse = documents.arm(**silent, changes={"segments": 2})
    assert judged(documents.sweep(base=base, head=worse, gate=Gate(identity="off"))).outcome == "REGRESSED"


@pytest.mark.parametrize(("sent", "said"), [(11, True), (9, False)])
def test_a_crash_that_another_attempt_did_not_meet_is_told(documents: Any, sent: int, said: bool) -> None:
    """A kill is the host's doing, and no word on head."""

    def tried_twice(run: RunFact) -> RunFact:
        if run.arm != "head" or run.record is None:
            return run
        first = AttemptFact(attempt_id="att_0", number=1, state="failed", reason=f"crash: ended by signal {sent}")
        again = run.attempts[0].model_copy(update={"number": 2})
        record = run.record.model_copy(update={"attempt_number": 2})
        return run.model_copy(update={"attempts": (first, again), "record": record})

    verdict = judged(documents.replace_runs(documents.sweep(), tried_twice))
    told = "2 attempts of head ended by its own doing where another at the same run did not: crash: ended by signal 11"
    assert (told in verdict.cells[0].notes) is said
    assert verdict.exit_code == 0


def test_a_null_arm_that_gave_no_time_is_not_taken_for_a_steady_host(documents: Any) -> None:
    slow = documents.stable_arm(step_ns=lambda block, run: 30_000_000 + 1000 * block + run)
    doc = documents.sweep(head=slow, cell={"blocks": 12}, gate=TIME)

    def hot(run: RunFact) -> RunFact:
        if run.arm != "null" or run.block < 4 or run.record is None or run.record.certificate is None:
            return run
        told = run.record.certificate.model_copy(update={"verdict": "throttled", "reasons": ("hot",)})
        return run.model_copy(update={"record": run.record.model_copy(update={"certificate": told})})

    row = judged(documents.replace_runs(doc, hot)).cells[0].time[0]
    assert (row.klass, "the null arm gave times in 0 blocks" in row.note) == ("WORSE", True)
    assert "null arm" not in judged(doc).cells[0].time[0].note


@pytest.mark.parametrize(
    ("claim", "left", "outcome"),
    [({}, 0, "REGRESSED"), ({}, 1, "DECLARED"), ({"at_most": 4}, 0, "DECLARED"), ({"at_most": 3}, 0, "REGRESSED")],
)
def test_fewer_segments_declared_are_not_none(documents: Any, claim: Any, left: int, outcome: str) -> None:
    """Of a program that tells no replays, `change: lower` alone would excuse that nothing is captured any more."""
    plain = {"captures": None, "replays": None}
    base = documents.arm(changes={**plain, "segments": 4})
    head = documents.arm(changes={**plain, "segments": left})
    declared = Expectation(metric="segments", change="lower", reason="merged", added=True, **claim)
    verdict = judged(documents.sweep(base=base, head=head, expectations=(declared,)))
    row = next(row for row in verdict.cells[0].exact if row.metric == "segments")
    assert (row.klass.upper(), verdict.exit_code) == (outcome, int(outcome == "REGRESSED"))
