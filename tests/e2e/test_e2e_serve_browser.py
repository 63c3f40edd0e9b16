"""Served pages in a browser: filtered, renewed without script, at 320 px, with charts and nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.store import Store
from tests.unit.served_store import filled
from tests.unit.store_sweeps import Clock, running
from tests.unit.store_sweeps import claimed as claim

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def served(tmp_path: Path, checkout: Path) -> Iterator[tuple[str, Store, dict[str, str]]]:
    """The server's address, its store and the sweeps there by what they are."""
    clock = Clock()
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    with Store.open(url, clock) as store:
        sweeps = filled(store, clock)
        command = [sys.executable, "-P", "-m", "orchestrator.cli", "serve", "--store", url, "--port", "0"]
        environ = {**os.environ, "PYTHONPATH": str(checkout)}
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            yield found[0], store, sweeps
            server.terminate()


def test_pages_are_read_filtered_and_renewed_without_script(
    browser: Browser, served: tuple[str, Store, dict[str, str]]
) -> None:
    base, store, sweeps = served
    context = browser.new_context(java_script_enabled=False, viewport={"width": 320, "height": 700})
    page = context.new_page()
    elsewhere: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url) if not request.url.startswith(base) else None)
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"{base}?hold=1")
    page.select_option("select[name=state]", "open")
    page.get_by_role("button", name="Show").click()
    assert "state=open" in page.url
    assert page.locator("ol.sweeps > li").count() == 1
    page.get_by_role("link", name="nightly of decode").click()
    assert "0 of 12 runs complete, 1 under way" in page.inner_text("main")
    running(store, claim(store, sweeps["open"]))  # a second block begins
    page.wait_for_selector("text=2 under way", timeout=20_000)
    page.get_by_role("link", name="Hold this page still").click()
    for path in (f"sweeps/{sweeps['large']}", f"sweeps/{sweeps['large']}/cells", f"sweeps/{sweeps['hostile']}"):
        page.goto(base + path)
        page.screenshot(full_page=False)
        box = page.locator("html").bounding_box()
        assert box is not None and box["width"] <= 320, path
    assert (elsewhere, said) == ([], [])
    context.close()


def test_charts_of_a_scenario_are_drawn_under_the_servers_own_policy(
    browser: Browser, served: tuple[str, Store, dict[str, str]]
) -> None:
    base, _, sweeps = served
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(f"{base}sweeps/{sweeps['measured']}")
    page.get_by_role("link", name="This scenario over sweeps").first.click()
    page.wait_for_selector(".drawn canvas")
    assert said == []
    page.close()
