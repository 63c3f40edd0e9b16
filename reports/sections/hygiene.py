"""Can the numbers be trusted: cards, certificates, runs complete, and attempts set aside with their reasons."""

from __future__ import annotations

from jobs.verdict import ArmView, SetAside
from reports.blocks import Block, CellRef, Column, Details, Inlines, Name, Section, State, Table, joined, words
from reports.format import integer, plural
from reports.view import CellView, Scope, SweepView
from reports.wording import CERTIFICATES


def build(view: SweepView, scope: Scope) -> Section:
    """Attempts set aside and incomplete or unclear arms are shown; a clean table is folded."""
    arms = [(cell, arm) for cell in scope.cells for arm in cell.source.arms]
    unclear = [pair for pair in arms if _is_unclear(pair[1])]
    aside = view.verdict.set_aside
    names = {cell.name for cell in scope.cells}
    mine = (
        tuple(row for row in aside if row.cell in names) if scope.is_single and len(view.verdict.cells) > 1 else aside
    )
    shown: list[Block] = []
    if unclear:
        shown.append(_arms("Arms that are incomplete or not certified clear", unclear, scope))
    if mine:
        shown.append(_aside(mine, scope))
    folded = (
        (Details(words("cards, certificates and runs by arm"), (_arms("Cards and certificates", arms, scope),)),)
        if arms
        else ()
    )
    return Section("hygiene", "Hygiene", _summary(arms, mine), tuple(shown), folded)


def _summary(arms: list[tuple[CellView, ArmView]], aside: tuple[SetAside, ...]) -> Inlines:
    complete = sum(arm.runs_complete for _, arm in arms)
    expected = sum(arm.runs_expected for _, arm in arms)
    certificates: dict[str, int] = {}
    for _, arm in arms:
        for word, count in arm.certificates.items():
            certificates[word] = certificates.get(word, 0) + count
    cards = dict.fromkeys(f"{arm.card or 'unnamed card'} {arm.uuid}".strip() for _, arm in arms)
    clear = complete == expected and set(certificates) <= {"clear"} and bool(certificates)
    state = (
        State("clear", "good")
        if clear and not aside
        else State("clear after retries", "warn")
        if clear
        else State("not clear", "warn")
    )
    said = joined(
        [State(f"{integer(count)} {word}", CERTIFICATES.get(word, "warn")) for word, count in certificates.items()]
    )
    return words(
        state,
        f": {integer(complete)} of {plural(expected, 'run')} complete on {plural(len(cards), 'card')}; certificates: ",
        *(said or words("none")),
        f"; {plural(len(aside), 'attempt')} set aside.",
    )


def _is_unclear(arm: ArmView) -> bool:
    return arm.runs_complete < arm.runs_expected or set(arm.certificates) != {"clear"}


def _arms(caption: str, arms: list[tuple[CellView, ArmView]], scope: Scope) -> Table:
    shown = arms[: scope.deep or scope.rows]
    with_cell = not scope.is_single
    columns = (
        *((Column("Cell"),) if with_cell else ()),
        Column("Arm"),
        Column("Runs", "right"),
        Column("Card"),
        Column("UUID"),
        Column("Certificates"),
        Column("Stopped at"),
    )
    rows = tuple(
        (
            *(((CellRef(cell.name),),) if with_cell else ()),
            words(arm.arm),
            words(f"{integer(arm.runs_complete)} of {integer(arm.runs_expected)}"),
            words(Name(arm.card)) if arm.card else words("unnamed"),
            words(Name(arm.uuid)) if arm.uuid else words("unknown"),
            words(_tally(arm.certificates) or "none"),
            words(_tally(arm.stop_reasons) or "not recorded"),
        )
        for cell, arm in shown
    )
    return Table(caption, columns, rows, more=len(arms) - len(shown))


def _aside(rows: tuple[SetAside, ...], scope: Scope) -> Table:
    shown = rows[: scope.rows]
    columns = (Column("Set aside"), Column("Cell"), Column("Arm"), Column("State"), Column("Why", prose=True))
    return Table(
        "Attempts set aside: they count for nothing",
        columns,
        tuple(
            (
                words(Name(row.attempt_id)),
                words(CellRef(row.cell)),
                words(row.arm),
                words(row.state),
                words(row.reason or "no reason recorded"),
            )
            for row in shown
        ),
        more=len(rows) - len(shown),
    )


def _tally(counts: dict[str, int]) -> str:
    return ", ".join(f"{word} {integer(count)}" for word, count in counts.items())
