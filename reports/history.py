"""A series over sweeps as plain text: a line a point, with what changed there."""

from __future__ import annotations

from jobs.history import History, Point
from reports import text
from reports.blocks import Block, Column, Inlines, Listing, Name, Paragraph, Section, Struck, Table, words
from reports.format import change, exact, plural
from reports.units import unit_of

ADVICE = "Advice alone: what gates is judged inside one sweep."


def render(found: History) -> str:
    """One series as text."""
    unit = unit_of(found.name)
    marks: dict[int, list[str]] = {}
    for place, said in found.breaks:
        marks.setdefault(place, []).append(said)
    for one in found.changes:
        moved = f"{exact(one.before, unit)} -> {exact(one.after, unit)}, {change(one.before, one.after, unit)}"
        builds = [said for said in one.beside if said.startswith("engine ")]
        marks[one.index] = [f"CHANGE {moved}", *builds, *marks.get(one.index, [])]
    columns = (
        Column("Sweep"), Column("When"), Column("Arm"), Column("Runs", "right"), Column("Median", "right"),
        Column("From", "right"), Column("To", "right"), Column("Engine"), Column("What changed", prose=True),
    )  # fmt: skip
    rows = tuple(_row(point, unit, marks.get(place, [])) for place, point in enumerate(found.points))
    cells = sorted({point.cell for point in found.points})
    about = (
        words("Scenario ", Name(", ".join(cells)), f" on {found.card}, model {found.model_digest[:12]}."),
        words(found.note or f"{plural(len(found.changes), 'change')} of level. {ADVICE}"),
    )
    shown: list[Block] = [*(Paragraph(line) for line in about), Table("Oldest first", columns, rows)]
    settings = found.config.get("effective")
    listed = [f"{name}={value}" for name, value in sorted(settings.items())] if isinstance(settings, dict) else []
    more = (Listing((words("Settings: ", Name(", ".join(listed))),)),) if listed else ()
    return (
        text.section(Section("series", f"{found.name} ({found.series})", (), shown=(*shown, *more)), folded=True) + "\n"
    )


def _row(point: Point, unit: str, marks: list[str]) -> tuple[Inlines, ...]:
    told = exact(point.value, unit)
    value = words(Struck(told)) if point.struck else words(told)
    said = [*([f"retracted: {point.struck}"] if point.struck else []), *marks]
    spread = (point.low, point.high) if point.low != point.high else (None, None)
    return (
        words(Name(point.sweep)),
        words(point.at[:16].replace("T", " ")),
        words(point.arm),
        words(str(point.runs)),
        value,
        *(words("" if side is None else exact(side, unit)) for side in spread),
        words(point.engine[:12] or "unknown"),
        words("; ".join(said)),
    )
