"""Which bytes moved: the byte view beside the count view, the floor and the distance to it, for every arm."""

from __future__ import annotations

from jobs.model import Missing
from reports.blocks import (
    Block,
    CellRef,
    Column,
    Details,
    EvidenceRef,
    Inline,
    Inlines,
    Name,
    Paragraph,
    Section,
    State,
    Strong,
    Table,
    words,
)
from reports.escape import anchor_of
from reports.format import (
    UNIT_NOTE,
    Value,
    bytes_binary,
    change,
    exact,
    integer,
    is_bytes,
    percent,
    plural,
    show,
)
from reports.pictures import traffic as drawn
from reports.traffic import METRICS, Traffic, shown_unit
from reports.view import CellView, Scope, SweepView
from reports.wording import METRICS as CLASSES

_SHORT = {
    "byte_hit_rate": "Byte hit rate",
    "htod_bytes_per_token": "htod bytes per token",
    "bypassed_byte_share": "Bypassed, by bytes",
    "bypassed_count_share": "Bypassed, by count",
    "floor_bytes_per_token": "Floor",
    "floor_distance_bytes": "Distance to the floor",
}
DIFFERENT_WORK = "Tokens differ, so head did other work than base: these figures compare unlike things."


def build(view: SweepView, scope: Scope) -> Section:
    """The figures of every arm, their attribution in words and as bars, and every exact counter behind a fold.

    One cell gets a table of its own; several get one table of cells and arms, and their own tables behind folds.
    """
    shown: list[Block] = []
    folded: list[Details] = []
    if any(
        item.row.what == "pair" and item.is_claimed and not item.is_equal
        for cell in scope.cells
        for item in cell.comparisons
    ):
        shown.append(Paragraph(words(DIFFERENT_WORK), "warn"))
    if scope.is_single:
        cell = scope.cells[0]
        figures = [_figures(cell), *_over_floor(cell), *_attribution(cell), *drawn.build(cell)] if cell.traffic else []
        if cell.traffic and _is_resident(cell):
            folded.append(
                Details(words("Figures by arm, all of weights that stay in memory"), tuple(figures), open=True)
            )
        else:
            shown += figures
        folded += _folds(cell, scope) if cell.traffic else []
    else:
        told = [cell for cell in scope.cells if cell.traffic]
        shown += [_overview(scope)] if told else []
        for cell in told:
            parts = (
                _figures(cell),
                *_over_floor(cell),
                *_attribution(cell),
                *drawn.build(cell),
                *_folds(cell, scope),
            )
            folded.append(Details(words("Bytes of ", CellRef(cell.name)), parts))
    return Section("bytes", "Bytes", _summary(scope), tuple(shown), tuple(folded))


def _summary(scope: Scope) -> Inlines:
    if not any(cell.source.exact for cell in scope.cells):
        return words(State("unknown", "warn"), ": no exact metric was compared.")
    rows = [row for cell in scope.cells for row in cell.source.exact]
    unsteady = [row for row in rows if row.klass in {"regressed", "varies", "vanished"}]
    worse = sum(row.gating for row in unsteady)
    better = sum(row.klass == "improved" for row in rows)
    gain = any(row.klass == "improved" and is_bytes(row.unit) for row in rows)
    state = State("worse", "bad") if worse else State("better", "good") if gain else State("no worse", "quiet")
    said = f": {plural(worse, 'exact metric')} worse or unsteady, {integer(better)} better"
    if loose := len(unsteady) - worse:
        said += f"; {integer(loose)} that cannot gate unsteady or no longer recorded"
    if all(_is_resident(cell) for cell in scope.cells):
        said += "; nothing crossed the link in any arm"
    if all(cell.is_of_variants for cell in scope.cells):
        said += "; no head here, so what differs is what a variant costs"
    return words(state, f"{said}. {UNIT_NOTE}.")


def _is_resident(cell: CellView) -> bool:
    """Whether no arm of a cell streamed a byte, so that there is nothing unusual to show of its bytes."""
    return bool(cell.traffic) and all(arm.link_bytes_per_token == 0 for arm in cell.traffic)


