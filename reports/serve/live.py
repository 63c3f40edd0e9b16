"""What is said of a sweep that is not done: how far it is, why it waits, what happened last."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.store.cluster import Queue
from jobs.store.reader import CellProgress, Overview
from jobs.store.rows import Event, Pending
from reports.blocks import Block, CellRef, Column, Name, Paragraph, Section, State, Table, words
from reports.format import integer, plural

WAITS = 20


def in_a_line(left: Pending) -> str:
    """How far a sweep is."""
    done = f"{integer(left.complete)} of {plural(left.runs, 'run')} complete"
    exhausted = f", {integer(left.exhausted)} given up" if left.exhausted else ""
    return f"{done}{exhausted}, {integer(left.live_attempts)} under way"


def sections(now: Overview) -> tuple[Section, ...]:
    """Of an open sweep progress, queue and events; nothing of one that is judged."""
    if now.queue is None:
        return ()
    left = now.progress
    told = words(State("open", "warn"), f": {in_a_line(left)}; {plural(left.leased_blocks, 'block')} leased.")
    blocks = (*_waits(now.queue), _events(now.events))
    return (Section("progress", "Progress", told, shown=blocks),)


def cells(rows: Sequence[CellProgress]) -> Section:
    """How far each cell is."""
    columns = (
        Column("Cell"), Column("Model"),
        *(Column(title, "right") for title in ("Complete", "Pending", "Given up")),
    )  # fmt: skip
    shown = tuple(
        (
            words(CellRef(row.cell)),
            words(Name(row.model)),
            *(words(integer(count)) for count in (row.complete, row.pending, row.exhausted)),
        )
        for row in rows
    )
    return Section("cells", "Cells", (), shown=(Table("Runs by cell, in the sweep's order", columns, shown),))


def _waits(queue: Queue) -> tuple[Block, ...]:
    if not queue.waiting:
        return (Paragraph(words(f"{plural(queue.running, 'block')} running, none waits.")),)
    columns = (Column("Cell"), Column("From block", "right"), Column("Blocks", "right"), Column("Why", prose=True))
    rows = tuple(
        (words(CellRef(one.cell)), words(integer(one.number)), words(integer(one.blocks)), words(one.reason))
        for one in queue.waiting[:WAITS]
    )
    title = f"Blocks that wait, in their turn; {integer(queue.running)} running"
    return (Table(title, columns, rows, more=max(0, len(queue.waiting) - WAITS)),)


def _events(events: Sequence[Event]) -> Table:
    columns = (Column("At, UTC"), Column("What"), Column("Change"), Column("Message", prose=True))
    rows = tuple(
        (
            words(f"{one.at:%H:%M:%S}"),
            words(Name(one.subject)),
            words(f"{one.frm or 'new'} → {one.target}" if one.target else one.kind),
            words(one.message),
        )
        for one in reversed(events)
    )
    return Table("What happened last, newest first", columns, rows)
