"""Can the numbers be trusted: cards, certificates, runs complete, and attempts set aside with their reasons."""

from __future__ import annotations

from jobs.verdict import ArmView, LossRow, SetAside
from reports.blocks import Block, CellRef, Column, Details, Inlines, Name, Section, State, Table, joined, words
from reports.format import integer, number, plural
from reports.view import CellView, Scope, SweepView
from reports.wording import CERTIFICATES


def build(view: SweepView, scope: Scope) -> Section:
    """Attempts set aside and incomplete or unclear arms are shown; a clean table is folded."""
    arms = [(cell, arm) for cell in scope.cells for arm in cell.source.arms]
    unclear = [pair for pair in arms if _is_unclear(*pair)]
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
    clocks = [arm.sm_clock_mhz for _, arm in arms]
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
        f"; {plural(len(aside), 'attempt')} set aside{_spread(clocks)}.",
    )


def _spread(clocks: list[tuple[float, float] | None]) -> str:
    """The SM clocks of all runs, where each is known."""
    known = [clock for clock in clocks if clock is not None]
    if not known:
        return ""
    return f"; SM clock {_mhz(known)}" if len(known) == len(clocks) else "; the SM clock is not known of every run"


def _mhz(clocks: list[tuple[float, float]]) -> str:
    least, most = number(min(low for low, _ in clocks)), number(max(high for _, high in clocks))
    return f"{most} MHz" if least == most else f"{least} to {most} MHz"


def _is_unclear(cell: CellView, arm: ArmView) -> bool:
    return arm.runs_complete < arm.runs_expected or set(arm.certificates) != {"clear"} or bool(_lost(cell, arm.arm))


def _lost(cell: CellView, arm: str) -> str:
    """What an arm lost to its card; empty where nothing."""
    row = next((row for row in cell.source.losses if row.arm == arm and row.lost), None)
    if row is None:
        return ""
    return f"{integer(row.lost)} of {plural(row.attempts, 'attempt')}: {_tally(_causes(row))}"


def _causes(row: LossRow) -> dict[str, int]:
    return {word: count for word, count in (("contaminated", row.contaminated), ("throttled", row.throttled)) if count}


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
        Column("SM clock"),
        Column("Lost to the card"),
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
            words("not recorded" if arm.sm_clock_mhz is None else _mhz([arm.sm_clock_mhz])),
            words(_lost(cell, arm.arm) or "nothing"),
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
