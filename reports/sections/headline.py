"""What happened and what to do: findings, the worst rows, and the cells when there are several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jobs.redact import redact
from jobs.verdict import ArmView, CellVerdict, Finding
from reports.blocks import (
    Block,
    CellRef,
    Column,
    Details,
    EvidenceRef,
    Inline,
    Inlines,
    Listing,
    Name,
    Paragraph,
    Section,
    State,
    Strong,
    Struck,
    Table,
    Text,
    Verbatim,
    joined,
    words,
)
from reports.format import integer, plural, revision, show
from reports.ranking import Ranked
from reports.traffic import reading, setting
from reports.view import Scope, SweepView
from reports.wording import gloss, outcome

_BESIDE: Final = (
    ("Over the link, a token", "link_bytes_per_token", "bytes"),
    ("Above the floor", "floor_distance_bytes", "bytes"),
    ("Segments", "segments", "count"),
    ("Seams", "seams", "count"),
    ("Seam nodes", "seam_nodes", "count"),
)
"""Title, metric and unit of what stands beside an arm's tokens."""

_RATE: Final = ("Tokens a second", "tokens_per_s", "tokens/s")
"""The same where arms are other engines, whose bytes are mostly not told."""

_RETRACTIONS: Final = 5


def build(view: SweepView, scope: Scope) -> Section:
    """Findings with their remedies first, then the rows that moved, worst first."""
    telling = [*_findings(view, scope), *_logs(view, scope), *_rows(view, scope)]
    blocks: list[Block] = [*struck(view), *_arms(view), *_warnings(view, scope), *_side_by_side(view, scope), *telling]
    if not telling:
        blocks.append(Paragraph(words(_nothing(view))))
    blocks += _notes(view, scope)
    folded = _folded(view, scope)
    if len(view.verdict.cells) > 1:
        folded = (*folded, Details(words("Cells, worst first"), (_cells(view, scope),), open=True))
    return Section("worst", "Worst rows first", (), shown=tuple(blocks), folded=folded)


def counts(view: SweepView) -> Inlines:
    """How many cells have which outcome, out of how many; the same line in every form."""
    verdict = view.verdict
    judged = f"{integer(verdict.cells_judged)} of {plural(verdict.cells_expected, 'cell')} judged"
    missing = verdict.cells_expected - verdict.cells_judged
    tallies = ", ".join(f"{integer(number)} {name}" for name, number in view.counts)
    short = f"; {plural(missing, 'cell')} absent, which is no pass" if missing else ""
    return words(f"{judged}{': ' if tallies else ''}{tallies}{short}. Exit code {verdict.exit_code}.")


def _nothing(view: SweepView) -> str:
    moved = len(view.ranked)
    rest = f"; {plural(moved, 'row')} moved that cannot gate, or were meant to" if moved else ""
    return f"No finding, and no exact counter is better or worse{rest}."


def _findings(view: SweepView, scope: Scope) -> list[Block]:
    findings = view.verdict.findings
    if not findings or _is_said(view):
        return []
    shown = findings[: scope.rows]
    left = len(findings) - len(shown) + view.findings_left_out
    return [findings_table(shown, with_cell=len(view.verdict.cells) != 1, left=left)]


def findings_table(findings: Sequence[Finding], *, with_cell: bool, left: int = 0) -> Table:
    """Findings with what to do, `left` of which stand elsewhere."""
    head = (Column("State"), *((Column("Cell"),) if with_cell else ()), Column("Arm"))
    columns = (*head, Column("What happened", prose=True), Column("What to do", prose=True), Column("Exit", "right"))
    rows = tuple(
        (
            words(outcome(finding.outcome)),
            *(((CellRef(finding.cell),),) if with_cell else ()),
            words(finding.arm or "—"),
            words(finding.message),
            words(finding.remedy or "nothing: it only informs"),
            words(str(finding.exit_code) if finding.exit_code else "0, advice"),
        )
        for finding in findings
    )
    return Table("Findings", columns, rows, more=left)


