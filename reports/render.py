"""One verdict in every form: a comment that fits, a page or a folder of pages, JSON, JUnit XML and plain text.

The only module that knows the templates. JSON is the canonical verdict itself; every other form is made of the same
sections, so they agree by construction. Comment lengths are counted in UTF-16 units, never fewer than characters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal
from urllib.parse import quote

import jinja2
import markupsafe

from jobs.model import JudgeInput
from jobs.verdict import Verdict
from reports import explain, markdown, text, tiles
from reports.blocks import Name, Section, Strong, words
from reports.escape import clip, slug, visible
from reports.format import plural
from reports.sections import blind, capture, headline, hygiene, identity, reviewed, stamp, time, traffic, witnesses
from reports.view import CellView, Scope, SweepView, build_cell
from reports.wording import OUTCOMES, gloss

Form = Literal["comment", "html", "json", "junit", "text"]

COMMENT_LIMIT: Final = 65_536  # a GitHub comment's body, characters
COMMENT_FLOOR: Final = 800  # below this not even the shortest form is sure to fit
_HERE: Final = Path(__file__).parent
_SECTIONS: Final = (identity, witnesses, traffic, capture, time, reviewed, hygiene, blind, stamp)
_LADDER: Final = ((8, 20, 200), (6, 20, 60), (4, 12, 25), (4, 12, 0), (2, 6, 0))  # cells, rows, rows behind folds
_WORST: Final = (50, 20, 10, 5, 3, 1)
_PAGE_CELLS: Final = 8
_PAGE_ROWS: Final = 2000
_GENERATOR: Final = '<meta name="generator" content="assay">'  # by which a later report knows its own pages
_HEAD_BYTES: Final = 4096
_WHOLE_NAME: Final = 26  # characters: as long as the longest metric


class LimitTooSmall(ValueError):
    """A comment was asked for in fewer characters than `COMMENT_FLOOR`."""


def render(
    verdict: Verdict, fmt: Form, *, limit: int | None = None, report_url: str | None = None, store: str = ""
) -> str:
    """The verdict as one string.

    `limit` bounds a comment in characters (default 65,536) and must be at least `COMMENT_FLOOR`; `report_url` is where
    the full report stands, linked from the comment; `store` is the option that names a store which is not the default
    one, as the commands of a report need it. Raises LimitTooSmall.
    """
    if fmt == "json":
        return verdict.canonical()
    view = SweepView(verdict, store)
    if fmt == "text":
        return _text(view)
    if fmt == "junit":
        from reports import junit  # its library is no part of any other form

        return junit.render(view)
    if fmt == "html":
        return _page(view, _style(), None)
    return _comment(view, COMMENT_LIMIT if limit is None else limit, report_url)


def write_html(verdict: Verdict, out_dir: Path, *, doc: JudgeInput | None = None, store: str = "") -> Path:
    """Write the page, one page a cell and the shared assets into `out_dir`; the path of index.html.

    With the judge's input `doc`, each cell's page goes on to its runs, samples, certificates, logs and token diff.
    """
    view = SweepView(verdict, store)
    remove_pages(out_dir)
    (out_dir / "cells").mkdir(parents=True, exist_ok=True)
    (out_dir / "assets").mkdir(exist_ok=True)
    (out_dir / "assets" / "report.css").write_text(_style(), encoding="utf-8")
    for cell in view.cells:
        shown = build_cell(cell)
        (out_dir / "cells" / f"{shown.slug}.html").write_text(_cell_page(view, shown, doc), encoding="utf-8")
    index = out_dir / "index.html"
    index.write_text(_page(view, None, lambda name: f"cells/{slug(name)}.html"), encoding="utf-8")
    return index


def remove_pages(out_dir: Path) -> None:
    """Remove what `write_html` put into a folder: pages by name and by what they say they are, and their style sheet.

    Any other file stays, and so does a folder that holds one. Raises OSError when a page cannot be removed.
    """
    pages = (out_dir / "index.html", *(out_dir / "cells").glob("*.html"))
    ours = [page for page in pages if page.is_file() and not page.is_symlink() and is_ours(page)]
    if not ours:
        return
    for page in ours:
        page.unlink()
    (out_dir / "assets" / "report.css").unlink(missing_ok=True)
    for folder in (out_dir / "cells", out_dir / "assets"):
        with suppress(OSError):  # another file is in it, or it is not there
            folder.rmdir()


def is_ours(report: Path) -> bool:
    """Whether a file says that it is a page, a comment or a verdict of ours. Raises OSError."""
    if report.suffix == ".json":  # sorted by name, so the word is not near the beginning
        return b'"schema":"assay.verdict/' in report.read_bytes()
    with report.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return (_GENERATOR if report.suffix == ".html" else "<!-- assay:").encode() in head


def _sections(view: SweepView) -> Iterable[ModuleType]:
    """The sections that a verdict has: without reviewed files there is nothing to say of them."""
    return (module for module in _SECTIONS if module is not reviewed or view.verdict.reviewed)


# ---- comment -----------------------------------------------------------------------------------------------------


def marker(verdict: Verdict) -> str:
    """The hidden first line by which a sweep's comment is found again: letters, digits, hyphens and a digest."""
    return f"<!-- assay:sweep={slug(verdict.sweep)} -->"


