"""What stands in a sequence's cache: it can be taken back, and a prompt that begins alike need not start anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import BadRequest
from engine.plan import Plan


@dataclass(slots=True)
class Cached:
    """The ids of the cached positions, in order.

    `thresholds` are lengths above which a whole prompt is rotated by another table (long rope): keys cached for a short
    prompt are not those of a long one, though the ids are the same.
    """

    thresholds: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    far: tuple[bool, ...] = ()
    """For each threshold, whether the sequence's prompt was longer."""

    def begin(self, prompt_tokens: int) -> None:
        """A prompt of so many tokens is about to be fed."""
        self.far = self._beyond(prompt_tokens)

    def shared(self, prompt: Sequence[int]) -> int:
        """How many positions a prompt may keep: what it shares, but never its last token, whose logits are wanted."""
        if self.far != self._beyond(len(prompt)):
            return 0
        pairs = zip(self.ids, prompt, strict=False)
        alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.ids), len(prompt)))
        return min(alike, len(prompt) - 1)

    def check_rewind(self, tokens: int) -> None:
        """Refuse to keep `tokens` positions where the sequence could not go on from there. Raises BadRequest."""
        if not 0 <= tokens <= len(self.ids):
            raise BadRequest(f"{tokens} positions are to be kept, {len(self.ids)} are cached", "keep fewer")
        for threshold, far in zip(self.thresholds, self.far, strict=False):
            if far and 0 < tokens <= threshold:
                raise BadRequest(
                    f"the prompt was rotated as one above {threshold} positions, {tokens} would be left of it",
                    f"keep more than {threshold}, or begin anew",
                )

    def _beyond(self, tokens: int) -> tuple[bool, ...]:
        return tuple(tokens > threshold for threshold in self.thresholds)


def nothing_cached(plan: Plan) -> Cached:
    """A sequence before its first token."""
    thresholds = {s.params["long_above"] for s in plan.steps if s.params.get("long_above") is not None}
    return Cached(tuple(sorted(thresholds)))


def check_no_states(plan: Plan) -> None:
    """Refuse to take back what has no way back. Raises BadRequest naming the first state."""
    if plan.states:
        raise BadRequest(
            f"state {plan.states[0].name!r} holds all positions in one, and cannot be taken back to fewer",
            "begin a new sequence, and leave prefix_reuse off for this model",
        )
