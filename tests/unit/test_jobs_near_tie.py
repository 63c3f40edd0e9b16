"""A difference before the oracle: what the judge asks, and what an answer makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from jobs.contract import IdentityContract, ListedTie
from jobs.judge import concluded, judge, normalise
from jobs.model import Gate, Generation, JudgeInput, Limits, RunFact, SequenceTokens
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition, ruled
from jobs.verdict import Verdict

FIRST = 19
OTHER = 46283


def question(**changes: Any) -> FollowUp:
    """Base gives 5 6 7 8, head 5 9 7 4."""
    fields = {"cell": "c", "base": "base", "head": "head", "card": "SIM-0", "prompt_ids": (1,)}
    return FollowUp(**{**fields, "base_ids": (5, 6, 7, 8), "head_ids": (5, 9, 7, 4), "first": 1, **changes})


def position(index: int, base_id: int, **changes: float) -> ForcedPosition:
    """Base is 0.01 away from the oracle, and all three choose what base does."""
    exact: dict[str, Any] = {"base_error": 0.01, "base_behind": 0.0, "head_behind": 0.0}
    return ForcedPosition(
        index=index, **{**exact, "base_id": base_id, "head_id": base_id, "oracle_id": base_id, **changes}
    )


def own(index: int, head_id: int, **changes: Any) -> ForcedPosition:
    """Fed head's ids: base may choose what it likes."""
    return position(index, 0, head_id=head_id, **changes)


def answered(
    first: dict[str, Any] | None = None,
    later: dict[str, Any] | None = None,
    alone: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[str, str]:
    """The ruling on an answer in which head's ids are as good as base's, with some figures changed."""
    positions = (position(1, 6, head_id=9, **(first or {})), position(2, 7), position(3, 8, **(later or {})))
    mine = (own(2, 7), own(3, 4, **(alone or {})))
    return ruled(Adjudication(**{"asked": question(), "positions": positions, "own": mine, **changes}), cap=0.1)


def test_a_tie_is_within_twice_base_own_error_and_stays_there() -> None:
    klass, why = answered({"head_behind": 0.02})
    assert klass == "NEAR_TIE"
    assert why == (
        "by the oracle base's id is 0 and head's 0.02 behind its best, where 0.02 is allowed; forced through both "
        "lists of ids it stays within its band at 4 later indices; the oracle's own choice is base's"
    )


@pytest.mark.parametrize(
    ("oracle_id", "says"), [(9, "head's"), (6, "base's"), (3, "neither, but 3")], ids=["head", "base", "another"]
)
def test_agreement_with_the_oracle_is_said_apart(oracle_id: int, says: str) -> None:
    klass, why = answered({"oracle_id": oracle_id})
    assert klass == "NEAR_TIE" and why.endswith(f"the oracle's own choice is {says}")


@pytest.mark.parametrize(
    ("first", "later", "alone", "says"),
    [
        ({"head_behind": 0.0201}, {}, {}, "head's id is 0.0201 behind its best, where 0.02 is allowed"),
        ({"head_behind": 0.11, "base_error": 3.0}, {}, {}, "head's id is 0.11 behind its best, where 0.1 is allowed"),
        (
            {"base_behind": 0.11, "base_error": 3.0},
            {},
            {},
            "base's own id is 0.11 behind its best, where 0.1 is allowed",
        ),
        ({}, {"head_id": 4, "head_behind": 0.5}, {}, "through base's ids, chooses id 4 at index 3, 0.5 behind the"),
        (
            {},
            {},
            {"head_behind": 0.5},
            "forced through its own ids, chooses id 4 at index 3, 0.5 behind the oracle's best",
        ),
    ],
    ids=["beyond base's error", "beyond the cap", "base beyond the cap", "later", "after its own ids"],
)
def test_beyond_its_band_an_id_is_wrong(
    first: dict[str, Any], later: dict[str, Any], alone: dict[str, Any], says: str
) -> None:
    klass, why = answered(first, later, alone)
    assert klass == "VIOLATION" and says in why


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["base_error", "base_behind", "head_behind"])
def test_a_figure_that_is_none_makes_no_answer(name: str, number: float) -> None:
    with pytest.raises(ValidationError):
        position(1, 6, **{name: number})


