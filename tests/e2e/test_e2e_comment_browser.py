"""The comment as a reader of a pull request has it: by GitHub's parser, in a browser, both schemes, wide and narrow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import cmarkgfm
import pytest
from cmarkgfm.cmark import Options

from reports.render import render
from tests.e2e.browsing import OPEN_ALL, PAGE_WIDTH, SCHEMES, keep, visit
from tests.unit import reports_samples as samples

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

COLUMN: Final = 812  # of a comment on a wide screen
PHONE: Final = 360
SHELL: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>comment</title><style>
:root { color-scheme: light dark }
body { margin: 0; padding: 16px; font: 14px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
table { display: block; width: max-content; max-width: 100%; overflow: auto; border-collapse: collapse }
th, td { border: 1px solid #8886; padding: 4px 10px }
code { background: #8883; padding: 2px 5px; white-space: break-spaces }
blockquote { border-left: 4px solid #8886; margin: 0; padding: 0 1em }
pre { overflow: auto }
pre code { white-space: pre }
</style>"""
"""What GitHub's own style does to the tags of a comment, as far as room goes."""
HOSTILE: Final = (
    "fixes #1 @octocat | `x\\| www.example.com </script><img src=x onerror=alert(1)>\n\u202e- x" + "y" * 200
)
BODIES: Final = {
    "broken": render(samples.broken(), "comment"),
    "hostile": render(samples.hostile(HOSTILE), "comment"),
    "better": render(samples.verdict(), "comment"),
    "many": render(samples.many(40), "comment"),
    "shortened": render(samples.broken(), "comment", limit=2500),
}
QUICK: Final = ("broken", "hostile")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BODIES]
)
def test_field_80_a_comment_fits_its_column_and_says_first_what_is_to_do(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    html = cmarkgfm.github_flavored_markdown_to_html(BODIES[name], options=Options.CMARK_OPT_UNSAFE)
    (tmp_path / "comment.html").write_text(f"{SHELL}{html}", encoding="utf-8")
    page, seen = visit(browser, tmp_path / "comment.html", width=COLUMN)
    assert seen.complaints == [] and len(seen.requests) == 1
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        keep(page, f"comment-{name}-{scheme}")
    assert page.evaluate(PAGE_WIDTH) <= COLUMN
    title, todo = (page.locator(place).first.bounding_box() for place in ("h2", "text=Next:"))
    assert title is not None and todo is not None and title["y"] < todo["y"] < 500, "on the first screen"
    assert page.locator("details[open]").count() == 0, "what is usual is folded"
    assert page.locator("a, img, script, iframe").count() == 0
    page.evaluate(OPEN_ALL)
    page.set_viewport_size({"width": PHONE, "height": 800})
    assert page.evaluate(PAGE_WIDTH) <= PHONE
    page.context.close()


def test_the_counts_of_seams_are_seen_without_moving_their_table(browser: Browser, tmp_path: Path) -> None:
    """Names of places are long: what counts stands before them."""
    html = cmarkgfm.github_flavored_markdown_to_html(BODIES["broken"], options=Options.CMARK_OPT_UNSAFE)
    (tmp_path / "comment.html").write_text(f"{SHELL}{html}", encoding="utf-8")
    page, _ = visit(browser, tmp_path / "comment.html", width=COLUMN)
    head = page.locator("table", has=page.locator("th", has_text="Operator")).locator("th", has_text="head")
    box = head.first.bounding_box()
    assert box is not None and box["x"] + box["width"] <= COLUMN
    page.context.close()
