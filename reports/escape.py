"""User text made safe for each form: shown as typed, never able to ping, link, break a table or run.

Names, messages and log lines come from sweep files, model metadata, branch names and engines, so none is trusted.
Three rules: `visible` first (control characters become escapes), then one helper a form. GitHub turns mentions, issue
numbers, hashes and emoji codes in *rendered text* into links, where neither a backslash nor an entity helps, but leaves
code alone: such tokens are put into code spans, which keeps them readable and copies them as typed.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator
from typing import Final

NAME_LIMIT: Final = 400  # characters of a name that a report shows; field names are far shorter
EMPTY: Final = "(empty)"
TEXT_LIMIT: Final = 2000  # characters of a message

_NAMED_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_KEPT_FORMATS: Final = {
    "\u200d",
    "\ufe0f",
    "\u00ad",
}  # joiners inside emoji, soft hyphen: harmless, needed to read as typed
_HIDDEN: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}

_ACTIVE: Final = re.compile(  # found anywhere in a word, makes the whole word one that a host may link
    r"@"  # mention, mail address, owner/repo@sha
    r"|\#\d"  # issue number, owner/repo#1
    r"|://|(?i:www\.|mailto:|xmpp:|javascript:)"
    r"|(?i:\bgh-\d)"
    r"|\b[A-Z][A-Z0-9]*-\d"  # a repository's own ticket prefix
    r"|(?i:\b[0-9a-f]{7,64}\b)"  # commit hash
    r"|:[A-Za-z0-9_+-]*[A-Za-z+-][A-Za-z0-9_+-]*:"  # emoji code, no time of day
)
_MARKDOWN: Final = re.compile(r"[&<>\\`*\[\]{}~|$#!]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK_START: Final = re.compile(r"^(?:[ \t]|[-+](?=\s|$)|=+\s*$|-+\s*$|\d{1,9}(?=[.)](?:\s|$)))")


def visible(text: str) -> str:
    """`text` on one line with control, format and separator characters written as escapes (NUL as \\x00)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """The first `limit` characters of `text`, with an ellipsis that says that some are left out."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def named(text: str, limit: int = NAME_LIMIT) -> str:
    """A name on one line, its first `limit` characters; one of blanks alone is said to be empty."""
    shown = clip(visible(text), limit)
    return shown if shown.strip() else EMPTY


def markdown_text(text: str, *, in_table: bool = False) -> str:
    """Prose for a Markdown paragraph or cell: markup is inert, whatever GitHub would link stands in code."""
    prose = ""
    for piece, is_active in _pieces(clip(visible(text))):
        shown = markdown_code(piece, in_table=in_table) if is_active else _inert(piece)
        prose += "<span></span>" + shown if prose.endswith("`") and shown.startswith("`") else shown
    if in_table:
        return prose
    return _BLOCK_START.sub(lambda m: f"&#{ord(m.group()[0])};{m.group()[1:]}", prose)


def markdown_code(text: str, *, in_table: bool = False, limit: int = NAME_LIMIT) -> str:
    """A Markdown code span that shows `text` as typed, its first `limit` characters.

    Inside a table a bar must be written `\\|` even in code, and then a backslash before a bar cannot be written at all:
    the text is cut there into two spans that stand side by side.
    """
    shown = named(text, limit)
    if shown == EMPTY:
        return shown
    pieces = re.split(r"(?<=\\)(?=\|)", shown) if in_table else [shown]
    return "<span></span>".join(_code_span(piece.replace("|", "\\|") if in_table else piece) for piece in pieces)


def html_text(text: str) -> str:
    """Prose for raw HTML inside Markdown (a `<summary>`): escaped, linkable words in `<code>`."""
    return "".join(
        f"<code>{html.escape(piece)}</code>" if is_active else html.escape(piece)
        for piece, is_active in _pieces(clip(visible(text)))
    )


def html_code(text: str) -> str:
    """A `<code>` element for raw HTML inside Markdown."""
    return f"<code>{html.escape(named(text))}</code>"


def slug(name: str) -> str:
    """A file name and anchor for `name`: lower-case words and a digest, so that two names never share one."""
    import hashlib

    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "cell"
    return f"{words}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def anchor_of(metric: str) -> str:
    """The place on a cell's page where a counter or metric is read."""
    return f"reading-{slug(metric)}"


def _visible_character(character: str) -> str:
    if " " <= character <= "~":
        return character
    if character in _NAMED_ESCAPES:
        return _NAMED_ESCAPES[character]
    if character in _KEPT_FORMATS or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """`text` in order, cut into words that a host may link (True) and what it leaves alone.

    A word is code whole: what is left of one beside a code span begins a text of its own, in which more may be found.
    """
    for word in re.split(r"(\s+)", text):
        yield word, _ACTIVE.search(word) is not None


def _inert(text: str) -> str:
    return _MARKDOWN.sub(lambda m: f"&#{ord(m.group())};", text)


def _code_span(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    padded = text.startswith("`") or text.endswith("`") or (text.startswith(" ") and text.endswith(" "))
    pad = " " if padded else ""
    return f"{fence}{pad}{text}{pad}{fence}"
