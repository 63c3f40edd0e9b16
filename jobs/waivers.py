"""What became of each waiver: used, unused, expired, or in the tree under test alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime

from jobs.model import Manifest, Stamp
from jobs.reviewed import Waiver
from jobs.verdict import CellVerdict, Finding, ReviewedRow

NOT_IN_BASE = "base's commit does not hold it: a change cannot waive what it does itself"
NO_BASE_COMMIT = "base has no commit of others to read it at: a change cannot waive what it does itself"


def day_of(stamp: Stamp) -> date | None:
    """The day, UTC, on which a sweep was submitted: the judge has no clock. None where it is not told."""
    return datetime.fromisoformat(stamp.created_at).date() if stamp.created_at else None


def reviewed_rows(
    manifest: Manifest, stamp: Stamp, findings: Sequence[Finding], cells: Sequence[CellVerdict]
) -> Iterable[ReviewedRow]:
    """A row for each waiver, and why it waived nothing where it did not."""
    day = day_of(stamp)
    for waiver in manifest.reviewed.waivers:
        used = sorted({finding.cell for finding in findings if finding.waiver == waiver.id})
        if why := waiver.standing(day):
            yield _row(waiver, "expired" if day is not None and day > waiver.expires else "not in force", why=why)
        elif used:
            yield _row(waiver, "used", cells=tuple(used))
        else:
            yield _row(waiver, "unused", why=_why(waiver, findings, cells))
    for waiver in manifest.reviewed.proposed_waivers:
        yield _row(waiver, "not in force", why=NOT_IN_BASE if manifest.reviewed.at else NO_BASE_COMMIT)


def notes(rows: Iterable[ReviewedRow]) -> tuple[str, ...]:
    """One sentence for each waiver and golden that had no effect."""
    words = {"unused": "was not used", "expired": "counts no more", "not in force": "is not in force",
             "retracted": "is retracted"}  # fmt: skip
    return tuple(f"The {row.kind} of {row.scope} {words[row.state]}: {row.why}" for row in rows if row.state in words)


def _why(waiver: Waiver, findings: Sequence[Finding], cells: Sequence[CellVerdict]) -> str:
    if not any(waiver.covers(cell.cell, waiver.outcome, waiver.metric) for cell in cells):
        return "no cell of this sweep has a name that it matches"
    free = [one for one in findings if one.outcome == waiver.outcome and not one.exit_code]
    if any(waiver.covers(one.cell, one.outcome, one.subject) for one in free):
        return "what it would waive costs nothing here"
    return "nothing there was found that it covers; take it out"


def _row(waiver: Waiver, state: str, **fields: object) -> ReviewedRow:
    return ReviewedRow.model_validate(
        {"kind": "waiver", "state": state, "scope": waiver.words, "reason": waiver.reason, "id": waiver.id,
         "by": waiver.by, "evidence": waiver.evidence, "until": waiver.expires.isoformat(), **fields}
    )  # fmt: skip
