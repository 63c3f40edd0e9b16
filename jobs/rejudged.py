"""A sweep judged again: what another verdict on it says otherwise, cell by cell, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jobs import outcomes
from jobs.verdict import CellVerdict, IdentityRow, Verdict

Because = Literal["rules", "input", "both", "neither"]


@dataclass(frozen=True, slots=True)
class CellChange:
    """A cell of which two verdicts say something else; `rows`: what is classed anew in it, each "what: from -> to".

    `why`: what leads in the cell now, or what led before where nothing does any more.
    """

    cell: str
    frm: str
    to: str
    why: str
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejudged:
    """Two verdicts on one sweep. `because`: what differs, the harness that judged, the stored input, or both."""

    frm: str
    to: str
    frm_exit: int
    to_exit: int
    frm_rules: str
    to_rules: str
    because: Because
    cells: tuple[CellChange, ...]
    lines: tuple[str, ...]
    """What is found now and was not, and the reverse, of the sweep as a whole."""

    @property
    def is_same(self) -> bool:
        """Whether both say the same of every cell, and of the sweep."""
        return not self.cells and not self.lines and (self.frm, self.frm_exit) == (self.to, self.to_exit)


def compare(before: Verdict, after: Verdict) -> Rejudged:
    """What the later verdict says otherwise. Both must speak of one sweep."""
    assert before.stamp.sweep_id == after.stamp.sweep_id, (before.stamp, after.stamp)
    new_rules = _rules(before) != _rules(after)
    new_input = before.input_digest != after.input_digest
    because: Because = ("both" if new_input else "rules") if new_rules else "input" if new_input else "neither"
    return Rejudged(
        frm=before.outcome,
        to=after.outcome,
        frm_exit=before.exit_code,
        to_exit=after.exit_code,
        frm_rules=_rules(before),
        to_rules=_rules(after),
        because=because,
        cells=tuple(_cells(before, after)),
        lines=tuple(_of_the_sweep(before, after)),
    )


def _rules(verdict: Verdict) -> str:
    """Version and digest of the harness that judged; verdicts of before it was told are of the one that submitted."""
    stamp = verdict.stamp
    version, digest = stamp.judge_version or stamp.harness_version, stamp.judge_digest or stamp.harness_digest
    return f"{version} ({digest[:12]})"


def _cells(before: Verdict, after: Verdict) -> Iterator[CellChange]:
    old, new = ({cell.cell: cell for cell in verdict.cells} for verdict in (before, after))
    for name in dict.fromkeys((*new, *old)):
        mine, theirs = old.get(name), new.get(name)
        frm, to = _said(mine), _said(theirs)
        rows = _reclassed(mine, theirs)
        if frm != to or rows:
            yield CellChange(name, frm, to, _why(before, after, name), rows)


def _said(cell: CellVerdict | None) -> str:
    return "absent" if cell is None else f"{cell.outcome}, exit {cell.exit_code}"


def _reclassed(mine: CellVerdict | None, theirs: CellVerdict | None) -> tuple[str, ...]:
    old, new = _classes(mine), _classes(theirs)
    return tuple(
        f"{what}: {old.get(what, 'absent')} -> {new.get(what, 'absent')}"
        for what in dict.fromkeys((*new, *old))
        if old.get(what) != new.get(what)
    )


def _classes(cell: CellVerdict | None) -> Mapping[str, str]:
    """Every class that a cell's rows have, by what they are of; of several rows of one thing all in order."""
    found: dict[str, str] = {}
    rows: list[tuple[str, str]] = []
    if cell is not None:
        rows += [(_whose(row), row.klass) for row in cell.identity]
        rows += [(row.metric, row.klass) for row in cell.exact]
        rows += [(row.metric, row.klass) for row in cell.time]
        rows += [(f"witness {row.expr} of {row.arm}", "met" if row.holds else "unmet") for row in cell.witnesses]
        rows += [(f"equation {row.name} of {row.arm}", "holds" if row.holds else "broken") for row in cell.invariants]
    for what, klass in rows:
        found[what] = f"{found[what]}, {klass}" if what in found else klass
    return found


def _whose(row: IdentityRow) -> str:
    left, right = (name.split(" gen ")[0] for name in (row.left, row.right))
    return f"ids of {left} over its runs" if row.what == "self" else f"ids of {right} against {left}"


def _why(before: Verdict, after: Verdict, cell: str) -> str:
    now = outcomes.leading(finding for finding in after.findings if finding.cell == cell)
    if now is not None:
        return now.message
    then = outcomes.leading(finding for finding in before.findings if finding.cell == cell)
    return "" if then is None else f"no longer found: {then.message}"


def _of_the_sweep(before: Verdict, after: Verdict) -> Iterator[str]:
    old, new = ({(f.outcome, f.message) for f in verdict.findings if not f.cell} for verdict in (before, after))
    yield from (f"found now: {outcome}: {message}" for outcome, message in sorted(new - old))
    yield from (f"no longer found: {outcome}: {message}" for outcome, message in sorted(old - new))
