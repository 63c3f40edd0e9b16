"""Reads rendered reports back with real parsers: GitHub's Markdown for comments, html.parser for pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import cmarkgfm
from cmarkgfm.cmark import Options

_TOLD = {"th", "td", "caption", "p", "summary"}
VOID = {"br", "hr", "img", "input", "link", "meta", "rect", "wbr", "polyline"}


@dataclass
class Table:
    """A table: caption, header cells, rows of cells, all as text."""

    caption: str = ""
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """What a page holds: tags with attributes, links, tables, text, and the text that a host would scan for links."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.links: list[str] = []
        self.tables: list[Table] = []
        self.text = ""
        self.scanned = ""  # outside code, pre and links
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self._cell: list[str] | None = None
        self._last_block = ""
        self.feed(html)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "a":
            self.links.append(dict(attrs).get("href") or "")
        if tag == "table":
            self.tables.append(Table(caption=self._last_block))
        if tag == "tr" and "tbody" in self._open:
            self.tables[-1].rows.append([])
        if tag in _TOLD:
            self._cell = []
        if tag not in {"code", "span", "strong", "b", "em", "bdi", "wbr"}:
            self._break()
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open[-1] != tag:
            self.unbalanced.append(f"/{tag}")
        else:
            self._open.pop()
        if tag not in {"code", "span", "strong", "b", "em", "bdi", "wbr"}:
            self._break()
        if tag in _TOLD and self._cell is not None:
            self._keep(tag, "".join(self._cell).strip())
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if not {"code", "pre", "a", "style"} & set(self._open):
            self.scanned += data
        elif self.scanned[-1:] != "\x1f":
            self.scanned += "\x1f"
        if self._cell is not None:
            self._cell.append(data)

    def _break(self) -> None:
        self.scanned += "\x1f"

    def _keep(self, tag: str, text: str) -> None:
        if tag in {"p", "summary"}:
            self._last_block = text
        elif tag == "caption":
            self.tables[-1].caption = text
        elif "thead" in self._open:
            self.tables[-1].head.append(text)
        elif self.tables and self.tables[-1].rows:
            self.tables[-1].rows[-1].append(text)

    def table(self, caption: str) -> Table:
        """The first table with that caption."""
        return next(table for table in self.tables if table.caption == caption)


def markdown(body: str) -> Page:
    """A comment as GitHub's own parser reads it, raw HTML kept."""
    return Page(cmarkgfm.github_flavored_markdown_to_html(body, options=Options.CMARK_OPT_UNSAFE))
