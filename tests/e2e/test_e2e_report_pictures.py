"""What people who cannot see colours, or use no mouse, get of a page: roles, contrast, keyboard; and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.browsing import OPEN_ALL, SCHEMES, WITHOUT_SHADES, Scheme, faults, keep, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

CONTRAST_ALONE = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
FOCUSED = "document.activeElement.textContent.trim()"


def tab_to(page: Page, text: str, most: int = 80) -> None:
    """Press Tab until what has the focus says `text`."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED) == text:
            return
    raise AssertionError(f"no way to {text!r} by Tab; the focus is on {page.evaluate(FOCUSED)!r}")


@pytest.mark.parametrize("name", ["broken", "broken cell"])
def test_axe_finds_nothing_with_all_folds_open(browser: Browser, site: dict[str, Path], name: str) -> None:
    for scheme in SCHEMES:
        page, _ = visit(browser, site[name], scheme)
        page.evaluate(OPEN_ALL)
        page.evaluate(WITHOUT_SHADES)
        assert faults(page, **({} if scheme == "light" else CONTRAST_ALONE)) == []
        page.context.close()


def test_axe_would_find_a_faint_word_and_a_picture_without_a_name(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["good"])
    page.evaluate("document.querySelector('.summary').style.color = '#ccc'")
    page.evaluate("document.querySelector('svg[role=img]').removeAttribute('aria-label')")
    assert {"color-contrast", "svg-img-alt"} <= {rule for rule, _ in faults(page)}
    page.context.close()


def test_the_keyboard_alone_goes_from_sweep_to_cell_to_samples(browser: Browser, site: dict[str, Path]) -> None:
    page, seen = visit(browser, site["many"])
    tab_to(page, "cell 0")
    page.keyboard.press("Enter")
    page.wait_for_url("**/cells/**")
    tab_to(page, "Samples")
    page.keyboard.press("Enter")
    tab_to(page, "every sample, in nanoseconds")
    page.keyboard.press("Enter")
    assert page.get_by_text("60000000 67000021").first.is_visible()
    assert seen.complaints == []
    page.context.close()


def test_the_card_along_a_run_is_drawn_to_its_axis(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["broken cell"])
    first = page.locator("#timeline details").first
    engine, clock = (
        first.locator(".bar", has=page.locator(".bar-label", has_text=word)) for word in ("Engine", "SM clock")
    )
    boxes = [part.bounding_box() for part in (engine.locator("rect.fill-timed"), clock.locator("rect.band"))]
    assert boxes[0] is not None and boxes[1] is not None
    for side in ("x", "width"):  # but for the line that parts the pieces of a bar
        assert abs(boxes[0][side] - boxes[1][side]) <= 2.5, "the timed region of each bar stands at one place"
    assert clock.locator("polyline").count() == 1
    assert clock.locator(".bar-reading").inner_text() == "1,980 MHz throughout"
    page.context.close()


def test_seams_of_a_cause_stand_below_their_places_on_the_strip(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["broken"])
    head = page.locator("#capture figure .bar")
    whole, split, add = (
        head.nth(place).locator("rect[class^=fill-seam]") for place in range(head.count() - 3, head.count())
    )
    assert (whole.count(), split.count(), add.count()) == (30, 20, 10)
    above = [whole.nth(place).get_attribute("x") for place in range(30)]
    below = [rects.nth(place).get_attribute("x") for rects, many in ((split, 20), (add, 10)) for place in range(many)]
    assert above == below
    labels = head.locator(".bar-label").all_inner_texts()[-2:]
    assert labels == ["Split: KernelCaptureUnsupported", "Add: ClassifierDisqualified"]
    page.context.close()


def test_the_first_difference_is_marked_by_a_word_and_a_row(browser: Browser, site: dict[str, Path]) -> None:
    page, _ = visit(browser, site["broken cell"])
    marked = page.locator("#diff tr.marked").first
    assert marked.inner_text().split() == ["19", "216", "46283", "0.5", "0.5", "first", "difference:", "violation"]
    grounds = [
        page.evaluate("node => getComputedStyle(node).backgroundColor", row.element_handle())
        for row in (marked, page.locator("#diff tbody tr").first)
    ]
    assert grounds[0] != grounds[1]
    page.context.close()


@pytest.mark.parametrize(("scheme", "narrow"), [("light", "broken"), ("dark", "broken cell")])
def test_pictures_of_pages_are_kept_to_be_looked_at(
    browser: Browser, site: dict[str, Path], scheme: Scheme, narrow: str
) -> None:
    for name, width in (("broken", 1280), ("broken cell", 1280), (narrow, 320)):
        page, _ = visit(browser, site[name], scheme, width)
        kept = keep(page, f"{name.replace(' ', '-')}-{scheme}-{width}")
        assert kept.stat().st_size > 50_000
        page.context.close()
