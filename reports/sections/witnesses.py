"""Did the path under test run at all, and do the counters agree with each other."""

from __future__ import annotations

from jobs.model import Missing, Reading
from jobs.verdict import InvariantRow, WitnessRow
from reports.blocks import Block, CellRef, Column, Details, Inlines, Name, Section, State, Table, words
from reports.format import integer, number, plural
from reports.view import CellView, Scope, SweepView
from reports.wording import held


def build(view: SweepView, scope: Scope) -> Section:
    """Witnesses and invariants that fail are shown; those that hold are counted and folded."""
    witnesses = [(cell, row) for cell in scope.cells for row in cell.source.witnesses]
    invariants = [(cell, row) for cell in scope.cells for row in cell.source.invariants]
    unmet = [pair for pair in witnesses if not pair[1].holds]
    broken = [pair for pair in invariants if not pair[1].holds]
    shown: list[Block] = []
    if unmet:
        shown.append(_witnesses("Witnesses not met: this run proves nothing", unmet, scope))
    if broken:
        shown.append(_invariants("Broken invariants", broken, scope))
    folded: list[Details] = []
    if len(witnesses) > len(unmet):
        met = [pair for pair in witnesses if pair[1].holds]
        folded.append(
            Details(
                words(f"{plural(len(met), 'witness', 'witnesses')} met"), (_witnesses("Witnesses met", met, scope),)
            )
        )
    if len(invariants) > len(broken):
        good = [pair for pair in invariants if pair[1].holds]
        table = _invariants("Invariants that hold", good, scope)
        folded.append(Details(words(f"{plural(len(good), 'invariant')} that hold"), (table,)))
    summary = _summary(witnesses, invariants, len(unmet), len(broken))
    return Section("witnesses", "Did the path run, and do the counters agree", summary, tuple(shown), tuple(folded))


def _summary(
    witnesses: list[tuple[CellView, WitnessRow]],
    invariants: list[tuple[CellView, InvariantRow]],
    unmet: int,
    broken: int,
) -> Inlines:
    checked = sum(row.checked for _, row in invariants)
    ran = (
        words(State("no witness", "warn"), ": the sweep names none, so nothing proves that the changed path ran.")
        if not witnesses
        else words(
            State("not met", "warn") if unmet else State("met", "good"),
            f": {integer(unmet or len(witnesses))} of {plural(len(witnesses), 'witness', 'witnesses')}. ",
        )
    )
    agree = words(
        State("broken", "bad") if broken else State("hold", "good") if invariants else State("none", "warn"),
        f": {integer(broken or len(invariants))} of {plural(len(invariants), 'invariant')}, "
        f"in {plural(checked, 'evaluation')}.",
    )
    return (*ran, *words(" "), *agree) if not witnesses else (*ran, *agree)


def _witnesses(caption: str, pairs: list[tuple[CellView, WitnessRow]], scope: Scope) -> Table:
    shown = pairs[: scope.deep or scope.rows]
    with_cell = not scope.is_single
    columns = (
        *((Column("Cell"),) if with_cell else ()),
        Column("Witness"),
        Column("Arm"),
        Column("State"),
        Column("Read"),
    )
    rows = tuple(
        (
            *(((CellRef(cell.name),),) if with_cell else ()),
            words(Name(row.expr)),
            words(row.arm),
            words(held(row.holds)),
            words(", ".join(f"{name} = {_reading(value)}" for name, value in row.values.items()) or "nothing read"),
        )
        for cell, row in shown
    )
    return Table(caption, columns, rows, more=len(pairs) - len(shown))


def _invariants(caption: str, pairs: list[tuple[CellView, InvariantRow]], scope: Scope) -> Table:
    """One row an invariant, one column an arm: the same equation of every arm side by side."""
    arms = list(dict.fromkeys(row.arm for _, row in pairs))
    groups: dict[tuple[str, str], dict[str, InvariantRow]] = {}
    for cell, row in pairs:
        groups.setdefault((cell.name, row.name), {})[row.arm] = row
    shown = list(groups.items())[: scope.deep or scope.rows]
    with_cell = not scope.is_single
    head = (*((Column("Cell"),) if with_cell else ()), Column("Invariant"), Column("Checked", "right"))
    rows = tuple(
        (
            *(((CellRef(cell),),) if with_cell else ()),
            _invariant_name(next(iter(by_arm.values()))),
            words(integer(sum(row.checked for row in by_arm.values()))),
            *(words(_values(by_arm[arm]) if arm in by_arm else "—") for arm in arms),
        )
        for (cell, _), by_arm in shown
    )
    columns = (*head, *(Column(arm, "right") for arm in arms))
    return Table(caption, columns, rows, more=len(groups) - len(shown))


def _invariant_name(row: InvariantRow) -> Inlines:
    text = row.worst.text if row.worst is not None else ""
    return words(Name(row.name)) if text in row.name else words(Name(row.name), " ", Name(text))


def _values(row: InvariantRow) -> str:
    if row.worst is None:
        return row.note or ("holds" if row.holds else "does not hold")
    side = f"{number(row.worst.lhs)} {row.worst.relation} {number(row.worst.rhs)}"
    return f"{side}; {row.note}" if row.note else side


def _reading(value: Reading) -> str:
    return f"n/a ({value.missing})" if isinstance(value, Missing) else number(value)
