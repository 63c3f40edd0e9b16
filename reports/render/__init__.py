"""One verdict in every form: a comment that fits, a page or a folder of pages, JSON, JUnit XML and plain text.

This package alone knows the templates. JSON is the canonical verdict itself; every other form is made of the same
sections, so they agree by construction. Comment lengths are counted in UTF-16 units, never fewer than characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal
from urllib.parse import quote

from jobs.verdict import Verdict
from reports import markdown, text
from reports.blocks import Name, Strong, words
from reports.escape import clip, slug, visible
from reports.render.environment import environment, style_sheet
from reports.render.folder import is_ours, remove_pages
from reports.render.pages import Links, sections_of, sweep_page
from reports.sections import blind, headline, stamp
from reports.view import Scope, SweepView

__all__ = [
    "COMMENT_FLOOR",
    "COMMENT_LIMIT",
    "Form",
    "LimitTooSmall",
    "comment_length",
    "is_ours",
    "marker",
    "remove_pages",
    "render",
]

Form = Literal["comment", "html", "json", "junit", "text"]

COMMENT_LIMIT: Final = 65_536  # a GitHub comment's body, characters
COMMENT_FLOOR: Final = 800  # below this not even the shortest form is sure to fit
_LADDER: Final = ((8, 20, 200), (6, 20, 60), (4, 12, 25), (4, 12, 0), (2, 6, 0))  # cells, rows, rows behind folds
_WORST: Final = (50, 20, 10, 5, 3, 1)


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
        return sweep_page(view, Links(), style_sheet())
    return _comment(view, COMMENT_LIMIT if limit is None else limit, report_url)


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
    parts = [module.build(view, scope) for module in (headline, *sections_of(view))]
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
        environment(for_html=False)
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
    modules = (headline, *sections_of(view))
    bodies = [text.section(module.build(view, scope), folded=module in (headline, stamp, blind)) for module in modules]
    return "\n\n".join([*head, *bodies]) + "\n"
