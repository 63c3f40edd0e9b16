"""What a near tie leaves of counters and times: what is worse counts, a gain does not, and lengths must be equal."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.contract import IdentityContract
from jobs.model import Gate, Generation, JudgeInput, RunFact, RunSettings, SequenceTokens
from jobs.verdict import Verdict
from tests.unit.test_jobs_near_tie import agreeing, asked_by, flipped, judged, near

ALLOW = IdentityContract(near_ties="allow")
SETTINGS = RunSettings(tokens=32, generations=3)


def excused(doc: JudgeInput) -> Verdict:
    """The verdict when the oracle excuses every difference."""
    return judged(doc, *[agreeing(asked) for asked in asked_by(doc)])


def classes(verdict: Verdict) -> dict[str, str]:
    return {row.metric: row.klass for row in verdict.cells[0].exact}


def scaled(documents: Any, doc: JudgeInput, factor: float) -> JudgeInput:
    """Head moves `factor` times the bytes."""

    def one(run: RunFact) -> RunFact:
        assert run.record is not None
        moved = ("htod_bytes", "device_htod_bytes", "retained_bytes")
        more = {name: int(run.record.counters[name] * factor) for name in moved}  # type: ignore[operator]
        counters = {**run.record.counters, **(more if run.arm == "head" else {})}
        return run.model_copy(update={"record": run.record.model_copy(update={"counters": counters})})

    made: JudgeInput = documents.replace_runs(doc, one)
    return made


def shorter(documents: Any, given: int = 16, **changes: Any) -> JudgeInput:
    """Head's ids end after half of base's, from a near tie on."""
    head = documents.arm(
        ids=lambda _r, _g: flipped(documents, at=3)[:given], gap=0.01, stop=lambda _r, _g: "eos", changes={}
    )
    return near(documents, **{"head": head, "cell": {"settings": SETTINGS}, "identity": ALLOW, **changes})


def test_no_gain_is_claimed_after_a_near_tie(documents: Any) -> None:
    verdict = excused(near(documents, identity=ALLOW))
    assert (verdict.outcome, verdict.exit_code) == ("NEAR_TIE", 0)
    assert "improved" not in classes(verdict).values()
    [row] = [row for row in verdict.cells[0].exact if row.metric == "htod_bytes"]
    assert row.klass == "neutral" and "no gain is claimed" in row.note


def test_what_is_worse_after_a_near_tie_is_reported(documents: Any) -> None:
    verdict = excused(scaled(documents, near(documents, identity=ALLOW), 3.0))
    assert verdict.exit_code == 1
    assert classes(verdict)["htod_bytes"] == "regressed"
    assert "REGRESSED" in {finding.outcome for finding in verdict.findings}


def test_half_the_ids_at_twice_the_bytes_do_not_pass_as_an_allowed_near_tie(documents: Any) -> None:
    verdict = excused(scaled(documents, shorter(documents), 1.9))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert verdict.headline.startswith("In smollm2/capital/weight_budget=50%: head gives 16 ids where base gives 32")


def test_where_the_near_tie_itself_costs_its_lengths_say_no_more(documents: Any) -> None:
    verdict = excused(shorter(documents, identity=IdentityContract()))
    assert [(finding.outcome, finding.exit_code) for finding in verdict.findings] == [("NEAR_TIE", 3)]


@pytest.mark.parametrize("contract", [ALLOW, IdentityContract(compare="prefix", min_tokens=8)], ids=["tie", "prefix"])
def test_time_that_blocks_is_not_decided_by_other_lengths(documents: Any, contract: IdentityContract) -> None:
    """Also where no counter is asked for."""
    gate = Gate(exact="off", time="block")
    if contract == ALLOW:
        verdict = excused(shorter(documents, gate=gate))
    else:
        head = documents.stable_arm(ids=lambda _r, _g: documents.IDS[:16], stop=lambda _r, _g: "eos")
        doc = documents.sweep(head=head, identity=contract, gate=gate, cell={"settings": SETTINGS})
        verdict = judged(doc)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert {row.klass for row in verdict.cells[0].time} == {"DIFFERENT_WORK"}


def test_lengths_of_every_sequence_of_a_batch_count(documents: Any) -> None:
    """The row shows the first sequence, whose length is equal; the second has 5 ids of 32."""
    cell = {"config": {"batch": 2, "weight_budget": "50%"}, "further_prompts": ((7, 8),), "settings": SETTINGS}

    def widened(run: RunFact) -> RunFact:
        assert run.record is not None
        ids = documents.IDS if run.arm != "head" else flipped(documents, at=3, to=77)[:5]
        stop = "length" if run.arm != "head" else "eos"
        further = (SequenceTokens(ids=ids, stop_reason=stop, gaps=(0.01,) * len(ids)),)
        made = tuple(Generation.model_validate({**g.model_dump(), "further": further}) for g in run.record.generations)
        emitted = run.record.counters["emitted_tokens"] + 3 * len(ids)  # type: ignore[operator]
        record = {"generations": made, "counters": {**run.record.counters, "emitted_tokens": emitted}}
        return run.model_copy(update={"record": run.record.model_copy(update=record)})

    verdict = excused(documents.replace_runs(near(documents, identity=ALLOW, cell=cell), widened))
    [row] = [row for row in verdict.cells[0].identity if row.what == "pair"]
    assert (row.klass, row.left_length, row.right_length) == ("NEAR_TIE", 32, 32)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert any("5 ids where base gives 32 (generation 1, sequence 2)" in f.message for f in verdict.findings)
    assert "improved" not in classes(verdict).values()
