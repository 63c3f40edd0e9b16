"""What each key did, in each arm's first run: bytes by how they were served, streamed ones first."""

from __future__ import annotations

from jobs.model import KeyBytes, RunRecord
from jobs.natural import natural
from reports.blocks import Column, Details, Name, Section, Table, words
from reports.evidence.runs import Measured
from reports.format import exact, integer, plural, show

MOST_ROWS = 200
"""Keys shown of an arm; the JSON form and the store hold all of them."""


def build(measured: list[Measured]) -> Section:
    """A table an arm; keys that were neither read nor gathered are left out."""
    firsts: dict[str, RunRecord] = {}
    for run, record in measured:
        firsts.setdefault(run.arm, record)
    tables = [_table(arm, record) for arm, record in firsts.items() if record.keys]
    summary = words("One row a key, by bytes over the link." if tables else "No run told of its keys.")
    folded = tuple(Details(words(table.caption), (table,)) for table in tables)
    return Section("keys", "Bytes by key", summary, folded=folded)


def _table(arm: str, record: RunRecord) -> Table:
    told = [key for key in record.keys if key.hits or key.streamed or key.gathered_bytes]
    ranked = sorted(told, key=lambda key: (-key.streamed_bytes, -key.hits * key.nbytes, natural(key.key)))
    heads = ("Size", "Read", "From resident memory", "Streamed", "Bypassed", "Gathered", "Streamed, times", "Evicted")
    columns = (Column(f"Key ({arm})"), *(Column(head, "right") for head in heads))
    rows = tuple((words(Name(key.key)), *(words(cell) for cell in _cells(key))) for key in ranked[:MOST_ROWS])
    caption = f"Bytes by key of {arm}, {plural(len(told), 'key')} in all"
    return Table(caption, columns, rows, more=max(0, len(ranked) - MOST_ROWS))


def _cells(key: KeyBytes) -> tuple[str, ...]:
    served = ((key.hits + key.streamed) * key.nbytes, key.hits * key.nbytes, key.streamed_bytes)
    others = (key.bypassed * key.nbytes, key.gathered_bytes)
    counts = (integer(key.streamed), integer(key.evicted))
    return exact(key.nbytes, "bytes"), *(show(size, "bytes") for size in (*served, *others)), *counts
