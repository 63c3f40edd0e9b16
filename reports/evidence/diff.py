"""Two lists of ids side by side with their margins: common prefix, first difference, and what the oracle said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from jobs.goldens import newest
from jobs.identity import CONTEXT
from jobs.model import CellInput, JudgeInput, RunRecord, SequenceTokens
from jobs.near_tie import Adjudication, ForcedPosition, band_of
from jobs.reviewed import Golden
from jobs.verdict import IdentityRow
from reports import divergence
from reports.blocks import Block, Column, Details, Heading, Inlines, Paragraph, Section, State, Strong, Table, words
from reports.format import NOT_RECORDED, integer, number, plural
from reports.pictures import margins

MOST_DIFFERENCES: Final = 3  # a broken head differs in every run and generation alike
MOST_ROWS: Final = 500
_BEFORE: Final = 4
_AFTER: Final = 8


@dataclass(frozen=True, slots=True)
class _Pair:
    """A comparison with the lists that it is of; `at` is the index of the first difference, or where both end."""

    shown: divergence.Comparison
    left: SequenceTokens
    right: SequenceTokens

    @property
    def row(self) -> IdentityRow:
        return self.shown.row

    @property
    def at(self) -> int:
        return self.row.common_prefix

    @property
    def length(self) -> int:
        return max(len(self.left.ids), len(self.right.ids))

    @property
    def differs(self) -> bool:
        return self.left.ids != self.right.ids


def build(doc: JudgeInput, cell: CellInput, identity: Sequence[IdentityRow]) -> Section:
    """The comparisons that differ, in full; where none does, base and head with how clear each choice was."""
    records = {run.run_id: run.record for run in cell.runs if run.record is not None}
    rows = [row for row in identity if row.klass != "MISSING"]
    golden = newest(doc.manifest.reviewed.goldens).get(cell.plan.cell)
    unequal = [row for row in rows if row.first_difference is not None]
    chosen = unequal or [row for row in rows if row.what == "pair"][:1]
    pairs = [pair for row in chosen if (pair := _pair(row, records, golden)) is not None]
    blocks: list[Block] = []
    folds: list[Details] = []
    for pair in pairs[:MOST_DIFFERENCES]:
        blocks += [Heading(words(pair.shown.state, ": ", Strong(pair.shown.who))), Paragraph(words(_sentence(pair)))]
        blocks += [*_pictured(pair), *([_window(pair)] if pair.differs else []), *_answers(doc, cell, pair)]
        everything = f"all {plural(pair.length, 'id')} of {pair.shown.who}, side by side"
        folds.append(Details(words(everything), (_table("Ids side by side", pair, 0, pair.length),)))
    left = len(pairs) - MOST_DIFFERENCES
    if left > 0:
        blocks.append(Paragraph(words(f"{plural(left, 'more comparison')} that differs, listed under Token identity.")))
    blocks += _locks(doc, cell)
    return Section("diff", "Token diff", _summary(pairs, rows), tuple(blocks), tuple(folds))


def _summary(pairs: Sequence[_Pair], rows: Sequence[IdentityRow]) -> Inlines:
    if not pairs:
        missing = "no lists were compared" if not rows else "the lists that were compared are not in this input"
        return words(State("missing", "warn"), f": {missing}.")
    said = "Ids and how far each stood above the second choice, in logits (top-2 gap), of both sides by position."
    return words(said)


# ---- which lists -------------------------------------------------------------------------------------------------


def _pair(row: IdentityRow, records: dict[str, RunRecord], golden: Golden | None) -> _Pair | None:
    """The lists of a row, found by its runs, its place and what it says of them; None where they are not there."""
    runs = [records[run_id] for run_id in row.run_ids if run_id in records]
    first = _candidates(row, runs) if row.what != "golden" else _blessed(golden) if golden else ()
    left = _list(row, first, row.left_length, row.left_context, other=None)
    right = _list(row, _candidates(row, reversed(runs)), row.right_length, row.right_context, other=left)
    return None if left is None or right is None else _Pair(divergence.build(row), left, right)


def _list(
    row: IdentityRow,
    lists: Iterable[SequenceTokens],
    length: int,
    context: tuple[int, ...],
    other: SequenceTokens | None,
) -> SequenceTokens | None:
    start = max(0, (row.first_difference or 0) - CONTEXT)
    for tokens in lists:
        if len(tokens.ids) == length and tokens.ids[start : start + len(context)] == context and tokens is not other:
            return tokens
    return None


def _blessed(golden: Golden) -> Iterator[SequenceTokens]:
    """What a golden asks of each sequence."""
    for one in golden.streams:
        yield SequenceTokens(ids=one.ids, stop_reason=one.stop, gaps=one.gaps)


def _candidates(row: IdentityRow, runs: Iterable[RunRecord]) -> Iterator[SequenceTokens]:
    """Lists at the row's own generation and sequence first: only an arm against itself may have another place."""
    for record in runs:
        ordered = sorted(record.generations, key=lambda item: (item.index != (row.generation or 0), item.index))
        for generation in ordered:
            sequences = generation.sequences
            first = (row.sequence or 0) % len(sequences)
            yield from (sequences[first], *sequences[:first], *sequences[first + 1 :])


