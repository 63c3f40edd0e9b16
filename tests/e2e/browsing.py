"""What the tests of pages in a browser share: opening one from disk, what it complained of, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDTHS = (1280, 320)
PAGE_WIDTH = "document.documentElement.scrollWidth"
OPEN_ALL = "document.querySelectorAll('details').forEach(item => item.open = true)"
WITHOUT_SHADES = "document.querySelectorAll('*').forEach(node => node.style.backgroundImage = 'none')"
"""The shadows at the edges of a box and a banner's wash: on a gradient axe cannot tell a contrast, and says so."""
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
"""Kept to be looked at; git leaves the folder out."""

# Contrast of every visible text against the nearest opaque background, by WCAG 2; the lowest first.
CONTRASTS = """
() => {
  const channel = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const opaque = c => c.length < 4 || c[3] > 0;
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const c = parse(getComputedStyle(at).backgroundColor);
      if (opaque(c)) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest('svg')) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.tagName + '.' + node.className + ': ' + node.textContent.slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}
"""


@dataclass
class Seen:
    """What the browser complained of, and what it fetched."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def visit(
    browser: Browser, path: Path, scheme: Scheme = "light", width: int = 1280, **options: Any
) -> tuple[Page, Seen]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    page, seen = context.new_page(), Seen()
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("dialog", lambda dialog: seen.complaints.append(dialog.message))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("requestfailed", lambda request: seen.complaints.append(f"failed: {request.url}"))
    page.goto(path.as_uri())
    return page, seen


def keep(page: Page, name: str) -> Path:
    """A picture of the whole page for whoever looks at what the tests saw; where it is."""
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path


def faults(page: Page, **options: Any) -> list[tuple[str, str]]:
    """What axe-core finds fault with, or cannot tell: rule and element."""
    from axe_playwright_python.sync_playwright import Axe

    told = Axe().run(page, options={"resultTypes": ["violations", "incomplete"], **options}).response
    found = [*told["violations"], *told["incomplete"]]
    return [(rule["id"], " ".join(map(str, node["target"]))) for rule in found for node in rule["nodes"]]
