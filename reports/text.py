"""Blocks as plain text for a terminal or a log: aligned columns, no colour, no control character from user text."""

from __future__ import annotations

import textwrap
import unicodedata
from typing import Final

from reports.blocks import (
    Bar,
    Bars,
    Block,
    CellRef,
    Details,
    Heading,
    Inline,
    Inlines,
    KeyValue,
    Listing,
    Name,
    Paragraph,
    Section,
    Spark,
    State,
    Strong,
    Struck,
    Table,
    Text,
    Verbatim,
)
from reports.escape import TEXT_LIMIT, clip, named, visible
from reports.format import plural

WIDTH: Final = 100
TABLE_WIDTH: Final = 120
_NARROWEST: Final = 16
_BAR_WIDTH: Final = 40
_SHADES: Final = {
    "hit": "█",
    "retained": "▓",
    "bypassed": "▒",
    "staged": "░",
    "in_place": "▚",
    "floor": "█",
    "above": "░",
    "captured": "·",
    "load": "░",
    "warm_up": "▒",
    "timed": "█",
}


def section(part: Section, *, folded: bool) -> str:
    """A section under an underlined title."""
    title = visible(part.title)
    pieces = [
        f"{title}\n{'-' * _columns(title)}",
        wrap(inline(part.summary)) if part.summary else "",
        *(block(item) for item in part.shown),
    ]
    if folded:
        pieces += [block(item) for item in part.folded]
    return "\n\n".join(piece for piece in pieces if piece)


def inline(pieces: Inlines) -> str:
    """Inline pieces as one line of text."""
    return "".join(_inline(piece) for piece in pieces)


def block(item: Block) -> str:
    """One block."""
    match item:
        case Heading():
            return f"* {inline(item.words)}"
        case Paragraph():
            return wrap(inline(item.words))
        case Table():
            more = f"\n{plural(item.more, 'more row')}, in the full report" if item.more else ""
            return f"{visible(item.caption)}:\n{_table(item)}{more}"
        case KeyValue():
            width = max((_columns(visible(key)) for key, _ in item.pairs), default=0)
            return "\n".join(f"  {_pad(visible(key), width)}  {inline(value)}" for key, value in item.pairs)
        case Listing():
            return "\n".join(wrap(inline(words), first="- ", rest="  ") for words in item.items)
        case Verbatim():
            return "\n".join(f"  {visible(line)}" for line in item.lines)
        case Details():
            inner = [block(part) for part in item.blocks]
            if not any(inner):
                return ""
            return "\n".join([f"+ {inline(item.summary)}", *(textwrap.indent(text, "  ") for text in inner if text)])
        case Bars():
            return _bars(item)
        case Spark():
            return ""


def wrap(text: str, *, first: str = "", rest: str = "") -> str:
    """Text wrapped to the terminal's width; long names are never broken."""
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def _inline(piece: Inline) -> str:
    match piece:
        case Text() | Strong():
            return clip(visible(piece.text), TEXT_LIMIT)
        case Struck():
            return f"[struck out: {clip(visible(piece.text), TEXT_LIMIT)}]"
        case Name():
            return named(piece.text)
        case CellRef():
            return named(piece.cell)
        case State():
            return visible(piece.word)


def _table(table: Table) -> str:
    head = [visible(column.title) for column in table.columns]
    rows = [head, *([inline(cell) for cell in row] for row in table.rows)]
    right = [column.align == "right" for column in table.columns]
    places = range(len(head))
    longest = [max((_columns(word) for row in rows for word in row[place].split()), default=0) for place in places]
    widths = _fitted([max(_columns(row[place]) for row in rows) for place in places], longest, right)
    rule = "  ".join("-" * width for width in widths)
    lines = [line for row in rows for line in _row_lines(row, widths, right)]
    lines.insert(len(_row_lines(head, widths, right)), rule)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _fitted(widths: list[int], longest_words: list[int], right: list[bool]) -> list[int]:
    """Column widths that fit the terminal where they can: the widest columns of words give way, figures never do."""
    fitted = list(widths)
    least = [max(_NARROWEST, longest) for longest in longest_words]
    excess = 2 * len(widths) + sum(fitted) - TABLE_WIDTH
    while excess > 0:
        able = [place for place, is_right in enumerate(right) if not is_right and fitted[place] > least[place]]
        if not able:
            break
        fitted[max(able, key=lambda place: fitted[place])] -= 1
        excess -= 1
    return fitted


def _row_lines(row: list[str], widths: list[int], right: list[bool]) -> list[str]:
    """One row, its long cells wrapped inside their columns; a word longer than its column stands out whole."""
    cells = [
        [cell]
        if _columns(cell) <= width
        else textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    height = max(map(len, cells))
    return [
        "  ".join(
            _pad(lines[place] if place < len(lines) else "", width, end)
            for lines, width, end in zip(cells, widths, right, strict=True)
        )
        for place in range(height)
    ]


def _bars(item: Bars) -> str:
    lines = [f"{visible(item.title)}:"]
    labels = max((_columns(visible(bar.label)) for _, bars in item.groups for bar in bars), default=0)
    for title, bars in item.groups:
        lines += [f"  {visible(title)}"] if title else []
        lines += [f"  {_pad(visible(bar.label), labels)} {_drawn(bar)}{visible(bar.reading)}" for bar in bars]
    if item.ends and any(bar.slices for _, bars in item.groups for bar in bars):
        lines.append(f"  from left to right: {visible(item.ends[0])} to {visible(item.ends[1])}")
    legend = [f"{_SHADES.get(kind, '#')} {visible(told)}" for kind, told in item.legend]
    lines += [f"  {'   '.join(legend)}"] if legend else []
    return "\n".join(lines)


def _drawn(bar: Bar) -> str:
    """The bar between strokes; of lines, and of a bar without parts, nothing."""
    if not bar.slices:
        return ""
    cells = [" "] * _BAR_WIDTH
    for item in bar.slices:
        start, end = (round(place * _BAR_WIDTH / 1000) for place in (item.start, item.start + item.width))
        cells[start:end] = [_SHADES.get(item.kind, "#")] * (end - start)
    return f"|{''.join(cells)}| "


def _columns(text: str) -> int:
    return sum(_cell_width(character) for character in text)


def _cell_width(character: str) -> int:
    if unicodedata.combining(character) or character in "\u200d\ufe0f\u00ad":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _pad(text: str, width: int, right: bool = False) -> str:
    space = " " * (width - _columns(text))
    return space + text if right else text + space