def _overview(scope: Scope) -> Table:
    """One row an arm of every cell shown, one column a figure; base run again has none where it is as base."""
    columns = (
        Column("Cell"),
        Column("Arm"),
        *(Column(_SHORT[name], "right") for name, _, _ in METRICS if name in _SHORT),
    )
    rows = tuple(
        (
            words(CellRef(cell.name)),
            words(arm.arm),
            *(words(show(arm.figures[name], unit)) for name, _, unit in METRICS if name in _SHORT),
        )
        for cell in scope.cells
        for arm in cell.traffic
        if arm.role != "null" or all(arm.figures != base.figures for base in cell.traffic if base.role == "base")
    )
    more = f"; {plural(scope.left_out, 'cell')} more in the report" if scope.left_out else ""
    return Table(f"Bytes by cell and arm, worst cells first{more}", columns, rows)


def _figures(cell: CellView) -> Table:
    compare = cell.base is not None and cell.head is not None
    titles = [arm.arm if arm.arm == arm.role else f"{arm.arm} ({arm.role})" for arm in cell.traffic]
    columns = (Column("Figure"), *(Column(title, "right") for title in titles))
    if compare:
        columns = (*columns, Column(f"{cell.under_test} against base", "right"))
    base = next((arm for arm in cell.traffic if arm.role == "base"), None)
    head = next((arm for arm in cell.traffic if cell.head is not None and arm.arm == cell.head.arm), None)
    rows = []
    for name, label, unit in METRICS:
        cells = [words(label), *(words(show(arm.figures[name], unit)) for arm in cell.traffic)]
        if compare and base is not None and head is not None:
            cells.append(words(change(base.figures[name], head.figures[name], unit)))
        rows.append(tuple(cells))
    return Table("Bytes by arm", columns, tuple(rows))


def _over_floor(cell: CellView) -> list[Block]:
    """The distance to the floor by cause, bytes a token; the causes of an arm add up to its last row."""
    arms = [arm for arm in cell.traffic if arm.role != "null" and arm.causes]
    told = [row for row in zip(*(arm.causes for arm in arms), strict=True) if any(c.per_token_bytes for c in row)]
    if not told:
        return []
    columns = (Column("Cause"), *(Column(arm.arm, "right") for arm in arms))
    rows = [(words(row[0].words), *(words(_size(cause.per_token_bytes)) for cause in row)) for row in told]
    totals = (words(_size(sum(cause.per_token_bytes for cause in arm.causes))) for arm in arms)
    caption = "Distance to the floor by cause, bytes a token over all generations"
    return [Table(caption, columns, (*rows, (words(Strong("Distance to the floor")), *totals)))]


def _attribution(cell: CellView) -> list[Block]:
    out: list[Block] = []
    for arm in cell.traffic:
        share, events = arm.figures["bypassed_byte_share"], arm.figures["bypassed_count_share"]
        if arm.role == "null" or isinstance(share, Missing) or isinstance(events, Missing) or share == 0:
            continue
        text = (
            f"{arm.arm}: bypassed page-ins are {percent(events)} of the page-ins and {percent(share)} of the streamed "
            f"bytes, {_size(arm.bypass_per_token_bytes)} a token"
        )
        if not isinstance(arm.bypass_of_distance, Missing):
            text += _of_distance(arm.bypass_of_distance)
        text += f". A bypassed page-in is {_size(arm.mean_bypass_bytes)} in the mean"
        if not isinstance(arm.mean_retained_bytes, Missing):
            text += f", a retained one {_size(arm.mean_retained_bytes)}"
        said: list[Inline] = [*words(text + ".")]
        if arm.keys:
            largest = arm.keys[0]
            said += [*words(" The most bytes are of "), Name(largest.key)]
            said += words(
                f": {_share(largest.byte_share)} of what crossed the link, {_share(largest.count_share)} of times."
            )
        out.append(Paragraph(tuple(said)))
    return out


