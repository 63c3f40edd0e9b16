"""What a report is made of: typed pieces that each form renders in its own way.

Inline pieces carry words and no markup: escaping belongs to the renderers alone. `Name` is user text shown as code;
`Text` is prose that may quote user text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["good", "bad", "warn", "quiet"]
Align = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Text:
    """Prose."""

    text: str


@dataclass(frozen=True, slots=True)
class Strong:
    """Prose that stands out."""

    text: str


@dataclass(frozen=True, slots=True)
class Struck:
    """Prose that counts no more, and stays readable."""

    text: str


@dataclass(frozen=True, slots=True)
class Name:
    """A name, id or expression, shown as code."""

    text: str


@dataclass(frozen=True, slots=True)
class SweepRef(Name):
    """A sweep's id, linked to its page in forms that have pages."""


@dataclass(frozen=True, slots=True)
class EvidenceRef(Name):
    """A name, linked to what stands behind it on its cell's page in forms that have pages; `anchor`: where on it."""

    cell: str
    anchor: str


@dataclass(frozen=True, slots=True)
class ReadingName(Name):
    """The name of a counter or metric where its readings stand: what an `EvidenceRef` leads to."""


@dataclass(frozen=True, slots=True)
class CellRef:
    """A cell's name, linked to its page in forms that have pages."""

    cell: str


@dataclass(frozen=True, slots=True)
class State:
    """A state in a word, with a tone that colour may repeat."""

    word: str
    tone: Tone


Inline = Text | Strong | Struck | Name | CellRef | State
Inlines = tuple[Inline, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading inside a section."""

    words: Inlines


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph; `tone` sets it off where it warns."""

    words: Inlines
    tone: Tone = "quiet"


@dataclass(frozen=True, slots=True)
class Column:
    """A table column; one of `prose` holds sentences, which need room."""

    title: str
    align: Align = "left"
    prose: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns; `more` rows were left out to keep the form short. Marked columns and rows are set off."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Inlines, ...], ...]
    more: int = 0
    marked: tuple[int, ...] = ()
    marked_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyValue:
    """Facts by name."""

    pairs: tuple[tuple[str, Inlines], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """A list of sentences."""

    items: tuple[Inlines, ...]


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Lines shown as they are: a command, a log tail."""

    lines: tuple[str, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Slice:
    """One part of a bar: its `kind` picks the colour, start and width are in thousandths of the bar."""

    kind: str
    label: str
    value: str
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class Bar:
    """One labelled bar. `lines` are samples in order, in thousandths of both sides, cut where nothing is known."""

    label: str
    slices: tuple[Slice, ...]
    reading: str = ""
    lines: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """A picture of parts: groups of bars on one scale, with a legend of (kind, words).

    `bands` stand behind every bar, `ends` are words at the two ends of the scale, and `wide` labels are long. `hint`
    says how the drawing reads, where it is drawn.
    """

    title: str
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    legend: tuple[tuple[str, str], ...]
    bands: tuple[Slice, ...] = ()
    ends: tuple[str, str] | None = None
    wide: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Spark:
    """Samples in order as a line: points in thousandths of width and of height."""

    label: str
    points: tuple[tuple[int, int], ...]
    low: str
    high: str


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks folded behind a summary; `open` on a page, which has the room, and folded in a comment all the same."""

    summary: Inlines
    blocks: tuple[Block, ...]
    open: bool = False


Block = Heading | Paragraph | Table | KeyValue | Listing | Verbatim | Bars | Spark | Details


@dataclass(frozen=True, slots=True)
class Section:
    """One subject of a report: a summary line, blocks always shown, and details that the usual case folds.

    A `minor` section needs no heading where headings are many.
    """

    anchor: str
    title: str
    summary: Inlines
    shown: tuple[Block, ...] = ()
    folded: tuple[Details, ...] = ()
    minor: bool = False


def words(*pieces: str | Inline) -> Inlines:
    """Inline pieces from strings (prose) and pieces."""
    return tuple(Text(piece) if isinstance(piece, str) else piece for piece in pieces)


def joined(pieces: Sequence[Inline], separator: str = ", ") -> Inlines:
    """Pieces with a separator between them."""
    out: list[Inline] = []
    for piece in pieces:
        out += [Text(separator), piece] if out else [piece]
    return tuple(out)