# ---- words and tables --------------------------------------------------------------------------------------------


def _sentence(pair: _Pair) -> str:
    said = pair.shown.sentence
    note = f" {pair.row.note[:1].upper()}{pair.row.note[1:]}." if pair.row.note and pair.row.note != said else ""
    return f"{said[:1].upper()}{said[1:]}.{note}"


def _pictured(pair: _Pair) -> list[Block]:
    sides = ((pair.row.left, pair.left.gaps), (pair.row.right, pair.right.gaps))
    return margins.build(sides, pair.length, pair.at if pair.differs else None)


def _window(pair: _Pair) -> Table:
    start, end = max(0, pair.at - _BEFORE), min(pair.length, pair.at + _AFTER)
    return _table("Ids around the first difference, side by side", pair, start, end)


def _table(caption: str, pair: _Pair, start: int, end: int) -> Table:
    """Positions `start` to `end`; the equal ones before them are one row, with the smallest gaps among them."""
    row = pair.row
    columns = (
        Column("Position", "right"),
        *(Column(f"{side}, {what}", "right") for what in ("id", "gap") for side in (row.left, row.right)),
        Column("What"),
    )
    rows = [_prefix(pair, start)] if start else []
    stop = min(end, start + MOST_ROWS)
    rows += [_row(pair, place) for place in range(start, stop)]
    marked = (pair.at - start + bool(start),) if pair.differs and start <= pair.at < stop else ()
    return Table(caption, columns, tuple(rows), more=end - stop, marked_rows=marked)


def _prefix(pair: _Pair, end: int) -> tuple[Inlines, ...]:
    ids = plural(end, "id")
    gaps = (_smallest(tokens.gaps[:end]) for tokens in (pair.left, pair.right))
    place = f"0 to {integer(end - 1)}" if end > 1 else "0"
    return (*map(words, (place, ids, ids, *gaps)), words(State("common prefix", "quiet")))


def _row(pair: _Pair, place: int) -> tuple[Inlines, ...]:
    sides = (pair.left, pair.right)
    ids = [str(tokens.ids[place]) if place < len(tokens.ids) else "end" for tokens in sides]
    gaps = [_gap(tokens, place) for tokens in sides]
    parts = place == pair.at and pair.differs
    return (
        words(integer(place)),
        *(words(Strong(told) if parts else told) for told in ids),
        *map(words, gaps),
        _what(pair, place),
    )


def _gap(tokens: SequenceTokens, place: int) -> str:
    if place >= len(tokens.ids):
        return ""
    return number(tokens.gaps[place]) if place < len(tokens.gaps) else NOT_RECORDED


