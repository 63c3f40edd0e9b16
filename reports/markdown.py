"""Blocks as GitHub-flavoured Markdown. All escaping of user text for this form happens here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from reports.blocks import (
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
    Tone,
    Verbatim,
)
from reports.escape import html_code, html_text, markdown_code, markdown_text, visible
from reports.format import plural

SIGNS: Final[dict[Tone, str]] = {"good": "🟢", "bad": "🔴", "warn": "🟡", "quiet": "⚪"}


def section(part: Section, *, folded: bool) -> str:
    """A section under its heading; without `folded` only the summary line and what is always shown."""
    pieces = ["" if part.minor else f"### {part.title}", inline(part.summary), *(block(item) for item in part.shown)]
    if folded:
        pieces += [block(item) for item in part.folded]
    return "\n\n".join(piece for piece in pieces if piece)


def inline(pieces: Inlines, *, in_table: bool = False) -> str:
    """Inline pieces as Markdown."""
    return _side_by_side(_inline(piece, in_table) for piece in pieces)


def block(item: Block, *, bare: bool = False) -> str:
    """One block; `bare` leaves out a table's caption, for a fold whose summary has said it. Pictures give nothing."""
    match item:
        case Heading():
            return f"#### {inline(item.words)}"
        case Paragraph():
            return f"> {inline(item.words)}" if item.tone == "warn" else inline(item.words)
        case Table():
            return _table(item, bare)
        case KeyValue():
            rows = tuple(((Text(key),), value) for key, value in item.pairs)
            return _grid((("What", "left"), ("Value", "left")), rows)
        case Listing():
            return "\n".join(f"- {inline(words)}" for words in item.items)
        case Verbatim():
            return _verbatim(item)
        case Details():
            return _details(item)
        case Bars() | Spark():
            return ""


def _inline(piece: Inline, in_table: bool) -> str:
    match piece:
        case Text():
            edges = (
                " " * (len(piece.text) - len(piece.text.lstrip(" "))),
                " " * (len(piece.text) - len(piece.text.rstrip(" "))),
            )
            core = piece.text.strip(" ")
            return f"{edges[0]}{markdown_text(core, in_table=in_table)}{edges[1]}" if core else piece.text[:1]
        case Strong():
            core = piece.text.strip()
            return f"**{markdown_text(core, in_table=in_table)}**" if core else ""
        case Struck():
            core = piece.text.strip()
            return f"~~{markdown_text(core, in_table=in_table)}~~" if core else ""
        case Name():
            return markdown_code(piece.text, in_table=in_table)
        case CellRef():
            return markdown_code(piece.cell, in_table=in_table)
        case State():
            return f"{SIGNS[piece.tone]} **{markdown_text(piece.word, in_table=in_table)}**"


def _side_by_side(parts: Iterable[str]) -> str:
    """Parts in a row; two code spans that would touch, and so read as one, are held apart."""
    out = ""
    for part in parts:
        out += "<span></span>" + part if out.endswith("`") and part.startswith("`") else part
    return out


def _table(table: Table, bare: bool) -> str:
    grid = _grid(tuple((column.title, column.align) for column in table.columns), table.rows)
    caption = "" if bare else f"**{markdown_text(table.caption)}**\n\n"
    more = f"\n\n{plural(table.more, 'more row')}, in the full report." if table.more else ""
    return f"{caption}{grid}{more}"


def _grid(columns: tuple[tuple[str, str], ...], rows: tuple[tuple[Inlines, ...], ...]) -> str:
    head = "| " + " | ".join(markdown_text(title, in_table=True) for title, _ in columns) + " |"
    rule = "|" + "|".join("---:" if align == "right" else ":---" for _, align in columns) + "|"
    lines = ["| " + " | ".join(inline(cell, in_table=True) for cell in row) + " |" for row in rows]
    return "\n".join([head, rule, *lines])


def _verbatim(item: Verbatim) -> str:
    lines = [visible(line) for line in item.lines]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    ticks = "`" * max(3, longest + 1)
    return "\n".join([ticks, *lines, ticks])


def _details(item: Details) -> str:
    summary = "".join(_inline_html(piece) for piece in item.summary)
    alone = len(item.blocks) == 1
    body = "\n\n".join(text for text in (block(part, bare=alone) for part in item.blocks) if text)
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def _inline_html(piece: Inline) -> str:
    match piece:
        case Text():
            return html_text(piece.text)
        case Strong():
            return f"<b>{html_text(piece.text)}</b>"
        case Struck():
            return f"<s>{html_text(piece.text)}</s>"
        case Name():
            return html_code(piece.text)
        case CellRef():
            return html_code(piece.cell)
        case State():
            return f"{SIGNS[piece.tone]} <b>{html_text(piece.word)}</b>"
