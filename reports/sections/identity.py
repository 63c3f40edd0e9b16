"""Same tokens or not: every comparison, and the first difference with the ids around it."""

from __future__ import annotations

from reports.blocks import (
    Block,
    CellRef,
    Column,
    Details,
    Heading,
    Inlines,
    Paragraph,
    Section,
    State,
    Strong,
    Table,
    words,
)
from reports.divergence import Comparison, Context
from reports.format import integer, plural
from reports.view import CellView, Scope, SweepView

_WINDOWS = 3  # differences shown in full; a broken head differs in every run and generation alike
_KINDS = {
    "pair": "an arm against base",
    "self": "an arm against itself",
    "null": "base against base again",
    "golden": "an arm against the golden",
}


def build(view: SweepView, scope: Scope) -> Section:
    """Differences are shown in context; equal comparisons are counted, and listed behind a fold."""
    pairs = [(cell, item) for cell in scope.cells for item in cell.comparisons]
    unequal = [pair for pair in pairs if not pair[1].is_equal]
    equal = [pair for pair in pairs if pair[1].is_equal]
    shown: list[Block] = []
    for cell, item in unequal[:_WINDOWS]:
        shown += _difference(cell, item, view, scope)
    folded = [_listed("more difference", unequal[_WINDOWS:], scope)] if len(unequal) > _WINDOWS else []
    folded += [_listed("equal comparison", equal, scope)] if equal else []
    found = [f for cell in scope.cells for arm in cell.source.arms for f in view.of_ids.get((cell.name, arm.arm), ())]
    if not pairs and view.verdict.gate.get("identity") == "off":
        summary = words(State("not judged", "quiet"), ": the identity gate is off, and no token streams were compared.")
    else:
        summary = _summary([item for _, item in pairs], scope, "" if unequal else found[0].message if found else "")
    return Section("identity", "Token identity", summary, tuple(shown), tuple(folded))


def _summary(items: list[Comparison], scope: Scope, fault: str) -> Inlines:
    """`fault`: what was found of ids that no comparison shows, as of a lock that base breaks too."""
    if not items:
        return words(State("missing", "warn"), ": no token streams were compared, so nothing is known about identity.")
    of = f"of {plural(len(items), 'comparison')}"
    unclaimed = sum(not item.is_claimed for item in items)
    differing = sum(item.is_claimed and not item.is_equal for item in items)
    if differing:
        rest = f"; nothing is claimed in {integer(unclaimed)}" if unclaimed else ""
        ties = sum(item.row.klass == "NEAR_TIE" for item in items)
        which = State("near tie", "warn") if ties == differing else State("differs", "bad")
        return words(which, f" in {integer(differing)} {of}{rest}.")
    if unclaimed:
        return words(State("not claimed", "warn"), f" in {integer(unclaimed)} {of}, which so prove nothing.")
    pairs = [item for item in items if item.row.what == "pair"]
    if not pairs:
        return words(
            State("missing", "warn"), ": base and head were not compared; each arm was held against itself alone."
        )
    ids = plural(sum(item.row.compared for item in pairs), "id")
    elsewhere = f" in the {plural(len(scope.cells), 'cell')} shown" if scope.left_out else ""
    state = words(State("wrong", "bad"), f": {fault}. Identical") if fault else words(State("identical", "good"))
    blessed = sum(item.row.what == "golden" for item in items)
    golden = f"{integer(blessed)} of an arm with the golden, " if blessed else ""
    return words(
        *state,
        f" in all {plural(len(items), 'comparison')}{elsewhere}: {integer(len(pairs))} of an arm with base ({ids}), "
        f"{golden}{integer(len(items) - len(pairs) - blessed)} of an arm with itself or of base with base again.",
    )


def _difference(cell: CellView, item: Comparison, view: SweepView, scope: Scope) -> list[Block]:
    where = () if scope.is_single else (CellRef(cell.name), *words(": "))
    blocks: list[Block] = [
        Heading(words(*where, item.state, ": ", Strong(item.who), f" ({_KINDS[item.row.what]})")),
        Paragraph(words(f"{item.sentence[:1].upper()}{item.sentence[1:]}.")),
    ]
    if item.context is not None:
        blocks += [_window(item, item.context), Paragraph(words(f"{item.context.gaps}."))]
    said = any(item.row.note in finding.message for finding in view.verdict.findings)
    if item.row.note and item.row.note != item.sentence and not said:
        blocks.append(Paragraph(words(item.row.note)))
    return blocks


def _window(item: Comparison, context: Context) -> Table:
    columns = (Column("index"), *(Column(index, "right") for index in context.indices))
    rows = tuple(
        (
            words(name),
            *(words(Strong(value) if place == context.mark else value) for place, value in enumerate(ids)),
        )
        for name, ids in ((item.row.left, context.left), (item.row.right, context.right))
    )
    return Table("Ids around the first difference", columns, rows, marked=(context.mark + 1,))


def _listed(what: str, pairs: list[tuple[CellView, Comparison]], scope: Scope) -> Details:
    shown = pairs[: scope.deep]
    with_cell = not scope.is_single
    columns = (*((Column("Cell"),) if with_cell else ()), Column("Compared"), Column("What"), Column("Result"))
    rows = tuple(
        (
            *(((CellRef(cell.name),),) if with_cell else ()),
            words(item.who),
            words(_KINDS[item.row.what]),
            words(item.state, f": {item.sentence}"),
        )
        for cell, item in shown
    )
    title = plural(len(pairs), what)
    return Details(words(title), (Table(title, columns, rows, more=len(pairs) - len(shown)),))
