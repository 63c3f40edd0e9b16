"""The lists of token ids that the runs gave, grouped where equal, each against the first."""

from __future__ import annotations

from typing import Final

from reports.blocks import Block, Heading, Paragraph, Section, State, Verbatim, words
from reports.evidence.runs import Measured, label
from reports.format import plural

_IDS_A_LINE: Final = 12


def build(measured: list[Measured]) -> Section:
    """Each different list once, with the generations that gave it; ids that differ from the first list in brackets."""
    groups: dict[tuple[int, ...], list[str]] = {}
    stops: dict[tuple[int, ...], set[str]] = {}
    for run, record in measured:
        for item in record.generations:
            for number, tokens in enumerate(item.sequences, start=1):
                of = f", sequence {number}" if item.further else ""
                groups.setdefault(tokens.ids, []).append(f"{label(run)} generation {item.number}{of}")
                stops.setdefault(tokens.ids, set()).add(tokens.stop_reason or "cut off")
    if not groups:
        return Section("tokens", "Tokens", words(State("missing", "warn"), ": no run gave a token."))
    reference = next(iter(groups))
    blocks: list[Block] = []
    for place, (ids, who) in enumerate(groups.items()):
        stopped = " or ".join(sorted(stops[ids]))
        head = f"{plural(len(ids), 'id')}, stop {stopped}: given by {plural(len(who), 'generation')}"
        blocks += [Heading(words(f"List {place + 1}: {head}")), Paragraph(words(", ".join(who)))]
        blocks.append(Verbatim(_diff(reference, ids), f"token ids, list {place + 1}"))
    state = State("one list", "good") if len(groups) == 1 else State(f"{len(groups)} lists", "bad")
    note = (
        " of ids in all generations of all arms."
        if len(groups) == 1
        else " of ids; ids that differ from list 1 are bracketed."
    )
    return Section("tokens", "Tokens", words(state, note), tuple(blocks))


def _diff(reference: tuple[int, ...], ids: tuple[int, ...]) -> tuple[str, ...]:
    lines = []
    for start in range(0, max(len(ids), len(reference)), _IDS_A_LINE):
        marks = []
        for place in range(start, min(start + _IDS_A_LINE, max(len(ids), len(reference)))):
            mine = str(ids[place]) if place < len(ids) else "end"
            theirs = str(reference[place]) if place < len(reference) else "end"
            marks.append(mine if mine == theirs else f"[{mine}]")
        lines.append(f"{start:>6}: {' '.join(marks)}")
    return tuple(lines)