def struck(view: SweepView) -> list[Block]:
    """What the verdict said before something that it rests on was retracted, and when that was."""
    before = view.verdict.struck
    if before is None:
        return []
    said = Struck(f"{before.outcome}, exit {before.exit_code}: {before.headline}")
    why = [words(f"{one.words} ({one.at[:16].replace('T', ' ')} UTC)") for one in before.why[:_RETRACTIONS]]
    left = len(before.why) - _RETRACTIONS
    more = [words(f"{plural(left, 'more retraction')} in the JSON form")] if left > 0 else []
    return [Paragraph(words(State("retracted", "warn"), ": ", said), "warn"), Listing((*why, *more))]


def _warnings(view: SweepView, scope: Scope) -> list[Block]:
    """What makes the comparison itself doubtful, before any figure of it."""
    said = view.verdict.warnings
    left = len(said) - scope.rows
    more = [Paragraph(words(f"{plural(left, 'more warning')} in the JSON form."), "warn")] if left > 0 else []
    return [*(Paragraph(words(State("warning", "warn"), f": {one}"), "warn") for one in said[: scope.rows]), *more]


def _notes(view: SweepView, scope: Scope) -> list[Block]:
    """What is to be said of the sweep as a whole, such as declarations that had no effect."""
    notes = view.verdict.notes
    left = len(notes) - scope.rows
    more = [words(f"{plural(left, 'more note')} in the JSON form")] if left > 0 else []
    return [Listing((*(words(note) for note in notes[: scope.rows]), *more))] if notes else []


def _logs(view: SweepView, scope: Scope) -> list[Block]:
    """The end of each log that a finding rests on, once: every cell of an arm has the same. As many lines as rows."""
    logs = {finding.log: finding.arm for finding in view.verdict.findings if finding.log}
    blocks: list[Block] = []
    for log, arm in logs.items():
        lines = tuple(redact(log).splitlines()[-scope.rows :])
        blocks += [Paragraph(words("The log of ", Strong(arm), " ends:")), Verbatim(lines, f"end of the log of {arm}")]
    return blocks


def _arms(view: SweepView) -> list[Block]:
    """What was compared: each arm's source and the settings in which the arms differ."""
    if not view.cells or not view.cells[0].arms:
        return []
    arms = view.cells[0].arms
    names = sorted({name for arm in arms for name in arm.config})
    varying = [name for name in names if len({str(arm.config.get(name)) for arm in arms}) > 1]
    shared = len({(arm.source, arm.commit) for arm in arms}) == 1
    said: list[Inline] = []
    for arm in arms:
        settings = [Name(f"{name}={setting(arm.config[name])}") for name in varying if name in arm.config]
        unset = [Name(name) for name in varying if name not in arm.config]
        said += [Text(("; " if varying else ", ") if said else "Compared: "), Strong(arm.arm)]
        said += [] if shared else [Text(" is "), *_built(arm)]
        said += [Text(" with "), *joined(settings)] if settings else []
        said += [Text(" and" if settings else " with"), Text(" the default of "), *joined(unset)] if unset else []
    return [Paragraph((*said, *((Text("; each is "), *_built(arms[0])) if shared else ()), Text(".")))]


def _built(arm: ArmView) -> Inlines:
    return words(Name(arm.source), *((" at ", Name(revision(arm.commit))) if arm.commit else ()))


def _side_by_side(view: SweepView, scope: Scope) -> list[Block]:
    """The arms of the only cell: tokens, bytes and capture of each in one row."""
    if not scope.is_single or len(scope.cells[0].traffic) < 2:
        return []
    cell = scope.cells[0]
    tokens = {item.row.right: item.state for item in cell.comparisons if item.row.what in ("pair", "null")}
    for arm in cell.source.arms:
        found = view.of_ids.get((cell.name, arm.arm), ())
        absent = found and found[0].outcome == "CANNOT_LOAD"
        if found and (absent or arm.arm not in tokens or tokens[arm.arm].tone == "good"):
            tokens[arm.arm] = outcome(found[0].outcome)
    beside = _BESIDE if cell.simulated or not view.other_engines else (_RATE, *_BESIDE)
    columns = (Column("Arm"), Column("Tokens"), *(Column(title, "right") for title, _, _ in beside))
    rows = tuple(
        (
            words(Strong(arm.arm)),
            words(tokens.get(arm.arm, "base" if arm.role == "base" else "not compared"), cell.parted(arm.arm)),
            *(words(show(reading(arm, name), unit)) for _, name, unit in beside),
        )
        for arm in cell.source.arms
    )
    return [Table("Arms side by side", columns, rows)]


