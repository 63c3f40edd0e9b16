"""A verdict as JUnit XML, for the test tabs of CI systems: a suite a sweep, a case a cell.

What exits 1 is a failure; what gave no answer (3), a fault of ours (4) or a usage error (2) is an error and never a
skipped case, which CI systems read as a pass. Text is shown as in every other form: what XML cannot hold is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable

from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

from jobs.outcomes import fold
from jobs.verdict import Finding
from reports.escape import clip, named, visible
from reports.ranking import Ranked
from reports.sections import headline
from reports.text import inline
from reports.view import SweepView
from reports.wording import gloss

SWEEP_CASE = "the sweep as a whole"


def render(view: SweepView) -> str:
    """The whole verdict as one XML document."""
    verdict = view.verdict
    suite = TestSuite(named(verdict.sweep))
    suite.timestamp = visible(verdict.stamp.created_at)
    for name, told in _properties(view):
        suite.add_property(name, _text(told))
    findings: dict[str, list[Finding]] = {}
    for finding in verdict.findings:
        findings.setdefault(finding.cell, []).append(finding)
    moved: dict[str, list[Ranked]] = {}
    for row in view.ranked:
        moved.setdefault(row.cell, []).append(row)
    cases = []
    for cell in view.cells:
        found = findings.pop(cell.cell, [])
        said = f"{cell.outcome}: {gloss(cell.outcome, verdict.gate)}"
        lines = [*_findings(found), *_rows(moved.get(cell.cell, ())), *cell.notes]
        cases.append(_case(view, cell.cell, cell.outcome, cell.exit_code, said, lines))
    of_no_cell = [finding for rest in findings.values() for finding in rest]
    if of_no_cell or fold(cell.exit_code for cell in view.cells) != verdict.exit_code:
        said = f"{verdict.outcome}: {verdict.headline}"
        lines = [verdict.next_step, inline(headline.counts(view)), *_findings(of_no_cell)]
        cases.insert(0, _case(view, SWEEP_CASE, verdict.outcome, verdict.exit_code, said, lines))
    suite.add_testcases(cases)
    document = JUnitXml("assay")
    document.add_testsuite(suite)
    document.update_statistics()
    written: bytes = document.tostring()
    return written.decode("utf-8") + "\n"


def _properties(view: SweepView) -> Iterable[tuple[str, str]]:
    verdict = view.verdict
    yield from (
        ("schema", verdict.schema_),
        ("outcome", verdict.outcome),
        ("exit_code", str(verdict.exit_code)),
        ("headline", verdict.headline),
        ("next_step", verdict.next_step),
        ("counts", inline(headline.counts(view))),
        ("sweep_id", verdict.stamp.sweep_id),
        ("base_source", verdict.stamp.base_source),
        ("head_source", verdict.stamp.head_source),
        ("harness_digest", verdict.stamp.harness_digest),
        ("input_digest", verdict.input_digest),
    )
    yield from (("warning", warning) for warning in verdict.warnings)
    yield from (("blind_spot", blind) for blind in verdict.blind_spots)


def _case(view: SweepView, name: str, outcome: str, exit_code: int, said: str, lines: Iterable[str]) -> TestCase:
    case = TestCase(named(name), classname=named(view.verdict.sweep))
    told = "\n".join(_text(line) for line in lines)
    if exit_code:
        result = Failure(_text(said), outcome) if exit_code == 1 else Error(_text(said), outcome)
        result.text = told
        case.result = [result]
    else:
        case.system_out = "\n".join([_text(said), *([told] if told else [])])
    return case


def _findings(found: Iterable[Finding]) -> list[str]:
    return [
        f"{one.outcome}{' of ' + one.arm if one.arm else ''}: {one.message}"
        f"{' | next: ' + one.remedy if one.remedy else ''} | exit {one.exit_code or '0, advice'}"
        for one in found
    ]


def _rows(rows: Iterable[Ranked]) -> list[str]:
    return [f"{row.state.word}: {row.subject}: {row.base} -> {row.head}: {row.change}" for row in rows]


def _text(text: str) -> str:
    return clip(visible(text))