def test_a_band_is_that_of_its_own_index() -> None:
    """Base may be less exact at one index than at another."""
    assert answered(later={"head_id": 4, "head_behind": 0.05, "base_error": 0.03})[0] == "NEAR_TIE"
    assert answered({"base_error": 0.03}, {"head_id": 4, "head_behind": 0.05})[0] == "VIOLATION"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"failure": "head ends with exit 12; no"}, "the oracle could not be asked (head ends with exit 12; no)"),
        ({"positions": ()}, "the answer holds 0 of 3 indices"),
        ({"positions": (position(1, 6, head_id=9), position(3, 8))}, "the answer holds 2 of 3 indices"),
        ({"asked": question(head_ids=(5, 4, 7, 4))}, "head, forced, chooses id 9 at index 1 where it gave 4"),
        ({"asked": question(head_ids=(5, 9, 7, 3))}, "head, forced, chooses id 4 at index 3 where it gave 3"),
        ({"own": (own(2, 7),)}, "the answer holds 1 of 2 indices"),
        ({"asked": question(base_ids=(5, 6, 7, 3))}, "base, forced, chooses id 8 at index 3 where it gave 3"),
    ],
    ids=["failure", "empty", "a gap", "another head", "other ids after it", "not all of its own", "another base"],
)
def test_what_is_not_what_ran_excuses_nothing(changes: dict[str, Any], says: str) -> None:
    klass, why = answered(**changes)
    assert klass == "UNADJUDICATED" and says in why and "counts as VIOLATION" in why


# ---- what the judge asks ---------------------------------------------------------------------------------------------


def flipped(documents: Any, at: int = FIRST, to: int = OTHER) -> tuple[int, ...]:
    ids: tuple[int, ...] = documents.IDS
    return (*ids[:at], to, *ids[at + 1 :])


def near(documents: Any, ids: Callable[[int, int], tuple[int, ...]] | None = None, **changes: Any) -> JudgeInput:
    """A sweep whose head gives another id where base's gap is small."""
    head = documents.stable_arm(ids=ids or (lambda _run, _generation: flipped(documents)), gap=0.01)
    doc: JudgeInput = documents.sweep(**{"base": documents.arm(gap=0.01), "head": head, **changes})
    return doc


def asked_by(doc: JudgeInput) -> tuple[FollowUp, ...]:
    answer = judge(doc)
    assert isinstance(answer, tuple)
    return tuple(one for one in answer if isinstance(one, FollowUp))


def agreeing(asked: FollowUp, **first: Any) -> Adjudication:
    """An answer by which head's id is as good as base's."""
    rest = [position(at, asked.base_ids[at]) for at in range(asked.first + 1, len(asked.base_ids))]
    here = position(asked.first, asked.base_ids[asked.first], head_id=asked.head_ids[asked.first], **first)
    mine = [own(at, asked.head_ids[at]) for at in range(asked.first + 1, len(asked.head_ids))]
    return Adjudication(asked=asked, positions=(here, *rest), own=tuple(mine))


def judged(doc: JudgeInput, *answers: Adjudication) -> Verdict:
    verdict = judge(doc.model_copy(update={"adjudications": answers}))
    assert isinstance(verdict, Verdict)
    return verdict


def test_one_question_is_asked_of_one_difference(documents: Any) -> None:
    """Its ids, where it begins, and the card: the same in each of three generations and two runs."""
    [asked] = asked_by(near(documents))
    assert (asked.base, asked.head, asked.card) == ("base", "head", "SIM-0")
    assert asked.prompt_ids == (504, 3575, 282, 4649, 314)
    assert (asked.base_ids, asked.head_ids, asked.first) == (documents.IDS, flipped(documents), FIRST)


