"""A comparison of two token streams in words, and the first difference with the ids around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jobs.verdict import IdentityRow
from reports.blocks import State
from reports.format import integer, number, plural
from reports.wording import IDENTITIES

UNCLAIMED: Final = ("VACUOUS", "NOT_COMPARABLE", "MISSING")


@dataclass(frozen=True, slots=True)
class Context:
    """Ids around the first difference: column heads are indices into the generation, `mark` the differing column."""

    indices: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    mark: int
    gaps: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One identity row as shown."""

    row: IdentityRow
    state: State
    who: str
    sentence: str
    context: Context | None

    @property
    def is_equal(self) -> bool:
        """Whether the streams were compared and are the same."""
        return self.row.klass == "IDENTICAL"

    @property
    def is_claimed(self) -> bool:
        """Whether the comparison says anything; equal tokens of a path that never ran say nothing."""
        return self.row.klass not in UNCLAIMED


def build(row: IdentityRow) -> Comparison:
    """The row in words, with its context where the streams differ."""
    word, tone = IDENTITIES[row.klass]
    return Comparison(row, State(word, tone), f"{row.left} and {row.right}", _sentence(row), _context(row))


def _sentence(row: IdentityRow) -> str:
    left, right = _stop(row.left_stop), _stop(row.right_stop)
    where = f" in {row.place}" if row.place else ""
    if row.klass == "IDENTICAL":
        return (
            f"{plural(row.compared, 'id')} equal, both {left}"
            if left == right
            else f"{plural(row.compared, 'id')} equal"
        )
    if row.first_difference is not None and row.left_id is not None and row.right_id is not None:
        return (
            f"first difference{where} at index {integer(row.first_difference)}: {row.left} has id {row.left_id}, "
            f"{row.right} has id {row.right_id}; {plural(row.common_prefix, 'id')} before it equal"
        )
    if row.left_length != row.right_length:
        return (
            f"{row.left} gives {plural(row.left_length, 'id')} ({left}), {row.right} gives "
            f"{plural(row.right_length, 'id')} ({right}){where}; the first {integer(row.common_prefix)} are equal"
        )
    return row.note or f"{integer(row.common_prefix)} of {plural(row.compared, 'id')} equal{where}"


def _context(row: IdentityRow) -> Context | None:
    if row.first_difference is None or not (row.left_context or row.right_context):
        return None
    width = max(len(row.left_context), len(row.right_context))
    left = [str(i) for i in row.left_context] + ["end"] * (width - len(row.left_context))
    right = [str(i) for i in row.right_context] + ["end"] * (width - len(row.right_context))
    mark = next((i for i in range(width) if left[i] != right[i]), width - 1)
    start = row.first_difference - mark
    return Context(tuple(str(start + i) for i in range(width)), tuple(left), tuple(right), mark, _gaps(row))


def _gaps(row: IdentityRow) -> str:
    if row.left_gap is None and row.right_gap is None:
        return "top-2 gap there: not recorded"
    sides = [(row.left, row.left_gap), (row.right, row.right_gap)]
    shown = [f"{name} {'not recorded' if gap is None else number(float(gap))}" for name, gap in sides]
    return f"top-2 logit gap there: {', '.join(shown)}"


def _stop(reason: str | None) -> str:
    return {"length": "stopped at the length asked for", "eos": "stopped at the end id"}.get(reason or "", "cut off")
