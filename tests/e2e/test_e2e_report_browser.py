"""The report's pages in a real browser, from disk: both schemes, wide and 320 px, keyboard, no request outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.browsing import CONTRASTS, PAGE_WIDTH, SCHEMES, WIDTHS, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", ["good", "broken", "broken cell", "many", "hostile", "hostile cell", "long"])
def test_field_80_a_page_is_quiet_fits_and_can_be_read(browser: Browser, site: dict[str, Path], name: str) -> None:
    path = site[name]
    page, seen = visit(browser, path)
    folder = path.parent.parent if path.parent.name == "cells" else path.parent
    assert seen.complaints == []
    assert all(url.startswith(folder.as_uri()) for url in seen.requests), seen.requests
    assert len(seen.requests) == 2, seen.requests  # the page and its style sheet
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(PAGE_WIDTH) <= width
    page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
    assert page.evaluate(PAGE_WIDTH) <= WIDTHS[-1], "with all folds open"
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 50
        assert contrasts[0][0] >= 4.5, (scheme, contrasts[:5])
    page.context.close()


def test_field_80_the_style_sheet_is_let_in_and_follows_the_scheme(browser: Browser, site: dict[str, Path]) -> None:
    grounds = []
    for scheme in SCHEMES:
        page, _ = visit(browser, site["good"], scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.context.close()
    assert grounds == ["rgb(246, 247, 249)", "rgb(16, 20, 26)"]


def test_figures_line_up(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["good"])
    assert "tabular-nums" in page.evaluate("getComputedStyle(document.querySelector('td.right')).fontVariantNumeric")
    assert page.evaluate("getComputedStyle(document.querySelector('td.right')).textAlign") == "right"
    page.context.close()


def test_a_page_reads_the_same_without_script(browser: Browser, site: dict[str, Path]) -> None:
    with_script, _ = visit(browser, site["broken"])
    without, _ = visit(browser, site["broken"], java_script_enabled=False)
    assert with_script.inner_text("main") == without.inner_text("main")
    assert with_script.query_selector("script") is None
    with_script.context.close()
    without.context.close()


def test_bars_are_drawn_to_scale(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["good"])
    box = page.locator(".bar svg").first.bounding_box()
    assert box is not None
    assert box["width"] > 400
    served = page.locator("figure", has_text="Where each touch of a weight was served from")
    by_bytes = served.locator(".bar", has_text="by bytes").last
    kinds = ("fill-hit", "fill-retained", "fill-bypassed")
    widths = [float(by_bytes.locator(f"rect.{kind}").get_attribute("width") or 0) for kind in kinds]
    assert widths == [702, 165, 133]  # 70.16 %, 16.52 %, 13.32 %
    page.context.close()


@pytest.mark.parametrize("width", [1200, 500, 320])
def test_names_and_sentences_keep_room_beside_figures(browser: Browser, site: dict[str, Path], width: int) -> None:
    """A column of cell names or sentences never gives way to figures until a word stands on each line."""
    page, _ = visit(browser, site["matrix"], width=width)
    tall = page.evaluate("[...document.querySelectorAll('td .cell')].map(n => n.getClientRects()[0].height / 17)")
    assert len(tall) > 20
    assert max(tall) <= 5.5, "lines of a name"
    narrow = page.evaluate(
        "[...document.querySelectorAll('td.prose')].filter(n => n.checkVisibility()).map(n => n.offsetWidth)"
    )
    assert min(narrow) >= min(272, 0.6 * width) - 1
    assert page.evaluate(PAGE_WIDTH) <= width
    page.context.close()


def test_tables_scroll_inside_their_own_box(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["broken"], width=320)
    wide = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"
    )
    assert wide > 0
    unreachable = page.evaluate("[...document.querySelectorAll('.scroll')].filter(box => box.tabIndex !== 0).length")
    assert unreachable == 0
    page.context.close()


def test_the_keyboard_reaches_and_opens_everything(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["good"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")
    summary = page.locator("summary", has_text="exact metrics")
    reached = False
    for _ in range(60):
        page.keyboard.press("Tab")
        reached = page.evaluate("document.activeElement.textContent.includes('exact metrics')")
        if reached:
            break
    assert reached
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert summary.locator("xpath=..").get_attribute("open") is not None
    page.context.close()


def test_sweep_to_cell_to_samples_in_three_clicks(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["many"])
    page.get_by_role("link", name="cell 0", exact=True).first.click()
    assert "/cells/cell-0-" in page.url
    page.get_by_role("navigation", name="Sections").get_by_role("link", name="Samples").click()
    page.locator("summary", has_text="every sample, in nanoseconds").click()
    assert page.get_by_text("60000000 67000021").first.is_visible()
    page.get_by_role("link", name="sweep smollm2-residency").click()
    assert page.url.endswith("index.html")
    page.context.close()


def test_a_single_cell_s_page_is_one_click_away(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["good"])
    page.get_by_role("link", name="Behind these figures").click()
    assert page.get_by_text("Runs in the order they ran").is_visible()
    page.context.close()


def test_states_are_words_and_landmarks_are_named(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["broken"])
    assert all(text.strip() for text in page.locator(".state").all_text_contents())
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('section, nav, [role=region], svg[role=img]')].filter("
        "node => !node.getAttribute('aria-label') && !node.getAttribute('aria-labelledby')).length"
    )
    assert unnamed == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids))
    page.context.close()