def test_an_answer_decides_the_outcome_and_the_contract_its_code(documents: Any) -> None:
    doc = near(documents)
    [asked] = asked_by(doc)
    verdict = judged(doc, agreeing(asked))
    assert (verdict.outcome, verdict.exit_code) == ("NEAR_TIE", 3)
    assert "by the oracle base's id is 0 and head's 0 behind" in verdict.headline
    assert verdict.cells[0].exact[0].note != "different work", "both did the same work"
    assert "the oracle was asked about differences alone" in " ".join(verdict.blind_spots)
    allowing = near(documents, identity=IdentityContract(near_ties="allow"))
    allowed = judged(allowing, agreeing(asked))
    assert (allowed.outcome, allowed.exit_code) == ("NEAR_TIE", 0)
    wrong = judged(doc, agreeing(asked, head_behind=0.09))
    assert (wrong.outcome, wrong.exit_code) == ("VIOLATION", 1)


def with_contract(doc: JudgeInput, contract: IdentityContract) -> JudgeInput:
    return doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"identity": contract})})


def listing(documents: Any, **changes: Any) -> IdentityContract:
    ids = (documents.IDS[FIRST], OTHER)
    entry = {"prompt": "capital", "index": FIRST, "ids": ids, "reason": "sums run in another order"}
    return IdentityContract(near_ties="listed", ties=(ListedTie.model_validate({**entry, **changes}),))


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({}, 0, "; the contract lists it: sums run in another order"),
        ({"ids": (OTHER, 1)}, 3, "; the contract does not list it"),
        ({"index": FIRST + 1}, 3, "; the contract does not list it"),
        ({"prompt": "story"}, 3, "; the contract does not list it"),
    ],
    ids=["listed", "other ids", "another index", "another prompt"],
)
def test_a_listed_near_tie_costs_nothing_and_another_does(
    documents: Any, changes: dict[str, Any], code: int, says: str
) -> None:
    doc = near(documents, identity=listing(documents, **changes))
    [asked] = asked_by(doc)
    verdict = judged(doc, agreeing(asked))
    assert (verdict.outcome, verdict.exit_code) == ("NEAR_TIE", code)
    [row] = [row for row in verdict.cells[0].identity if row.what == "pair"]
    assert says in row.note


def test_a_list_excuses_either_side_but_not_what_nobody_judged_nor_a_violation(documents: Any) -> None:
    turned = listing(documents, ids=(OTHER, documents.IDS[FIRST]))
    doc = near(documents, identity=turned)
    [asked] = asked_by(doc)
    assert judged(doc, agreeing(asked)).exit_code == 0
    assert judged(doc, agreeing(asked, head_behind=0.09)).outcome == "VIOLATION"
    assert (concluded(doc, "no engine").outcome, concluded(doc, "no engine").exit_code) == ("UNADJUDICATED", 1)


def test_an_answer_to_another_question_is_none(documents: Any) -> None:
    doc = near(documents)
    [asked] = asked_by(doc)
    other = asked.model_copy(update={"head_ids": flipped(documents, to=OTHER + 1)})
    assert judge(doc.model_copy(update={"adjudications": (agreeing(other),)})) == (asked,)


def test_a_later_generation_that_differs_otherwise_is_no_tie(documents: Any) -> None:
    """The first is excused by the oracle; what comes after is corrupted state, and names the row."""
    doc = near(documents, lambda _run, generation: flipped(documents, to=OTHER if generation == 0 else OTHER + 1))
    [asked] = asked_by(doc)
    verdict = judged(doc, agreeing(asked))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)


