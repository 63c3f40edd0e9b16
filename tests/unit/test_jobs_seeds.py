"""The two reports that this project follows, judged from their own figures.

Of the third, a bot's table of 59 rows: test_jobs_bot_table.py. Figures: justinchuby/onnx-genai #886 (residency, and the
byte-aware admission that was tried and refused) and #708, #722 and #728 (the lock on token 119).
"""

from __future__ import annotations

from typing import Any

import pytest

from jobs.contract import IdentityContract, ListedTie
from jobs.judge import judge
from jobs.model import JudgeInput, Lock, RunSettings, Witness
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition
from jobs.verdict import Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    answer = judge(doc)
    assert isinstance(answer, Verdict)
    return answer


# ---- byte-aware admission ----------------------------------------------------------------------------------------

ASKED, GIVEN = 16, 3
REQUESTED_BYTES = 7_870_916_608 * ASKED
STREAMED = {
    "touches": 867 * ASKED, "hits": 10_864, "page_ins": 3_008, "retained_page_ins": 2_672, "bypassed_page_ins": 336,
    "evictions": 2_672, "htod_bytes": 37_584_175_104, "device_htod_bytes": 37_584_175_104,
    "bypassed_page_in_bytes": 16_774_594_560, "retained_bytes": 20_809_580_544,
    "hit_bytes": REQUESTED_BYTES - 37_584_175_104,
}  # fmt: skip
RESIDENT = {
    **dict.fromkeys(STREAMED, 0), "touches": 867 * ASKED, "hits": 867 * ASKED, "hit_bytes": REQUESTED_BYTES,
}  # fmt: skip


def admission(documents: Any, engaged: bool, stop: str | None = "eos", *, witnessed: bool = True) -> JudgeInput:
    """Byte-aware admission in head: engaged it ends after three tokens, where nothing streams it changes nothing."""
    whole = documents.IDS[:ASKED]
    counters = STREAMED if engaged else RESIDENT
    head = documents.stable_arm(
        changes=counters,
        ids=lambda _run, _generation: whole[:GIVEN] if engaged else whole,
        stop=lambda _run, _generation: stop if engaged else "length",
        emitted=(GIVEN if engaged else ASKED) * 3,
    )
    base = documents.arm(changes=counters, ids=lambda _run, _generation: whole)
    doc: JudgeInput = documents.sweep(
        base=base,
        head=head,
        cell={
            "settings": RunSettings(tokens=ASKED, generations=3),
            "witnesses": (Witness(expr="page_ins > 0"),) if witnessed else (),
        },
    )
    return doc


@pytest.mark.parametrize("stop", ["eos", None], ids=["at the end id", "without a stop"])
def test_byte_aware_on_and_engaged_is_short(documents: Any, stop: str | None) -> None:
    """Its library returned success, and only the count of tokens showed that sixteen were three."""
    verdict = verdict_of(admission(documents, engaged=True, stop=stop))
    assert (verdict.outcome, verdict.exit_code) == ("SHORT", 1)
    row = verdict.cells[0].identity[1]
    assert (row.klass, row.left_length, row.right_length, row.common_prefix) == ("SHORT", ASKED, GIVEN, GIVEN)
    assert all(metric.klass != "improved" for metric in verdict.cells[0].exact), "no gain is claimed of other work"


def test_byte_aware_on_and_not_engaged_is_vacuous(documents: Any) -> None:
    verdict = verdict_of(admission(documents, engaged=False))
    assert (verdict.outcome, verdict.exit_code) == ("VACUOUS", 3)
    assert verdict.cells[0].identity[1].klass == "VACUOUS", "equal tokens are not claimed"
    assert "page_ins is 0" in " ".join(finding.message for finding in verdict.findings)


def test_without_its_witness_nothing_would_have_shown_that_it_never_ran(documents: Any) -> None:
    """Why the witness is asked: the same figures without it are a pass."""
    assert verdict_of(admission(documents, engaged=False, witnessed=False)).exit_code == 0


def test_the_reports_figures_close(documents: Any) -> None:
    verdict = verdict_of(admission(documents, engaged=True))
    broken = [row.name for row in verdict.cells[0].invariants if not row.holds]
    assert broken == []


# ---- token 119 ---------------------------------------------------------------------------------------------------

INDEX, EAGER, CAPTURED, WRONG = 119, 33_803, 46_283, 279
FP32_MARGIN, FP16_MARGIN = 0.0908, 0.0937
PREFIX = tuple(1000 + index for index in range(INDEX))
TIE = ListedTie(prompt="capital", index=INDEX, ids=(EAGER, CAPTURED), reason="a near tie of fp16 between layers (#722)")
LISTED = IdentityContract(near_ties="listed", ties=(TIE,))


