"""Which state may follow which, for attempts, runs and sweeps.

Pure: no clock, no store. The store asks `advance` first and then makes the change with a guarded update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from jobs.errors import IllegalMove
from jobs.model import AttemptState, Limits, RunState

SweepState = ("open", "judged")
LIVE: frozenset[str] = frozenset({"claimed", "clearing", "running"})
"""Attempt states in which a worker holds a card."""

ENDS: frozenset[str] = frozenset({"measured", "refused", "contaminated", "failed", "lost", "cancelled"})
"""Attempt states that never change again."""

MOVES: Mapping[str, frozenset[str]] = {
    # attempt
    "claimed": frozenset({"clearing", "refused", "failed", "lost", "cancelled"}),
    "clearing": frozenset({"running", "refused", "contaminated", "failed", "lost", "cancelled"}),
    "running": ENDS,
    **dict.fromkeys(ENDS, frozenset()),
    # run
    "pending": frozenset({"complete", "exhausted"}),
    "complete": frozenset(),
    "exhausted": frozenset(),
    # sweep
    "open": frozenset({"judged"}),
    "judged": frozenset(),
}
"""Every state and its legal successors. The three machines share no word, so one table holds them."""

assert set(MOVES) == {*get_args(AttemptState), *get_args(RunState), *SweepState}, "a state without a row"


@dataclass(frozen=True, slots=True)
class Move:
    """One state change that happened; `frm` is empty for the first."""

    frm: str
    to: str
    reason: str = ""
    at: str = ""  # UTC, ISO 8601

    def __str__(self) -> str:
        stamp = f"{self.at} " if self.at else ""
        return f"{stamp}{self.frm or 'new'} -> {self.to}" + (f": {self.reason}" if self.reason else "")


def advance(state: str, target: str, history: Callable[[], Sequence[Move]] = tuple) -> str:
    """The state after the move, which is `target`.

    Raises IllegalMove, with the history (asked for only then), when `state` is final, unknown, or does not lead to
    `target`.
    """
    if target in MOVES.get(state, frozenset()):
        return target
    story = "; ".join(map(str, history())) or "no earlier move"
    if state not in MOVES:
        raise IllegalMove(f"unknown state {state!r} cannot become {target!r}", f"history: {story}")
    allowed = ", ".join(sorted(MOVES[state])) or "nothing, it is final"
    raise IllegalMove(f"{state} cannot become {target}; it leads to {allowed}", f"history: {story}")


class Tried(NamedTuple):
    """How an attempt ended: its state, and the class of error where it failed or was lost."""

    state: str
    fault: str = ""


def attempts_left(tried: Sequence[Tried], limits: Limits) -> bool:
    """Whether a run whose attempts ended so may be tried again.

    Failed, lost and refused tries share one bound, `limits.attempts`, but for the classes of error to which
    `limits.retries` gives a number of their own. A contaminated try says nothing about the code, so it has a bound of
    its own too; a cancelled one counts for none, since a person stopped it.
    """
    spoiled = sum(one.state == "contaminated" for one in tried)
    spent = [one.fault for one in tried if one.state in {"failed", "lost", "refused"}]
    own = all(spent.count(fault) <= retries for fault, retries in limits.retries.items())
    shared = sum(fault not in limits.retries for fault in spent)
    return own and shared < limits.attempts and spoiled <= limits.contamination_reruns