def test_each_sequence_of_a_batch_is_asked_about(documents: Any) -> None:
    """One of them a tie does not excuse another that is wrong."""
    settings: dict[str, Any] = {"cell": {"config": {"batch": 2, "weight_budget": "50%"}, "further_prompts": ((7, 8),)}}

    def widened(run: RunFact) -> RunFact:
        assert run.record is not None
        ids = documents.IDS if run.arm != "head" else flipped(documents, at=3, to=77)
        further = (SequenceTokens(ids=ids, stop_reason="length", gaps=(0.01,) * len(ids)),)
        made = tuple(Generation.model_validate({**g.model_dump(), "further": further}) for g in run.record.generations)
        counters = {**run.record.counters, "emitted_tokens": 2 * run.record.counters["emitted_tokens"]}  # type: ignore[operator]
        return run.model_copy(
            update={"record": run.record.model_copy(update={"generations": made, "counters": counters})}
        )

    doc = documents.replace_runs(near(documents, **settings), widened)
    first, second = asked_by(doc)
    assert [(q.prompt_ids, q.first, q.head_ids[q.first]) for q in (first, second)] == [
        ((504, 3575, 282, 4649, 314), FIRST, OTHER),
        ((7, 8), 3, 77),
    ]
    both = judged(doc, agreeing(first), agreeing(second))
    assert {row.klass for row in both.cells[0].identity if row.what == "pair"} == {"NEAR_TIE"}
    first_listed = with_contract(doc, listing(documents))
    assert judged(first_listed, agreeing(first), agreeing(second)).exit_code == 3, "the second is not listed"
    of_another = listing(documents, index=3, ids=(documents.IDS[3], 77))
    assert judged(with_contract(doc, of_another), agreeing(first), agreeing(second)).exit_code == 3
    allowing = with_contract(doc, IdentityContract(near_ties="allow"))
    assert judged(allowing, agreeing(first), agreeing(second)).exit_code == 0
    one = judged(doc, agreeing(first), agreeing(second, head_behind=1.0))
    assert {row.klass for row in one.cells[0].identity if row.what == "pair"} == {"VIOLATION"}


@pytest.mark.parametrize(
    "changes",
    [
        {"limits": Limits(follow_ups=0)},
        {"gate": Gate(identity="off")},
        {"varies": ()},
        {"head": "clear"},
        {"null": "near"},
    ],
    ids=["no follow-ups", "gate off", "not comparable", "a clear gap", "a null arm"],
)
def test_nothing_is_asked_where_no_answer_could_count(documents: Any, changes: dict[str, Any]) -> None:
    flip = {"ids": lambda _run, _generation: flipped(documents)}
    if changes == {"head": "clear"}:
        doc = documents.sweep(base=documents.arm(gap=0.9), head=documents.stable_arm(**flip, gap=0.9))
    elif changes == {"null": "near"}:
        doc = documents.sweep(base=documents.arm(gap=0.01), null=documents.arm(**flip, gap=0.01))
    else:
        doc = near(documents, **changes)
    assert isinstance(judge(doc), Verdict)


def test_questions_are_bounded_over_the_whole_sweep(documents: Any) -> None:
    """What goes beyond the limit stays open, and blocks."""
    ids = documents.IDS
    arms = {f"v{n}": documents.stable_arm(ids=lambda _r, _g, n=n: (*ids[:n], 9, *ids[n + 1 :])) for n in range(5)}
    doc = near(documents, others=arms, limits=Limits(follow_ups=2))
    assert len(asked_by(doc)) == 2
    verdict = concluded(doc, "nobody was there")
    assert verdict.exit_code == 1
    rows = [row for row in verdict.cells[0].identity if row.klass == "UNADJUDICATED"]
    assert len(rows) == 6
    assert sum("nobody was there" in row.note for row in rows) == 2
    assert sum("limits.follow_ups allows no more questions" in row.note for row in rows) == 4


def test_order_and_duplicates_of_answers_change_nothing(documents: Any) -> None:
    arms = {"v": documents.stable_arm(ids=lambda _run, _generation: flipped(documents, at=4), gap=0.01)}
    doc = near(documents, others=arms)
    answers = [agreeing(asked) for asked in asked_by(doc)]
    assert len(answers) == 2
    one, other = judged(doc, *answers), judged(doc, *reversed(answers), answers[0])
    assert one == other


def test_a_document_without_answers_is_written_as_before(documents: Any) -> None:
    doc = documents.sweep()
    assert "adjudications" not in doc.model_dump(mode="json")
    assert JudgeInput.model_validate_json(doc.model_dump_json()) == doc
    [asked] = asked_by(near(documents))
    kept = normalise(near(documents).model_copy(update={"adjudications": (agreeing(asked),)}))
    assert JudgeInput.model_validate_json(kept.model_dump_json()) == kept