def _what(pair: _Pair, place: int) -> Inlines:
    if place < pair.at:
        return words("equal")
    if place == pair.at:
        return words(State("first difference", pair.shown.state.tone), f": {pair.shown.state.word}")
    return words("after other ids")


def _smallest(gaps: Sequence[float]) -> str:
    return f"smallest {number(min(gaps))}" if gaps else NOT_RECORDED


# ---- the oracle --------------------------------------------------------------------------------------------------


def _answers(doc: JudgeInput, cell: CellInput, pair: _Pair) -> list[Block]:
    """What both arms chose when forced through the same ids, beside the oracle's choice, where it was asked."""
    if not pair.differs:
        return []
    for answer in doc.adjudications:
        asked = answer.asked
        lists = (asked.base_ids, asked.head_ids)
        if asked.kind == "oracle" and asked.cell == cell.plan.cell and lists == (pair.left.ids, pair.right.ids):
            return _answer(answer, doc.manifest.identity.near_tie_cap)
    return [Paragraph(words("The oracle was not asked about these two lists."))] if pair.row.what == "pair" else []


def _answer(answer: Adjudication, cap: float) -> list[Block]:
    if answer.failure:
        return [Paragraph(words(f"The oracle could not be asked: {answer.failure}."), "warn")]
    asked = answer.asked
    blocks: list[Block] = []
    for ids_of, positions in ((asked.base, answer.positions), (asked.head, answer.own)):
        if positions:
            blocks.append(_forced(f"Forced through the ids of {ids_of}, beside the oracle", answer, positions, cap))
    return blocks


def _forced(caption: str, answer: Adjudication, positions: Sequence[ForcedPosition], cap: float) -> Table:
    base, head = answer.asked.base, answer.asked.head
    columns = (
        Column("Position", "right"),
        Column("oracle's id", "right"),
        *(Column(f"{arm}, {what}", "right") for arm in (base, head) for what in ("id", "behind")),
        Column("Allowed", "right"),
        Column("What"),
    )
    rows = tuple(
        (
            words(integer(at.index)),
            words(str(at.oracle_id)),
            words(str(at.base_id)),
            words(number(at.base_behind)),
            words(str(at.head_id)),
            words(number(at.head_behind)),
            words(number(band_of(at, cap))),
            words(_in_band(at, cap, held=at.index == answer.asked.first)),
        )
        for at in positions[:MOST_ROWS]
    )
    return Table(caption, columns, rows, more=max(0, len(positions) - MOST_ROWS))


def _in_band(at: ForcedPosition, cap: float, *, held: bool) -> State:
    """Head is held to the band at every index, and base (`held`) at the first difference (`jobs.near_tie.ruled`)."""
    behind = max(at.head_behind, at.base_behind if held else 0.0)
    return State("in the band", "good") if behind <= band_of(at, cap) else State("outside the band", "bad")


def _locks(doc: JudgeInput, cell: CellInput) -> list[Block]:
    """What the oracle answered about locks that have a band of margins: how clear its own choice is there."""
    asked = [one for one in doc.adjudications if one.asked.kind == "lock" and one.asked.cell == cell.plan.cell]
    if not asked:
        return []
    base = asked[0].asked.base
    heads = ("Position", "oracle's id", "margin", f"{base}, id", f"{base}, behind")
    columns = (*(Column(head, "right") for head in heads), Column("What"))
    return [Table("Locks, by the oracle, fed base's ids", columns, tuple(map(_lock, asked)))]


def _lock(answer: Adjudication) -> tuple[Inlines, ...]:
    place = words(integer(answer.asked.first))
    if not answer.positions:
        return (place, *[words("")] * 4, words(f"not answered: {answer.failure}"))
    at = answer.positions[0]
    margin = NOT_RECORDED if at.oracle_margin is None else number(at.oracle_margin)
    told = (str(at.oracle_id), margin, str(at.base_id), number(at.base_behind))
    alike = "the same id" if at.base_id == at.oracle_id else "another id than the oracle's"
    return (place, *map(words, told), words(alike))
