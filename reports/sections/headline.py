"""What happened and what to do: findings, the worst rows, and the cells when there are several."""

from __future__ import annotations

from reports.blocks import Block, CellRef, Column, Inlines, Name, Paragraph, Section, State, Strong, Table, Text, words
from reports.format import integer, plural
from reports.view import Scope, SweepView
from reports.wording import OUTCOMES, outcome


def build(view: SweepView, scope: Scope) -> Section:
    """Findings with their remedies first, then the rows that moved, worst first."""
    blocks: list[Block] = [*_findings(view, scope), *_rows(view, scope)]
    if not blocks:
        blocks.append(Paragraph(words("No finding, and no exact counter moved.")))
    if len(view.verdict.cells) > 1:
        blocks.append(_cells(view, scope))
    return Section("worst", "Worst rows first", (), unusual=True, shown=tuple(blocks))


def counts(view: SweepView) -> Inlines:
    """How many cells have which outcome, out of how many; the same line in every form."""
    verdict = view.verdict
    judged = f"{integer(verdict.cells_judged)} of {plural(verdict.cells_expected, 'cell')} judged"
    missing = verdict.cells_expected - verdict.cells_judged
    tallies = ", ".join(f"{integer(number)} {name}" for name, number in view.counts)
    short = f"; {plural(missing, 'cell')} absent, which is no pass" if missing else ""
    return words(f"{judged}{': ' if tallies else ''}{tallies}{short}. Exit code {verdict.exit_code}.")


def _findings(view: SweepView, scope: Scope) -> list[Block]:
    findings = view.verdict.findings
    if not findings:
        return []
    shown = findings[: scope.rows]
    columns = (Column("State"), Column("Where"), Column("What happened"), Column("What to do"), Column("Exit", "right"))
    rows = tuple(
        (
            words(outcome(finding.outcome)),
            (CellRef(finding.cell), Text(f" · {finding.arm}")) if finding.arm else (CellRef(finding.cell),),
            words(finding.message),
            words(finding.remedy or "nothing: it only informs"),
            words(str(finding.exit_code) if finding.exit_code else "0, advice"),
        )
        for finding in shown
    )
    return [Table("Findings", columns, rows, more=len(findings) - len(shown))]


def _rows(view: SweepView, scope: Scope) -> list[Block]:
    telling = [row for row in view.ranked if not row.is_usual]
    if not telling:
        return []
    shown = telling[: scope.rows]
    with_cell = len(view.verdict.cells) > 1
    head = (Column("State"), *((Column("Cell"),) if with_cell else ()), Column("Row"))
    columns = (*head, Column("base", "right"), Column("head", "right"), Column("Change", "right"))
    rows = tuple(
        (
            words(row.state),
            *(((CellRef(row.cell),),) if with_cell else ()),
            words(Name(row.subject)),
            words(row.base),
            words(row.head),
            words(Strong(row.change)),
        )
        for row in shown
    )
    return [Table("Rows that moved", columns, rows, more=len(telling) - len(shown))]


def _cells(view: SweepView, scope: Scope) -> Table:
    shown = view.cells[: scope.rows]
    rows = tuple(
        (
            words(outcome(cell.outcome)),
            words(CellRef(cell.cell)),
            words(OUTCOMES[cell.outcome][1]),
            words(str(cell.exit_code)),
        )
        for cell in shown
    )
    columns = (Column("State"), Column("Cell"), Column("Meaning"), Column("Exit", "right"))
    return Table("Cells, worst first", columns, rows, more=len(view.cells) - len(shown))


def banner(view: SweepView) -> tuple[State, str]:
    """The verdict's own name and its meaning."""
    return outcome(view.verdict.outcome), OUTCOMES[view.verdict.outcome][1]