def _of_distance(share: int | float) -> str:
    """What bypasses are of the distance to the floor; above the whole of it, a part of them no policy can avoid."""
    if share <= 1:
        return f", {percent(share)} of the distance to the floor"
    return ", more than the whole distance to the floor, so a part of them no policy can avoid"


def _folds(cell: CellView, scope: Scope) -> list[Details]:
    folds = [Details(words("Weights, budget and capacity"), (_sizes(cell),))]
    keys = [arm for arm in cell.traffic if arm.keys and arm.role != "null"]
    if keys:
        folds.append(Details(words("Heaviest streamed keys"), tuple(_keys(arm, scope) for arm in keys)))
    if cell.source.exact:
        table = _counters(cell, scope)
        folds.append(Details(words(f"All {plural(len(cell.source.exact), 'exact metric')}"), (table,)))
    return folds


def _sizes(cell: CellView) -> Table:
    rows = tuple(
        (
            words(label),
            *(words(_whole(getattr(arm, name))) for arm in cell.traffic),
        )
        for name, label in (
            ("weight_bytes", "All weights (W)"),
            ("budget_bytes", "Budget"),
            ("capacity_bytes", "Capacity of whole granules in the budget"),
            ("mean_bypass_bytes", "Mean bypassed page-in"),
            ("mean_retained_bytes", "Mean retained page-in"),
            ("bypass_per_token_bytes", "Bypassed bytes a token"),
        )
    )
    columns = (Column("Size"), *(Column(arm.arm, "right") for arm in cell.traffic))
    return Table("Weights, budget and capacity", columns, rows)


def _keys(arm: Traffic, scope: Scope) -> Table:
    """The heaviest keys: the count view of each beside the byte view."""
    shown = arm.keys[: scope.deep]
    heads = (
        "Size",
        "Read",
        "From resident memory",
        "Streamed",
        "Bypassed",
        "Gathered",
        "Of streamed bytes",
        "Of times",
    )
    columns = (Column(f"Key ({arm.arm})"), *(Column(head, "right") for head in heads))
    rows = tuple(
        (
            words(Name(key.key)),
            words(exact(key.nbytes, "bytes")),
            *(words(_size(size)) for size in (key.read_bytes, key.resident_bytes)),
            words(exact(key.streamed_bytes, "bytes")),
            *(words(_size(size)) for size in (key.bypassed_bytes, key.gathered_bytes)),
            words(_share(key.byte_share)),
            words(_share(key.count_share)),
        )
        for key in shown
    )
    return Table(f"Heaviest streamed keys of {arm.arm}", columns, rows, more=len(arm.keys) - len(shown))


def _counters(cell: CellView, scope: Scope) -> Table:
    order = {"regressed": 0, "varies": 1, "vanished": 1, "not_recorded": 1, "declared": 2, "new": 2, "improved": 3}
    ranked = sorted(cell.source.exact, key=lambda row: 5 if row.base == row.head else order.get(row.klass, 4))
    shown = ranked[: scope.deep]
    columns = (
        Column("Metric"),
        Column("base", "right"),
        Column(cell.under_test, "right"),
        Column("Change", "right"),
        Column("State", prose=True),
    )
    return Table(
        "Every exact metric",
        columns,
        tuple(
            (
                words(EvidenceRef(row.metric, cell.name, anchor_of(row.metric))),
                words(exact(row.base, shown_unit(row.metric, row.unit))),
                words(exact(row.head, shown_unit(row.metric, row.unit))),
                words(change(row.base, row.head, shown_unit(row.metric, row.unit))),
                words(State(*CLASSES[row.klass]), " gates" if row.gating else "", f" ({row.note})" if row.note else ""),
            )
            for row in shown
        ),
        more=len(ranked) - len(shown),
    )


def _whole(value: Value) -> str:
    """Every digit of a size, and its binary unit, in which cards and granules are sized."""
    return (
        f"{exact(value, 'bytes')} ({bytes_binary(value)})"
        if isinstance(value, int) and value >= 1024
        else show(value, "bytes")
    )


def _share(value: Value) -> str:
    return show(value, "ratio")


def _size(value: Value) -> str:
    return show(value, "bytes")