def _is_said(view: SweepView) -> bool:
    """Whether the headline and the next step already say all that the only finding would."""
    verdict = view.verdict
    if len(verdict.findings) != 1 or len(verdict.cells) > 1:
        return False
    only = verdict.findings[0]
    return only.message in verdict.headline and only.remedy in verdict.next_step


def _rows(view: SweepView, scope: Scope) -> list[Block]:
    """Rows that are worse are shown; the others that moved are shown when nothing is worse, else only counted."""
    if view.worse:
        return [_ranked("Rows that are worse or unknown", view.worse, view, scope)]
    return [_ranked("Rows that moved", view.others, view, scope)] if view.others else []


def _folded(view: SweepView, scope: Scope) -> tuple[Details, ...]:
    """The rows that are better or moved as declared, folded, where worse ones have taken the open table."""
    if not view.others or not view.worse:
        return ()
    deep = Scope(scope.cells, scope.deep, scope.deep, scope.left_out)
    title = plural(len(view.others), "other row that moved", "other rows that moved")
    return (Details(words(title), (_ranked("Better, or as declared", view.others, view, deep),)),)


def _ranked(caption: str, telling: Sequence[Ranked], view: SweepView, scope: Scope) -> Table:
    shown = telling[: scope.rows]
    with_cell = len(view.verdict.cells) > 1
    caption += f", of the {plural(len(view.cells), 'worst cell')}" if view.cells_left_out else ""
    head = (Column("State"), *((Column("Cell"),) if with_cell else ()), Column("Row"))
    columns = (*head, Column("base", "right"), Column(view.under_test, "right"), Column("Change", "right"))
    rows = tuple(
        (
            words(row.state),
            *(((CellRef(row.cell),),) if with_cell else ()),
            words(EvidenceRef(row.subject, row.cell, row.anchor) if row.anchor else Name(row.subject)),
            words(row.base),
            words(row.head),
            words(Strong(row.change)),
        )
        for row in shown
    )
    return Table(caption, columns, rows, more=len(telling) - len(shown))


def listed(view: SweepView, cells: Sequence[CellVerdict]) -> Section:
    """Those cells, a row each, with the worst that was found of each."""
    found: dict[str, str] = {}
    for finding in view.verdict.findings:
        found.setdefault(finding.cell, finding.message)
    rows = tuple(
        (
            words(outcome(cell.outcome)),
            words(CellRef(cell.cell)),
            words(found.get(cell.cell) or gloss(cell.outcome, view.verdict.gate)),
            *(words(_both(cell, name, unit)) for _, name, unit in _BESIDE[:3]),
            words(str(cell.exit_code)),
        )
        for cell in cells
    )
    columns = (
        Column("State"), Column("Cell"), Column("What was found", prose=True),
        *(Column(title, "right") for title, _, _ in _BESIDE[:3]), Column("Exit", "right"),
    )  # fmt: skip
    return Section("cells", "Cells", (), shown=(Table("Cells, worst first; base, then head", columns, rows),))


def _both(cell: CellVerdict, name: str, unit: str) -> str:
    """Base's and head's value; one where they are equal."""
    told = [show(reading(arm, name), unit) for role in ("base", "head") for arm in cell.arms if arm.role == role]
    return " → ".join(dict.fromkeys(told)) or "—"


def _cells(view: SweepView, scope: Scope) -> Table:
    shown = view.cells[: scope.deep]
    rows = tuple(
        (
            words(outcome(cell.outcome)),
            words(CellRef(cell.cell)),
            words(gloss(cell.outcome, view.verdict.gate)),
            words(str(cell.exit_code)),
        )
        for cell in shown
    )
    columns = (Column("State"), Column("Cell"), Column("Meaning", prose=True), Column("Exit", "right"))
    return Table("Cells, worst first", columns, rows, more=len(view.cells) - len(shown) + view.cells_left_out)


def banner(view: SweepView) -> tuple[State, str]:
    """The verdict's own name and its meaning."""
    return outcome(view.verdict.outcome), gloss(view.verdict.outcome, view.verdict.gate)
