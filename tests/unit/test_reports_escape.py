"""User text in every form: shown as typed, and nothing of it pings, links, breaks a table or runs."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reports.blocks import Name, words
from reports.escape import clip, html_text, markdown_code, markdown_text, named, slug, visible
from reports.markdown import inline
from reports.render import render
from tests.unit import reports_runs as runs
from tests.unit import reports_samples as samples
from tests.unit.report_pages import write_html
from tests.unit.reports_parsing import Page, markdown

ACTIVE = re.compile(r"@[A-Za-z0-9]|#\d|(?i:\bGH-\d)|(?i:https?:|www\.|mailto:)|\b[0-9a-f]{40}\b|:[a-z+]+[0-9a-z_+-]*:")
BLOCKS = {"h2", "h3", "h4", "p", "pre", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "blockquote"}
MARKDOWN_TAGS = BLOCKS | {"strong", "b", "code", "span", "details", "summary"}
HOSTILE = pytest.mark.parametrize("name", samples.HOSTILE)


def as_typed(name: str) -> str:
    return re.sub(r"\s+", " ", visible(name)).strip()


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@HOSTILE
def test_field_73_a_code_span_in_a_table_shows_the_name_as_typed(name: str) -> None:
    row = (
        markdown(f"| a | b | c |\n|---|---|---|\n| x | {markdown_code(name, in_table=True)} | y |\n").tables[0].rows[0]
    )
    assert len(row) == 3
    assert flat(row[1]) == (as_typed(name) or "(empty)")


@HOSTILE
def test_field_73_prose_in_a_table_keeps_its_columns_and_reads_as_typed(name: str) -> None:
    row = (
        markdown(f"| a | b | c |\n|---|---|---|\n| x | {markdown_text(name, in_table=True)} | y |\n").tables[0].rows[0]
    )
    assert len(row) == 3
    assert flat(row[1]) == as_typed(name)


@HOSTILE
def test_prose_in_a_paragraph_reads_as_typed_and_stays_a_paragraph(name: str) -> None:
    page = markdown(f"{markdown_text(name)}\n")
    assert flat(page.text).strip() == as_typed(name)
    assert {tag for tag, _ in page.tags} <= {"p", "code", "span"}


@HOSTILE
def test_field_76_a_comment_pings_and_links_nobody(name: str) -> None:
    page = markdown(render(samples.hostile(name), "comment"))
    assert page.links == []
    assert ACTIVE.search(page.scanned) is None, page.scanned[max(0, ACTIVE.search(page.scanned).start() - 30) :][:80]  # type: ignore[union-attr]
    assert {tag for tag, _ in page.tags} <= MARKDOWN_TAGS
    assert page.unbalanced == []
    assert as_typed(name) in flat(page.text)


@HOSTILE
def test_field_73_every_row_of_a_comment_keeps_its_columns(name: str) -> None:
    page = markdown(render(samples.hostile(name), "comment"))
    assert len(page.tables) >= 10
    for table in page.tables:
        assert {len(row) for row in table.rows} <= {len(table.head)}, table


def test_field_76_a_link_of_ours_still_works() -> None:
    address = "https://ci.example.com/reports/7/index.html?a=1&b=2"
    page = markdown(render(samples.hostile("[x](https://bad.example)"), "comment", report_url=address))
    assert page.links == [address]


@HOSTILE
def test_field_77_a_page_shows_names_as_text_and_runs_nothing(name: str, tmp_path: Path) -> None:
    index = write_html(samples.hostile(name), tmp_path, doc=runs.judge_input(log=name, word=name))
    cells = sorted((tmp_path / "cells").iterdir())
    assert len(cells) == 2
    for path in (index, *cells):
        page = Page(path.read_text())
        assert page.unbalanced == []
        assert not {"script", "img", "iframe", "object", "form", "style", "base"} & {tag for tag, _ in page.tags}
        assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on") or key in {"style", "src"}]
        for link in page.links:
            assert re.fullmatch(r"#[a-z0-9-]+|(\.\./)?(cells/)?[a-z0-9-]+\.html(#[a-z0-9-]+)?", link), link
        assert as_typed(name) in flat(page.text)


@HOSTILE
def test_a_terminal_gets_no_control_character(name: str) -> None:
    shown = render(samples.hostile(name), "text")
    assert not [c for c in shown if c != "\n" and (c < " " or c == "\x7f" or c in "\u2028\u2029\u202e\u200f")]
    assert as_typed(name) in flat(shown)


@HOSTILE
def test_junit_is_well_formed_and_reads_as_typed(name: str) -> None:
    for typed in (name, f"{name} ]]> \x0b\ufffe\ud800 end"):
        text = render(samples.hostile(typed), "junit")
        suite = ElementTree.fromstring(text.encode()).find("testsuite")
        assert suite is not None and suite.get("name") == named(typed)
        case = suite.find("testcase")
        assert case is not None and case.get("name") == named(typed)
        told = " ".join(suite.itertext())
        assert visible(typed) in told, "what a finding or a note says"
        assert not [c for c in text if c != "\n" and (c < " " or c in "\x7f\u2028\u2029\u202e\u200f\ufffe")]


def test_control_characters_are_written_as_escapes() -> None:
    assert visible("a\x00b\n\t\u2028\u202e\x1b") == "a\\x00b\\n\\t\\u2028\\u202e\\x1b"
    assert visible("\ud800") == "\\ud800"
    assert visible("e\u0301 \U0001f468\u200d\U0001f469") == "e\u0301 \U0001f468\u200d\U0001f469"


def test_neighbouring_code_spans_do_not_merge() -> None:
    page = markdown(markdown_text(":a::b: @x@y") + "\n")
    assert page.text.strip() == ":a::b: @x@y"


def test_neighbouring_names_do_not_merge() -> None:
    page = markdown(inline(words(Name("a`"), Name("b"), "@c", Name("d"))) + "\n")
    assert page.text.strip() == "a`b@cd"
    assert [tag for tag, _ in page.tags].count("code") == 4


def test_a_backslash_never_stands_before_an_escaped_bar() -> None:
    """Parsers differ on two backslashes before a bar in a table: some end the cell there."""
    assert "\\\\|" not in markdown_code("a\\|b\\\\|c", in_table=True)


def test_summaries_are_raw_html_and_escaped_as_such() -> None:
    assert html_text("<b> & @me") == "&lt;b&gt; &amp; <code>@me</code>"


def test_clip_says_that_something_is_left_out() -> None:
    assert clip("abcdef", 4) == "abc…"
    assert clip("abcd", 4) == "abcd"


def test_slugs_of_different_names_differ() -> None:
    names = [*samples.HOSTILE, "a/b", "a-b", "A/B"]
    made = [slug(name) for name in names]
    assert len(set(made)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]{1,72}", name) for name in made)