def divergence(documents: Any, chosen: int, contract: IdentityContract, lock: Lock | None = None) -> JudgeInput:
    """Base gives 33803 at index 119 by a margin of 0.0937, head `chosen`; behind it nothing was given."""
    doc: JudgeInput = documents.sweep(
        base=documents.arm(ids=lambda _r, _g: (*PREFIX, EAGER), gap=FP16_MARGIN),
        head=documents.stable_arm(ids=lambda _r, _g: (*PREFIX, chosen), gap=FP16_MARGIN),
        cell={
            "settings": RunSettings(tokens=INDEX + 1, generations=3, ignore_eos=True),
            "locks": () if lock is None else (lock,),
        },
        identity=contract,
    )
    return doc


def adjudicated(doc: JudgeInput, chosen: int, behind: float) -> Verdict:
    """The oracle's own choice is 33803, and head's id stands `behind` it; base's error is half of what fp16 costs."""
    asked = judge(doc)
    assert isinstance(asked, tuple)
    answers = []
    for question in asked:
        assert isinstance(question, FollowUp) and question.first == INDEX
        is_lock = question.kind == "lock"
        position = ForcedPosition(
            index=INDEX, base_error=0.05, base_id=EAGER, base_behind=0.0, head_id=EAGER if is_lock else chosen,
            head_behind=0.0 if is_lock else behind, oracle_id=EAGER, oracle_margin=FP32_MARGIN if is_lock else None,
        )  # fmt: skip
        answers.append(Adjudication(asked=question, positions=(position,)))
    return verdict_of(doc.model_copy(update={"adjudications": tuple(answers)}))


def test_33803_against_46283_is_a_near_tie_and_passes_a_contract_that_lists_it(documents: Any) -> None:
    verdict = adjudicated(divergence(documents, CAPTURED, LISTED), CAPTURED, FP32_MARGIN)
    row = verdict.cells[0].identity[1]
    assert (row.klass, row.first_difference, row.left_id, row.right_id) == ("NEAR_TIE", INDEX, EAGER, CAPTURED)
    assert verdict.exit_code == 0
    assert "the contract lists it: a near tie of fp16" in row.note and "the oracle's own choice is base's" in row.note


@pytest.mark.parametrize(
    ("contract", "exit_code"),
    [
        (IdentityContract(), 3),
        (IdentityContract(near_ties="allow"), 0),
        (LISTED.model_copy(update={"ties": (TIE.model_copy(update={"index": 118}),)}), 3),
        (LISTED.model_copy(update={"ties": (TIE.model_copy(update={"ids": (EAGER, WRONG)}),)}), 3),
    ],
    ids=["refused", "allowed", "listed elsewhere", "listed with another id"],
)
def test_other_contracts_take_it_as_they_say(documents: Any, contract: IdentityContract, exit_code: int) -> None:
    verdict = adjudicated(divergence(documents, CAPTURED, contract), CAPTURED, FP32_MARGIN)
    assert (verdict.outcome, verdict.exit_code) == ("NEAR_TIE", exit_code)


def test_279_there_is_a_violation(documents: Any) -> None:
    """Also where a list would take it: the oracle finds it far behind, and no list makes that a tie."""
    listed = IdentityContract(near_ties="listed", ties=(TIE.model_copy(update={"ids": (EAGER, CAPTURED, WRONG)}),))
    for contract in (LISTED, listed):
        verdict = adjudicated(divergence(documents, WRONG, contract), WRONG, 4.2)
        assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
        assert "by the oracle head's id is 4.2 behind its best, where 0.1 is allowed" in verdict.headline


@pytest.mark.parametrize(("chosen", "exit_code"), [(EAGER, 0), (CAPTURED, 0), (WRONG, 1)])
def test_the_lock_takes_both_ids_within_its_band_and_no_third(documents: Any, chosen: int, exit_code: int) -> None:
    lock = Lock(prompt="capital", index=INDEX, expected=EAGER, allowed=(CAPTURED,), margin=(0.05, 0.12))
    behind = {EAGER: 0.0, CAPTURED: FP32_MARGIN, WRONG: 4.2}[chosen]
    verdict = adjudicated(divergence(documents, chosen, LISTED, lock), chosen, behind)
    assert verdict.exit_code == exit_code
    assert any("locked" in finding.message for finding in verdict.findings) is (chosen == WRONG)


def test_the_lock_as_a_tripwire_only_notes_the_flip(documents: Any) -> None:
    wire = Lock(prompt="capital", index=INDEX, expected=EAGER, tripwire=True)
    verdict = adjudicated(divergence(documents, CAPTURED, LISTED, wire), CAPTURED, FP32_MARGIN)
    assert verdict.exit_code == 0
    assert any(note.startswith("tripwire: head gives id 46283 at index 119") for note in verdict.cells[0].notes)
