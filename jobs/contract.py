"""The identity contract of a sweep: what "same tokens" means, and which near ties it takes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from jobs.document import Document


class ListedTie(Document):
    """Ids that may stand for each other at one index of a prompt's output, where the oracle finds them a near tie."""

    prompt: str
    index: int
    ids: tuple[int, ...]
    reason: str


class IdentityContract(Document):
    """What 'same tokens' means here; `near_tie_cap` is the widest band, in logits, in which two ids may be a tie.

    `compare`: full (ids, length and stop reason) or prefix (equal as far as the shorter list goes, which must be
    `min_tokens` at least; None: all that were asked). `near_ties`: refuse (exit 3), allow (exit 0), or listed (exit 0
    for those of `ties`, else 3). `scope` names what must match for the claim to hold.
    """

    compare: Literal["full", "prefix"] = "full"
    near_ties: Literal["refuse", "allow", "listed"] = "refuse"
    near_tie_cap: float = 0.1
    scope: tuple[str, ...] = ("batch", "card", "driver")
    min_tokens: int | None = None
    ties: tuple[ListedTie, ...] = ()

    def for_cell(self, prompt: str, tokens: int) -> IdentityContract:
        """The same for one cell: with the ties of its prompt, and all of its tokens as the least where none is told."""
        ties = tuple(tie for tie in self.ties if tie.prompt == prompt)
        return self.model_copy(update={"ties": ties, "min_tokens": self.min_tokens or tokens})

    def listed(self, sequence: int | None, index: int, *ids: int | None) -> ListedTie | None:
        """The entry that lists ids at an index of a batch's first sequence: the others have prompts of other cells."""
        fits = (tie for tie in self.ties if not sequence and tie.index == index and set(ids) <= set(tie.ids))
        return next(fits, None)

    def takes(self, sequence: int | None, index: int, *ids: int | None) -> bool:
        """Whether a near tie costs nothing: all are allowed, or this one is listed."""
        if self.near_ties != "listed":
            return self.near_ties == "allow"
        return self.listed(sequence, index, *ids) is not None

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there was a minimum or a list where there is none: stored manifests keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if self.min_tokens is None:
            fields.pop("min_tokens", None)
        if not self.ties:
            fields.pop("ties", None)
        return fields
