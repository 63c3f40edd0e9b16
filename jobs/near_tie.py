"""A difference of tokens put before the oracle: what is asked, what was measured, and what that makes of it.

Two ids can be as good as each other: base's own rounding may then choose either. Whether they are is measured against
the float32 reference, never against the other arm, with base and head fed the same ids.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from jobs.document import Document

Ruling = Literal["NEAR_TIE", "VIOLATION", "UNADJUDICATED"]
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FollowUp(Document):
    """What the judge asks for before it answers: both arms forced through base's ids, and head's, beside the oracle.

    `first` is the index of the first id that differs. Of a lock, whose margin is asked for, it is the lock's, and base
    is both arms. `card` is the UUID of the card that base ran on; the targets are what the arms' plans were made for,
    where their runs say so.
    """

    kind: Literal["oracle", "lock"] = "oracle"
    cell: str
    base: str
    head: str
    card: str
    prompt_ids: tuple[int, ...]
    base_ids: tuple[int, ...]
    head_ids: tuple[int, ...]
    first: int
    base_target: str = ""
    head_target: str = ""


class ForcedPosition(Document):
    """One index at which all three were fed the same ids; figures are in logits, and `behind` in the oracle's.

    `base_error` is base's largest |logit - oracle's|; `base_id` and `head_id` are what each arm chooses there, and
    `base_behind` and `head_behind` how far their choices are behind the oracle's best, `oracle_id`. `oracle_margin`:
    how far that is above its second; told of locks alone.
    """

    index: int
    base_error: Figure
    base_id: int
    base_behind: Figure
    head_id: int
    head_behind: Figure
    oracle_id: int
    oracle_margin: Figure | None = None

    @model_serializer(mode="wrap")
    def _without_absent_margin(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before locks had margins where there is none: stored answers keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if self.oracle_margin is None:
            fields.pop("oracle_margin", None)
        return fields


class Adjudication(Document):
    """The answer to a follow-up, or why there is none.

    `positions` go from the first index that differs to base's last, fed base's ids; `own` from the one behind it to
    head's last, fed head's.
    """

    asked: FollowUp
    positions: tuple[ForcedPosition, ...] = ()
    own: tuple[ForcedPosition, ...] = ()
    failure: str = ""


def ruled(answer: Adjudication, cap: float) -> tuple[Ruling, str]:
    """What an answer makes of a difference, and why in words.

    NEAR_TIE asks that at the first difference both ids stand within a band of the oracle's best, twice base's own error
    there and `cap` at most, and that head stays within its band at every later index, forced through base's ids and
    through those that it gave itself.
    """
    if answer.failure:
        return "UNADJUDICATED", f"the oracle could not be asked ({answer.failure}), so it counts as VIOLATION"
    asked = answer.asked
    if fault := not_what_ran(answer):
        return "UNADJUDICATED", f"{fault}, so what was forced is not what ran, and it counts as VIOLATION"
    first, *rest = answer.positions
    band = band_of(first, cap)
    if not first.base_behind <= band:
        return "VIOLATION", f"by the oracle base's own id is {first.base_behind:.4g} behind its best, {_allowed(band)}"
    if not first.head_behind <= band:
        return (
            "VIOLATION",
            f"by the oracle {asked.head}'s id is {first.head_behind:.4g} behind its best, {_allowed(band)}",
        )
    for whose, positions in (("base's", rest), ("its own", answer.own)):
        for at in positions:
            if not at.head_behind <= band_of(at, cap):
                chosen = f"{asked.head}, forced through {whose} ids, chooses id {at.head_id} at index {at.index}"
                behind = f"{at.head_behind:.4g} behind the oracle's best, {_allowed(band_of(at, cap))}"
                return "VIOLATION", f"{chosen}, {behind}"
    ahead = len(rest) + len(answer.own)
    stays = f"; forced through both lists of ids it stays within its band at {ahead} later indices" if ahead else ""
    return "NEAR_TIE", (
        f"by the oracle base's id is {first.base_behind:.4g} and {asked.head}'s {first.head_behind:.4g} behind "
        f"its best, {_allowed(band)}{stays}; {_preferred(first, asked.head)}"
    )


def band_of(at: ForcedPosition, cap: float) -> float:
    """How far behind the oracle's best an id may be: twice base's own error there, `cap` at most; in logits."""
    return min(2 * at.base_error, cap)


def _allowed(band: float) -> str:
    return f"where {band:.4g} is allowed"


def _preferred(at: ForcedPosition, head: str) -> str:
    """Which id the oracle takes: agreement with it is shown apart, and decides nothing."""
    whose = {at.base_id: "base's", at.head_id: f"{head}'s"}.get(at.oracle_id, f"neither, but {at.oracle_id}")
    return f"the oracle's own choice is {whose}"


def not_what_ran(answer: Adjudication) -> str:
    """How the forced arms contradict the runs that are judged; empty when they do not."""
    asked = answer.asked
    parts = ((answer.positions, asked.first, asked.base_ids), (answer.own, asked.first + 1, asked.head_ids))
    for positions, first, ids in parts:
        if tuple(at.index for at in positions) != tuple(range(first, len(ids))):
            return f"the answer holds {len(positions)} of {len(ids) - first} indices"
    chosen = [("base", at.base_id, asked.base_ids, at.index) for at in answer.positions]
    chosen += [(asked.head, at.head_id, asked.head_ids, at.index) for at in (answer.positions[0], *answer.own)]
    for arm, chose, gave, index in chosen:
        if chose != gave[index]:
            return f"{arm}, forced, chooses id {chose} at index {index} where it gave {gave[index]}"
    return ""