def comment_length(body: str) -> int:
    """Length of a comment in UTF-16 code units, never less than its characters."""
    return len(body.encode("utf-16-le")) // 2


def _comment(view: SweepView, limit: int, report_url: str | None) -> str:
    if limit < COMMENT_FLOOR:
        raise LimitTooSmall(f"a comment of {limit} characters is too short: give at least {COMMENT_FLOOR}")
    for form in _forms(view, report_url):
        body = form()
        if comment_length(body) <= limit:
            return body
    raise AssertionError(f"the shortest comment is longer than {COMMENT_FLOOR} characters")


def _forms(view: SweepView, report_url: str | None) -> Iterable[Callable[[], str]]:
    """Ever shorter comments: full, fewer cells and rows, no folds, worst rows and counts, counts, a pointer."""
    total = len(view.cells)
    for cells, rows, deep in _LADDER:
        scope = Scope(view.first_cells(cells), rows, deep, max(0, total - cells))
        yield lambda scope=scope: _full(view, scope, report_url)  # type: ignore[misc]
    for rows in _WORST:
        yield lambda rows=rows: _short(view, Scope((), rows, 0, total), report_url)  # type: ignore[misc]
    yield lambda: _short(view, None, report_url)
    yield lambda: _pointer(view, report_url)


def _full(view: SweepView, scope: Scope, report_url: str | None) -> str:
    folded = scope.deep > 0
    parts = [module.build(view, scope) for module in (headline, *_sections(view))]
    bodies = [markdown.section(part, folded=folded) for part in parts]
    return _framed(view, bodies, "" if folded else _elsewhere(view, report_url), report_url)


def _short(view: SweepView, scope: Scope | None, report_url: str | None) -> str:
    bodies = [] if scope is None else [markdown.section(headline.build(view, scope), folded=False)]
    return _framed(view, bodies, _elsewhere(view, report_url), report_url)


def _framed(view: SweepView, sections: list[str], stamped: str, report_url: str | None) -> str:
    verdict = view.verdict
    state, meaning = headline.banner(view)
    link = f" · [full report](<{_safe_url(report_url)}>)" if report_url else ""
    body = (
        _environment(for_html=False)
        .get_template("comment.md.j2")
        .render(
            marker=marker(verdict),
            title=f"{markdown.SIGNS[state.tone]} {state.word}: {markdown.inline(words(Name(verdict.sweep)))}",
            headline=markdown.inline(words(Strong(verdict.headline))),
            next_step=f"**Next:** {markdown.inline(words(verdict.next_step))}",
            counts=f"{meaning[:1].upper()}{meaning[1:]}. {markdown.inline(headline.counts(view))}{link}",
            sections=sections,
            stamp=stamped,
        )
    )
    return str(body).rstrip("\n") + "\n"


def _elsewhere(view: SweepView, report_url: str | None) -> str:
    sweep = markdown.inline(words(Name(view.command("report", view.verdict.stamp.sweep_id, "--format", "html"))))
    return f"Shortened to fit. The rest: {sweep}"


def _pointer(view: SweepView, report_url: str | None) -> str:
    verdict = view.verdict
    state, _ = headline.banner(view)
    where = f"[Full report](<{_safe_url(report_url)}>)" if report_url and len(report_url) < 300 else "Full report"
    command = markdown.inline(words(Name(clip(view.command("report", verdict.stamp.sweep_id), 160))))
    return (
        f"{marker(verdict)}\n## {markdown.SIGNS[state.tone]} {state.word}, exit {verdict.exit_code}\n\n"
        f"{where}: {command}\n"
    )


def _safe_url(url: str | None) -> str:
    return quote(url or "", safe=":/?#=&%@+,;~-._")


# ---- plain text --------------------------------------------------------------------------------------------------


