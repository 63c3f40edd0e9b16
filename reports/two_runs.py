"""Two runs side by side as plain text: what cannot be compared first, then what differs."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.two_runs import FactRow, ReadingRow, TokenRow, TwoRuns
from reports import text
from reports.blocks import Block, Column, Listing, Name, Paragraph, Section, Table, words
from reports.escape import clip, visible
from reports.format import change, exact, plural
from reports.units import unit_of

LONGEST_FACT = 48


def render(pair: TwoRuns) -> str:
    """The comparison as text."""
    sections = (
        Section("cannot", "What does not compare", (), shown=_cannot(pair)),
        Section("facts", "What they were", (), shown=_facts(pair.facts)),
        Section("settings", "Settings", (), shown=_facts(pair.settings)),
        Section("tokens", "Tokens", (), shown=_tokens(pair.tokens)),
        Section("exact", "Counters", (), shown=_readings(pair.exact)),
        Section("times", "Times", (), shown=_readings(pair.times)),
    )
    head = f"left: {visible(pair.left)}\nright: {visible(pair.right)}"
    return "\n\n".join([head, *(text.section(part, folded=True) for part in sections)]) + "\n"


def _cannot(pair: TwoRuns) -> tuple[Block, ...]:
    if not pair.cannot:
        return (Paragraph(words("Nothing stands against comparing them; one pair is no proof of a time.")),)
    return (Listing(tuple(words(why) for why in pair.cannot)),)


def _facts(rows: Sequence[FactRow]) -> tuple[Block, ...]:
    other = [row for row in rows if not row.same]
    alike = [row for row in rows if row.same]
    columns = (Column("What"), Column("Left"), Column("Right"))
    cells = tuple(
        (words(Name(row.name)), *(words(Name(clip(side, LONGEST_FACT))) for side in (row.left, row.right)))
        for row in other
    )
    told: list[Block] = [Table("They differ in", columns, cells)] if other else []
    listed = ", ".join(f"{row.name} {clip(row.left, LONGEST_FACT)}" for row in alike)
    return (*told, *([Paragraph(words(f"Equal: {listed}."))] if alike else []))


def _tokens(rows: Sequence[TokenRow]) -> tuple[Block, ...]:
    other = [row for row in rows if not row.same]
    ids = sum(row.left_length for row in rows if row.same)
    alike = plural(len(rows) - len(other), "sequence")
    told: list[Block] = [Paragraph(words(f"{alike} equal, with {plural(ids, 'id')}."))]
    if not rows:
        return (Paragraph(words("None to compare.")),)
    if other:
        told.append(Listing(tuple(words(_parted(row)) for row in other)))
    return tuple(told)


def _parted(row: TokenRow) -> str:
    where = f"generation {row.generation + 1}, sequence {row.sequence + 1}"
    ends = (
        f"left {plural(row.left_length, 'id')}, {row.left_stop or 'cut off'}; "
        f"right {plural(row.right_length, 'id')}, {row.right_stop or 'cut off'}"
    )
    if row.first is None:
        return f"{where}: equal ids, other ends: {ends}"
    left, right = (" ".join(map(str, ids)) or "none" for ids in (row.left_context, row.right_context))
    return f"{where}: they part at index {row.first} ({ends}); ids from index {row.context_from}: {left} | {right}"


def _readings(rows: Sequence[ReadingRow]) -> tuple[Block, ...]:
    other = [row for row in rows if row.left != row.right]
    columns = (Column("What"), Column("Left", "right"), Column("Right", "right"), Column("Right to left", "right"))
    cells = tuple(
        (
            words(Name(row.name)),
            words(exact(row.left, unit_of(row.name))),
            words(exact(row.right, unit_of(row.name))),
            words(change(row.left, row.right, unit_of(row.name))),
        )
        for row in other
    )
    told: list[Block] = [Table("They differ in", columns, cells)] if other else []
    return (*told, Paragraph(words(f"{plural(len(rows) - len(other), 'reading')} equal.")))
