"""A difference of tokens put before the oracle: what is asked, what was measured, and what that makes of it.

Two ids can be as good as each other: base's own rounding may then choose either. Whether they are is measured against
the float32 reference, never against the other arm, with base and head fed the same ids.
"""

from __future__ import annotations

from typing import Literal

from jobs.document import Document

Ruling = Literal["NEAR_TIE", "VIOLATION", "UNADJUDICATED"]


class FollowUp(Document):
    """What the judge asks for before it answers: both arms forced through base's ids, beside the oracle.

    `first` is the index of the first id that differs. `card` is the UUID of the card that base ran on.
    """

    kind: Literal["oracle"] = "oracle"
    cell: str
    base: str
    head: str
    card: str
    prompt_ids: tuple[int, ...]
    base_ids: tuple[int, ...]
    head_id: int
    first: int


class ForcedPosition(Document):
    """One index at which all three were fed the same ids. What is `behind` is so in the oracle's logits, in logits.

    `base_error` is base's largest |logit - oracle's|; `base_id` and `head_id` are what each arm chooses there, and
    `base_behind` and `head_behind` how far their choices are behind the oracle's best, `oracle_id`.
    """

    index: int
    base_error: float
    base_id: int
    base_behind: float
    head_id: int
    head_behind: float
    oracle_id: int


class Adjudication(Document):
    """The answer to a follow-up: each index from the first that differs to base's last, or why there is none."""

    asked: FollowUp
    positions: tuple[ForcedPosition, ...] = ()
    failure: str = ""


def ruled(answer: Adjudication, cap: float) -> tuple[Ruling, str]:
    """What an answer makes of a difference, and why in words.

    NEAR_TIE asks that at the first difference both ids stand within a band of the oracle's best, twice base's own error
    there and `cap` at most, and that head, forced through the rest of base's ids, stays within its band at every index.
    """
    if answer.failure:
        return "UNADJUDICATED", f"the oracle could not be asked ({answer.failure}), so it counts as VIOLATION"
    asked = answer.asked
    if fault := _not_what_ran(answer):
        return "UNADJUDICATED", f"{fault}, so what was forced is not what ran, and it counts as VIOLATION"
    first, *rest = answer.positions
    band = _band(first, cap)
    if first.base_behind > band:
        return "VIOLATION", f"by the oracle base's own id is {first.base_behind:.4g} behind its best, {_allowed(band)}"
    if first.head_behind > band:
        return (
            "VIOLATION",
            f"by the oracle {asked.head}'s id is {first.head_behind:.4g} behind its best, {_allowed(band)}",
        )
    for at in rest:
        if at.head_behind > _band(at, cap):
            chosen = f"{asked.head}, forced through base's ids, chooses id {at.head_id} at index {at.index}"
            return "VIOLATION", f"{chosen}, {at.head_behind:.4g} behind the oracle's best, {_allowed(_band(at, cap))}"
    stays = f"; forced through base's other {len(rest)} ids it stays within its band" if rest else ""
    return "NEAR_TIE", (
        f"by the oracle base's id is {first.base_behind:.4g} and {asked.head}'s {first.head_behind:.4g} behind "
        f"its best, {_allowed(band)}{stays}; {_preferred(first, asked.head)}"
    )


def _band(at: ForcedPosition, cap: float) -> float:
    return min(2 * at.base_error, cap)


def _allowed(band: float) -> str:
    return f"where {band:.4g} is allowed"


def _preferred(at: ForcedPosition, head: str) -> str:
    """Which id the oracle takes: agreement with it is shown apart, and decides nothing."""
    whose = {at.base_id: "base's", at.head_id: f"{head}'s"}.get(at.oracle_id, f"neither, but {at.oracle_id}")
    return f"the oracle's own choice is {whose}"


def _not_what_ran(answer: Adjudication) -> str:
    """How the forced arms contradict the runs that are judged; empty when they do not."""
    asked = answer.asked
    due = tuple(range(asked.first, len(asked.base_ids)))
    if tuple(at.index for at in answer.positions) != due:
        return f"the answer holds {len(answer.positions)} of {len(due)} indices"
    for at in answer.positions:
        if at.base_id != asked.base_ids[at.index]:
            return f"base, forced, chooses id {at.base_id} at index {at.index} where it gave {asked.base_ids[at.index]}"
    if answer.positions[0].head_id != asked.head_id:
        given = answer.positions[0].head_id
        return f"{asked.head}, forced, chooses id {given} at index {asked.first} where it gave {asked.head_id}"
    return ""
