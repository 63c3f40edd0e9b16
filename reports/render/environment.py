"""What all templates share: escaping, filters, the style sheet, and what a page may load."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
import markupsafe

from reports.escape import anchor_of, visible
from reports.format import plural

GENERATOR: Final = '<meta name="generator" content="assay">'
"""By which a later report knows its own pages."""

_REPORTS: Final = Path(__file__).parent.parent
_UPLOT: Final = _REPORTS / "assets" / "vendor" / "uplot"
ASSETS: Final = (
    _REPORTS / "assets" / "report.css",
    _REPORTS / "assets" / "charts.js",
    _UPLOT / "uPlot.iife.min.js",
    _UPLOT / "uPlot.min.css",
    _UPLOT / "uPlot.LICENSE.txt",
)
"""What pages in a folder share, the one licence that is not ours among it."""

_WHOLE_NAME: Final = 26  # characters: as long as the longest metric


@cache
def environment(*, for_html: bool) -> jinja2.Environment:
    """Templates with escaping on for HTML; Markdown arrives escaped from `reports.markdown`."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_REPORTS / "templates"),
        autoescape=for_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize if for_html else None,
    )
    made.filters |= {
        "anchor": anchor_of,
        "breakable": _breakable,
        "kind": lambda block: type(block).__name__,
        "plural": plural,
    }
    return made


def page(template: str, style: str | None, *, scripts: bool = False, forms: bool = False, **values: Any) -> str:
    """A page of a template that extends the base; its style sheet stands in it, or (None) among the shared assets.

    With `scripts` it may run those of the shared assets, and no other; with `forms` it may ask its own server.
    """
    return (
        environment(for_html=True)
        .get_template(template)
        .render(
            policy=_policy(style, scripts, forms),
            generator=markupsafe.Markup(GENERATOR),
            style=None if style is None else markupsafe.Markup(style),
            unique=_namer(),
            **values,
        )
    )


def compile_templates() -> None:
    """Compile all templates of pages, so that the first reader does not wait for it."""
    made = environment(for_html=True)
    for name in made.list_templates(filter_func=lambda name: name.endswith(".html.j2")):
        made.get_template(name)


@cache
def style_sheet() -> str:
    """The style sheet of every page."""
    return (_REPORTS / "assets" / "report.css").read_text(encoding="utf-8")


def _policy(style: str | None, scripts: bool, forms: bool) -> str:
    """Nothing but our own style, and script where asked for: no image, no frame, no form, no request anywhere."""
    own = (
        "'self' file:"
        if style is None
        else f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
    )
    ours = "; script-src 'self' file:" if scripts else ""
    asks = "'self'" if forms else "'none'"
    return f"default-src 'none'; style-src {own}{ours}; base-uri 'none'; form-action {asks}"


def _namer() -> Callable[[str], str]:
    """Names of a page's regions, by which whoever hears it tells them apart: a name that was given gets a number."""
    given: Counter[str] = Counter()

    def unique(name: str) -> str:
        given[name] += 1
        return name if given[name] == 1 else f"{name} ({given[name]})"

    return unique


def _breakable(name: str) -> markupsafe.Markup:
    """A name that may wrap after its separators where it is long, so that a narrow column does not cut words."""
    shown = visible(name)
    pieces = [shown] if len(shown) <= _WHOLE_NAME else re.split(r"(?<=[/_=.:,-])(?=[^/_=.:,-])", shown)
    return markupsafe.Markup("<wbr>").join(pieces)


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, markupsafe.Markup) else value
