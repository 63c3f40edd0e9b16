"""Time, as advice: medians, the ratio inside blocks with its interval, and what is no evidence at all."""

from __future__ import annotations

from typing import Final

from jobs.model import Missing
from jobs.noise import Calibration
from jobs.verdict import TimeRow
from reports.blocks import (
    Block,
    CellRef,
    Column,
    Details,
    EvidenceRef,
    Inlines,
    Name,
    Paragraph,
    Section,
    State,
    Table,
    words,
)
from reports.escape import anchor_of
from reports.format import plural, show
from reports.ranking import whose
from reports.view import CellView, Scope, SweepView
from reports.wording import TIMES

SIMULATED = (
    "The card is simulated: time on it is wall time of the host that plays the card, or a model of one, "
    "and is not evidence about a real card."
)

RATIOS = (
    "A ratio is taken inside each block and its geometric mean over the blocks, so it is not the quotient of the two "
    "medians beside it, which are over all runs. The first blocks screen; ratio, interval and smallest detectable "
    "change are of the others, which alone decide, or of those that screen where no other was run."
)


_DECIDABLE: Final = ("BETTER", "WORSE", "SAME", "UNDECIDED")
"""Of the same work, and measured."""


def build(view: SweepView, scope: Scope) -> Section:
    """Confirmed changes are shown; the rest is folded."""
    rows = [(cell, row) for cell in scope.cells for row in cell.source.time]
    telling = [pair for pair in rows if pair[1].klass in {"WORSE", "BETTER"}]
    timed = any(row.klass != "NOT_MEASURED" for _, row in rows)
    simulated = timed and any(cell.simulated for cell in scope.cells)
    shown: list[Block] = [Paragraph(words(SIMULATED), "warn")] if simulated else []
    folded: list[Details] = []
    table = _table(rows, view, scope) if rows else None
    noise = _noise(rows, scope)
    if table is not None and telling and not simulated:
        shown += [Paragraph(words(RATIOS)), table]
    elif table is not None:
        folded.append(Details(words(f"{plural(len(rows), 'time row')}"), (Paragraph(words(RATIOS)), table)))
    folded += [noise] if noise is not None else []
    action = view.verdict.gate.get("time", "advise")
    return Section("time", "Time", _summary(rows, simulated, timed, action), tuple(shown), tuple(folded))


def _summary(rows: list[tuple[CellView, TimeRow]], simulated: bool, timed: bool, action: str) -> Inlines:
    if not rows:
        return words(State("not measured", "quiet"), ": no time was compared.")
    role = "may block the gate" if action == "block" else "advises and never blocks" if action == "advise" else "is off"
    if not timed:
        reasons = dict.fromkeys(value.missing for _, row in rows if isinstance(value := row.base_median, Missing))
        why = "; ".join(reasons) or "no run was timed"
        return words(State("not measured", "quiet"), f": {why}; in this sweep time {role}.")
    tally: dict[str, int] = {}
    for _, row in rows:
        word = TIMES[row.klass][0]
        tally[word] = tally.get(word, 0) + 1
    text = ", ".join(f"{count} {word}" for word, count in tally.items())
    state = State("not evidence", "warn") if simulated else State("advice" if action != "block" else "gates", "quiet")
    known = sum(row.calibrated is not None for _, row in rows)
    noise = f"; of {plural(known, 'row')} the noise is calibrated" if known else ""
    return words(state, f": {text}; in this sweep time {role}{noise}.{_figure(rows)}")


def _figure(rows: list[tuple[CellView, TimeRow]]) -> str:
    """The time of a decode step in one sentence, where one cell alone has it."""
    decode = [row for _, row in rows if row.metric == "decode_ms_per_token" and row.klass in _DECIDABLE]
    if len(decode) != 1 or isinstance(decode[0].ratio, Missing):
        return ""
    row = decode[0]
    least = row.smallest_detectable
    found = "" if isinstance(least, Missing) else f", and {show(least, 'ratio')} is the least that would have shown"
    within = "" if isinstance(row.low, Missing) else f", interval {_interval(row)}"
    return f" A token takes {show(row.ratio, 'x')} of base's time{within}{found}."


