"""What each arm of a cell lost to its card, and a warning where one arm lost more than the other.

A comparison keeps what a clear card measured. Where one arm meets a contended or slowed card more often than the
other, what is kept of the two is not alike, which is a bias of its own and is shown whatever the verdict says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jobs import checks
from jobs.judge_arm import ArmEvidence
from jobs.redact import redact
from jobs.verdict import CellVerdict, LossRow


def lost(arm: ArmEvidence) -> LossRow:
    """What an arm lost in one cell. An attempt counts once: set aside, or kept without its times."""
    attempts = sum(max(len(run.attempts), run.record is not None) for run in arm.runs)
    aside = sum(attempt.state == "contaminated" for run in arm.runs for attempt in run.attempts)
    uncertified = sum(
        end.kind == "contaminated" and run.state == "complete" and run.record is not None for run, end in arm.endings
    )
    throttled = sum(end.word == "throttled" for _, end in arm.ended("measured"))
    return LossRow.made(arm=arm.name, attempts=attempts, contaminated=aside + uncertified, throttled=throttled)


def unsteady(arm: ArmEvidence) -> str:
    """That attempts of an arm ended by its own doing where another attempt at the same run did not; else empty."""
    ends = [end for run in arm.counted() for end in checks.own_ends(run)]
    if not ends:
        return ""
    count = f"{len(ends)} attempt{'s' * (len(ends) > 1)} of {arm.name}"
    return f"{count} ended by its own doing where another at the same run did not: {redact(ends[0])}"


def rows(arms: Sequence[ArmEvidence]) -> tuple[LossRow, ...]:
    """A row for each arm; none where no arm lost anything."""
    found = tuple(map(lost, arms))
    return found if any(row.lost for row in found) else ()


def warnings(cells: Iterable[CellVerdict]) -> tuple[str, ...]:
    """One sentence for each arm that lost more or fewer attempts than base of its cell, with both counts."""
    return tuple(sentence for cell in cells for sentence in _of(cell))


def _of(cell: CellVerdict) -> Iterable[str]:
    roles = {arm.arm: arm.role for arm in cell.arms}
    base = next((row for row in cell.losses if roles.get(row.arm) == "base"), None)
    for row in cell.losses:
        if base is not None and row.lost != base.lost:
            most, least = sorted((row, base), key=lambda side: -side.lost)
            yield (
                f"Unequal loss in {cell.cell}: {_words(most)}, and {_words(least)}. What is kept of the two was not "
                "measured under the same conditions: a difference may be the card's."
            )


def _words(row: LossRow) -> str:
    return (
        f"{row.arm} lost {row.lost} of {row.attempts} attempts to its card "
        f"({row.contaminated} contaminated, {row.throttled} throttled)"
    )