def _text(view: SweepView) -> str:
    verdict = view.verdict
    state, meaning = headline.banner(view)
    scope = Scope(view.first_cells(24), 60, 200, max(0, len(view.cells) - 24))
    head = [
        f"{state.word}: {visible(verdict.sweep)} (exit {verdict.exit_code}; {meaning})",
        text.wrap(visible(verdict.headline)),
        text.wrap(f"Next: {visible(verdict.next_step)}"),
        text.wrap(text.inline(headline.counts(view))),
    ]
    modules = (headline, *_sections(view))
    bodies = [text.section(module.build(view, scope), folded=module in (headline, stamp, blind)) for module in modules]
    return "\n\n".join([*head, *bodies]) + "\n"


# ---- HTML --------------------------------------------------------------------------------------------------------


def _page(view: SweepView, style: str | None, href: Callable[[str], str] | None) -> str:
    cells = view.first_cells(_PAGE_CELLS)
    scope = Scope(cells, _PAGE_ROWS, _PAGE_ROWS, len(view.cells) - len(cells))
    sections = [module.build(view, scope) for module in (headline, *_sections(view))]
    figures = tiles.of_cell(cells[0]) if scope.is_single else tiles.of_sweep(view)
    verdict = view.verdict
    return _html("page.html.j2", view, sections, figures, style, href, name=verdict.sweep, outcome=verdict.outcome)


def _cell_page(view: SweepView, cell: CellView, doc: JudgeInput | None) -> str:
    scope = Scope((cell,), _PAGE_ROWS, _PAGE_ROWS)
    fallen = headline.struck(view)
    sections = [Section("retracted", "Retracted", (), shown=tuple(fallen))] if fallen else []
    sections += [module.build(view, scope) for module in _sections(view) if module is not stamp]
    if doc is not None:
        sections += explain.sections(view.verdict, doc, cell.name)
    sections.append(stamp.build(view, scope))
    return _html(
        "cell.html.j2",
        view,
        sections,
        tiles.of_cell(cell),
        None,
        None,
        name=cell.name,
        outcome=cell.source.outcome,
        exit_code=cell.source.exit_code,
    )


def _html(
    template: str,
    view: SweepView,
    sections: list[Section],
    figures: tuple[tiles.Tile, ...],
    style: str | None,
    href: Callable[[str], str] | None,
    *,
    name: str,
    outcome: str,
    exit_code: int | None = None,
) -> str:
    verdict = view.verdict
    return (
        _environment(for_html=True)
        .get_template(template)
        .render(
            cell_href=href or (lambda _: ""),
            behind=view.cells[0].cell if len(view.cells) == 1 else "",
            policy=_policy(style),
            generator=markupsafe.Markup(_GENERATOR),
            style=None if style is None else markupsafe.Markup(style),
            root="../" if template == "cell.html.j2" else "",
            name=name,
            outcome=outcome,
            tone=OUTCOMES[outcome][0],
            gloss=gloss(outcome, verdict.gate),
            exit_code=verdict.exit_code if exit_code is None else exit_code,
            headline=verdict.headline,
            next_step=verdict.next_step,
            counts=headline.counts(view),
            tiles=figures,
            sections=sections,
            sweep=verdict.sweep,
            sweep_id=verdict.stamp.sweep_id,
            digest=verdict.input_digest,
        )
    )


def _policy(style: str | None) -> str:
    """Nothing but our own style: no script, no image, no frame, no form, no request anywhere."""
    own = (
        "'self' file:"
        if style is None
        else f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'"
    )
    return f"default-src 'none'; style-src {own}; base-uri 'none'; form-action 'none'"


@cache
def _style() -> str:
    return (_HERE / "assets" / "report.css").read_text(encoding="utf-8")


@cache
def _environment(*, for_html: bool) -> jinja2.Environment:
    """Templates with escaping on for HTML; Markdown arrives escaped from `reports.markdown`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=for_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize if for_html else None,
    )
    environment.filters |= {"breakable": _breakable, "kind": lambda block: type(block).__name__, "plural": plural}
    return environment


def _breakable(name: str) -> markupsafe.Markup:
    """A name that may wrap after its separators where it is long, so that a narrow column does not cut words."""
    shown = visible(name)
    pieces = [shown] if len(shown) <= _WHOLE_NAME else re.split(r"(?<=[/_=.:,-])(?=[^/_=.:,-])", shown)
    return markupsafe.Markup("<wbr>").join(pieces)


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, markupsafe.Markup) else value
