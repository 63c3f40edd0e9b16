"""Margin bands of locks: what the judge asks the oracle, and what an answer makes of a lock, from both sides."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import concluded, judge
from jobs.model import Gate, JudgeInput, Limits, Lock
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition
from jobs.verdict import Verdict

INDEX = 19


def locked(documents: Any, *, expected: int | None = None, **changes: Any) -> JudgeInput:
    """A clean sweep with a lock on base's id at `INDEX` and a band of 0.05 to 0.12 logits."""
    wanted = documents.IDS[INDEX] if expected is None else expected
    lock = {"prompt": "capital", "index": INDEX, "expected": wanted, "margin": (0.05, 0.12), **changes}
    doc: JudgeInput = documents.sweep(cell={"locks": (Lock(**lock),)})
    return doc


def asked_by(doc: JudgeInput) -> FollowUp:
    answer = judge(doc)
    assert isinstance(answer, tuple)
    [question] = answer
    assert isinstance(question, FollowUp)
    return question


def answered(doc: JudgeInput, margin: float | None = 0.0937, **changes: Any) -> Verdict:
    """The verdict once the oracle has answered that base's id is its best by `margin`."""
    asked = asked_by(doc)
    chosen = asked.base_ids[-1]
    position = {
        "index": INDEX, "base_error": 0.004, "base_id": chosen, "base_behind": 0.0, "head_id": chosen,
        "head_behind": 0.0, "oracle_id": chosen, "oracle_margin": margin, **changes,
    }  # fmt: skip
    answer = Adjudication(asked=asked, positions=(ForcedPosition(**position),))
    verdict = judge(doc.model_copy(update={"adjudications": (answer,)}))
    assert isinstance(verdict, Verdict)
    return verdict


def test_the_oracle_is_asked_about_bases_own_ids_up_to_the_lock(documents: Any) -> None:
    asked = asked_by(locked(documents))
    assert (asked.kind, asked.base, asked.head, asked.first) == ("lock", "base", "base", INDEX)
    assert asked.base_ids == asked.head_ids == documents.IDS[: INDEX + 1]
    assert asked.card == "SIM-0"


@pytest.mark.parametrize(
    ("margin", "exit_code", "says"),
    [
        (0.05, 0, ""),
        (0.0937, 0, ""),
        (0.12, 0, ""),
        (0.0499, 1, "0.0499 between the oracle's best id and its second at index 19, below the lock's band of 0.05 to"),
        (0.1201, 1, "0.1201 between the oracle's best id and its second at index 19, above the lock's band of 0.05"),
        (0.0, 1, "0 between"),
    ],
)
def test_the_band_has_two_sides_and_holds_its_ends(documents: Any, margin: float, exit_code: int, says: str) -> None:
    verdict = answered(locked(documents), margin)
    assert verdict.exit_code == exit_code
    assert verdict.outcome == ("VIOLATION" if exit_code else "IMPROVED")
    assert says in verdict.headline


def test_an_oracle_that_chooses_another_id_breaks_the_lock(documents: Any) -> None:
    verdict = answered(locked(documents), oracle_id=279)
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert f"fed base's ids, chooses id 279 at index {INDEX}, locked is {documents.IDS[INDEX]}" in verdict.headline
    assert answered(locked(documents, allowed=(279,)), oracle_id=279).outcome == "IMPROVED", (
        "one that is allowed does not"
    )


def test_a_tripwire_only_warns(documents: Any) -> None:
    verdict = answered(locked(documents, tripwire=True), 0.3)
    assert verdict.exit_code == 0
    assert any(note.startswith("tripwire: 0.3 between") for note in verdict.cells[0].notes)


def test_a_margin_that_nobody_measured_is_missing(documents: Any) -> None:
    verdict = concluded(locked(documents), "no worker was there")
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "is not known: the oracle could not be asked (no worker was there)" in verdict.headline
    doc = locked(documents)
    spent = doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"limits": Limits(follow_ups=0)})})
    answer = judge(spent)
    assert isinstance(answer, Verdict) and answer.exit_code == 3
    assert "limits.follow_ups allows no more questions" in answer.headline


@pytest.mark.parametrize("change", [{"margin": None}, {"base_id": 5}], ids=["no margin", "not what ran"])
def test_an_answer_that_is_none_leaves_it_open(documents: Any, change: dict[str, Any]) -> None:
    verdict = answered(locked(documents), **change)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)


def test_a_lock_past_what_base_gave_has_no_margin(documents: Any) -> None:
    ids = documents.IDS[:5]
    doc = documents.sweep(
        base=documents.arm(ids=lambda _r, _g: ids, stop=lambda _r, _g: "eos"),
        head=documents.stable_arm(ids=lambda _r, _g: ids, stop=lambda _r, _g: "eos"),
        cell={"locks": (Lock(prompt="capital", index=INDEX, expected=1, margin=(0.0, 1.0)),)},
    )
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    assert any("base gave no id at index 19" in finding.message for finding in verdict.findings)


def test_a_lock_of_another_prompt_or_without_a_band_asks_nothing(documents: Any) -> None:
    assert isinstance(judge(locked(documents, prompt="poem")), Verdict)
    assert isinstance(judge(locked(documents, margin=None)), Verdict)


def test_answers_without_a_margin_are_written_as_before(documents: Any) -> None:
    plain = ForcedPosition(index=1, base_error=0.1, base_id=1, base_behind=0, head_id=1, head_behind=0, oracle_id=1)
    assert "oracle_margin" not in plain.canonical()
    assert "oracle_margin" in plain.model_copy(update={"oracle_margin": 0.5}).canonical()


def test_where_the_identity_gate_is_off_no_margin_is_missed(documents: Any) -> None:
    doc = locked(documents)
    off = doc.manifest.model_copy(update={"gate": Gate(identity="off")})
    verdict = judge(doc.model_copy(update={"manifest": off}))
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.exit_code, verdict.findings) == ("IMPROVED", 0, ())
