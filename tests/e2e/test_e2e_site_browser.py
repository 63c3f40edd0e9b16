"""A folder of sweeps in a real browser, from disk: index to sweep to samples, and charts with and without script."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reports.render import site
from reports.render.folder import Behind
from tests.e2e.browsing import CONTRASTS, OPEN_ALL, PAGE_WIDTH, SCHEMES, WIDTHS, WITHOUT_SHADES, faults, keep, visit
from tests.unit import reports_runs as runs
from tests.unit import reports_samples as samples
from tests.unit.history_readings import history, readings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

SWEEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps and one scenario that twenty sweeps measured: a counter that fell, a time that rose."""
    out = tmp_path_factory.mktemp("site")
    draw = random.Random(3)
    times = readings([draw.gauss(20, 0.1) + (2 if place >= 12 else 0) for place in range(SWEEPS)], driver={5: "560"})
    counts = readings([3_979_122_688 if place < 12 else 2_349_010_944 for place in range(SWEEPS)])
    counts[3] = counts[3]._replace(retracted="the fan was blocked")
    measured = (history("decode_ms_per_token", times, "ser_a"), history("htod_bytes", counts, "ser_b"))
    behind = Behind(lambda _names: runs.judge_input(), lambda _cell: measured)
    for place, verdict in enumerate((samples.verdict(), samples.broken())):
        stamp = samples.stamp(sweep_id=f"swp_{place}", created_at=f"2026-11-2{place}T10:00:00Z")
        site.write_sweep(out, verdict.model_copy(update={"stamp": stamp}), behind, manifest_digest=f"{place}")
    site.write_index(out)
    return out


def scenario(folder: Path) -> Path:
    (path,) = (folder / "scenarios").iterdir()
    return path


def test_index_to_sweep_to_a_figures_readings_to_samples(browser: Browser, folder: Path) -> None:
    page, seen = visit(browser, folder / "index.html")
    page.get_by_role("link", name="smollm2-residency").first.click()
    assert page.locator("h1").inner_text() == "smollm2-residency"
    page.get_by_role("link", name="htod_bytes_per_token").first.click()  # one
    assert page.locator(":target").inner_text() == "htod_bytes_per_token"
    page.get_by_role("navigation", name="Sections").get_by_role("link", name="Samples").click()  # two
    page.locator("summary", has_text="every sample, in nanoseconds").click()  # three
    assert page.get_by_text("60000000 67000021").first.is_visible()
    page.get_by_role("link", name="This scenario over sweeps").click()
    page.get_by_role("navigation", name="Where this is").get_by_role("link", name="sweeps").click()
    assert page.url.endswith("index.html")
    assert seen.complaints == []
    assert all(url.startswith(folder.as_uri()) for url in seen.requests), seen.requests
    page.context.close()


def test_charts_are_drawn_again_by_script_and_walked_with_the_keyboard(browser: Browser, folder: Path) -> None:
    page, seen = visit(browser, scenario(folder))
    charts = page.locator("figure.chart")
    assert charts.count() == page.locator("figure.chart canvas").count() == 2
    assert not page.locator(".chart-plain").first.is_visible()
    first = charts.nth(0)
    first.locator(".chart-drawn").focus()
    page.keyboard.press("Home")
    assert first.locator(".chart-told").inner_text().startswith("2026-11-01 00:00: head ")
    page.keyboard.press("ArrowRight")
    assert first.locator(".chart-told").inner_text().startswith("2026-11-02 00:00: head ")
    page.keyboard.press("End")
    assert first.locator(".chart-told").inner_text().startswith("2026-11-20 00:00: head ")
    second = charts.nth(1)
    second.locator(".chart-drawn").focus()
    for key in ("Home", *["ArrowRight"] * 3):
        page.keyboard.press(key)
    assert second.locator(".chart-told").inner_text() == "2026-11-04 00:00: head 3,979,122,688 B (retracted)"
    page.emulate_media(color_scheme="dark")
    assert page.locator("figure.chart canvas").count() == 2, "drawn anew in the colours of the scheme"
    page.set_viewport_size({"width": 320, "height": 900})
    page.wait_for_timeout(100)
    assert page.evaluate(PAGE_WIDTH) <= 320
    assert seen.complaints == []
    page.context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_read_without_script(browser: Browser, folder: Path, width: int) -> None:
    page, seen = visit(browser, scenario(folder), width=width, java_script_enabled=False)
    picture = page.locator(".chart-plain svg").nth(1)
    box = picture.bounding_box()
    assert box is not None and box["width"] > 0.5 * min(width, 500) and box["height"] > 100
    assert "1 change of level" in (picture.get_attribute("aria-label") or "")
    assert page.locator("figure.chart .legend").nth(1).inner_text().strip() == "head 2,349,010,944 B"
    page.locator("summary", has_text="Every point of htod_bytes").click()
    assert page.get_by_text("retracted: the fan was blocked").is_visible()
    assert page.get_by_role("table", name="Changes of level, newest first").is_visible()
    assert seen.complaints == []
    assert not [url for url in seen.requests if url.endswith(".js")]
    page.context.close()


def test_field_80_index_and_scenario_fit_and_can_be_read_in_both_schemes(browser: Browser, folder: Path) -> None:
    for name, path in (("index", folder / "index.html"), ("scenario", scenario(folder))):
        page, seen = visit(browser, path)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                keep(page, f"{name}-{width}-{scheme}")
        page.evaluate(OPEN_ALL)
        assert page.evaluate(PAGE_WIDTH) <= WIDTHS[-1], "with all folds open"
        assert seen.complaints == []  # axe itself asks for the style sheet, which no page lets it
        page.evaluate(WITHOUT_SHADES)
        assert faults(page) == []
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            contrasts = page.evaluate(CONTRASTS)
            assert len(contrasts) > 15
            assert contrasts[0][0] >= 4.5, (scheme, contrasts[:5])
        page.context.close()