def _table(rows: list[tuple[CellView, TimeRow]], view: SweepView, scope: Scope) -> Table:
    """A row a metric and arm; where arms are other engines, parity of the tokens stands beside each ratio."""
    tested, parity = view.under_test, view.other_engines
    shown = rows[: scope.deep or scope.rows]
    with_cell = not scope.is_single
    columns = (
        *((Column("Cell"),) if with_cell else ()),
        Column("Metric"),
        Column("base, median run", "right"),
        Column(f"{tested}, median run", "right"),
        Column(f"{tested} / base, mean of blocks", "right"),
        *((Column("Tokens"),) if parity else ()),
        Column("Interval", "right"),
        Column("null / base, mean of blocks", "right"),
        Column("Smallest detectable", "right"),
        Column("Blocks", "right"),
        Column("State", prose=True),
    )
    return Table(
        "Time by metric",
        columns,
        tuple(
            (
                *(((CellRef(cell.name),),) if with_cell else ()),
                words(EvidenceRef(row.metric, cell.name, anchor_of(row.metric))),
                words(show(row.base_median, row.unit)),
                words(show(row.head_median, row.unit)),
                words(show(row.ratio, "x")),
                *((_parity(cell, row),) if parity else ()),
                words(_interval(row)),
                words(show(row.null_ratio, "x")),
                words(show(row.smallest_detectable, "ratio")),
                words(str(row.blocks)),
                words(State(*TIMES[row.klass]), f" ({row.note})" if row.note else ""),
            )
            for cell, row in shown
        ),
        more=len(rows) - len(shown),
    )


def _parity(cell: CellView, row: TimeRow) -> Inlines:
    """Whether the arm of a row gave base's tokens, and how many it gave before the first that is another."""
    arm = whose(cell.source, row)
    state = next((item.state for item in cell.comparisons if item.row.what == "pair" and item.row.right == arm), None)
    return words("not known") if state is None else words(state, cell.parted(arm))


def _noise(rows: list[tuple[CellView, TimeRow]], scope: Scope) -> Details | None:
    """What is known of the rows' noise from base against itself, where it was calibrated."""
    known = [(cell, row, row.calibrated) for cell, row in rows if row.calibrated is not None]
    if not known:
        return None
    shown = known[: scope.deep or scope.rows]
    columns = (
        *(() if scope.is_single else (Column("Cell"),)),
        Column("Metric"),
        Column("Noise of a block", "right"),
        Column("Found in so many blocks", "right"),
        Column("Here, smallest detectable", "right"),
        Column("Measured", prose=True),
    )
    lines = tuple(
        (
            *(() if scope.is_single else ((CellRef(cell.name),),)),
            words(EvidenceRef(row.metric, cell.name, anchor_of(row.metric))),
            words(show(one.sigma, "ratio")),
            words(f"{_least(one)} in {one.budget_blocks}"),
            words(show(row.smallest_detectable, "ratio")),
            words(f"{plural(one.blocks, 'block')} on {one.at[:10]}, ", *_card(cell, one), ", sweep ", Name(one.sweep)),
        )
        for cell, row, one in shown
    )
    table = Table("Calibrated noise: base against itself", columns, lines, more=len(known) - len(shown))
    return Details(words(f"calibrated noise of {plural(len(known), 'row')}"), (table,))


def _least(one: Calibration) -> str:
    """The slowdown that a cell's default blocks find with that noise."""
    return "beyond any use" if one.smallest_detectable is None else show(one.smallest_detectable, "ratio")


def _card(cell: CellView, one: Calibration) -> Inlines:
    same = any(arm.uuid == one.uuid for arm in cell.source.arms)
    return words("on this card" if same else "on another card of this model, ", *(() if same else (Name(one.uuid),)))


def _interval(row: TimeRow) -> str:
    if isinstance(row.low, Missing) or isinstance(row.high, Missing):
        return show(row.low if isinstance(row.low, Missing) else row.high, "x")
    return f"{show(row.low, 'x')} to {show(row.high, 'x')}"
