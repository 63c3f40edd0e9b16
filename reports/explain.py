"""From a cell back to its runs: order, samples, tokens, certificates, host, log tail, and the command to rerun it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from jobs.errors import SpecError
from jobs.model import CellInput, JudgeInput
from jobs.verdict import CellVerdict, Verdict
from reports import evidence, text
from reports.blocks import Paragraph, Section, words
from reports.escape import visible
from reports.format import plural
from reports.wording import gloss


def explain(verdict: Verdict, doc: JudgeInput, cell: str, metric: str | None = None) -> str:
    """A cell's runs down to the samples, as plain text; `metric` narrows the readings to one counter or metric.

    `cell` is a name or a unique part of one. Raises SpecError when it names none, or several, or when no run has the
    metric.
    """
    found = find_cell(doc, cell)
    judged = next((row for row in verdict.cells if row.cell == found.plan.cell), None)
    head = [f"cell {visible(found.plan.cell)} of sweep {visible(verdict.sweep)}"]
    head.append(
        _judged(judged, verdict.gate) if judged is not None else "not judged: the verdict does not hold this cell"
    )
    if verdict.struck is not None:
        head += [visible(f"struck out: {one.words} ({one.at})") for one in verdict.struck.why]
    body = [
        text.section(part, folded=True)
        for part in evidence.sections(doc, found, judged.identity if judged else (), metric)
    ]
    return "\n\n".join(["\n".join(head), *body]) + "\n"


def sections(verdict: Verdict, doc: JudgeInput, cell: str) -> tuple[Section, ...]:
    """The same evidence as sections of a cell's page; one that says so when the input does not hold the cell."""
    found = next((item for item in doc.cells if item.plan.cell == cell), None)
    if found is None:
        note = Paragraph(words(f"The input of sweep {verdict.sweep} does not hold this cell."), "warn")
        return (Section("runs", "Runs", words("No runs."), shown=(note,)),)
    identity = next((row.identity for row in verdict.cells if row.cell == cell), ())
    return evidence.sections(doc, found, identity, None)


def find_cell(doc: JudgeInput, name: str) -> CellInput:
    """The cell of that name, or the only one whose name holds it. Raises SpecError with the candidates."""
    exact = [cell for cell in doc.cells if cell.plan.cell == name]
    matching = exact or [cell for cell in doc.cells if name and name in cell.plan.cell]
    if len(matching) == 1:
        return matching[0]
    names = [cell.plan.cell for cell in doc.cells]
    if matching:
        raise SpecError(f"{visible(name)} names {plural(len(matching), 'cell')}", f"give one of: {_some(matching)}")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    raise SpecError(f"no cell is named {visible(name)}", f"give one of: {', '.join(map(visible, near))}")


def _some(cells: Sequence[CellInput]) -> str:
    return ", ".join(visible(cell.plan.cell) for cell in cells[:5])


def _judged(cell: CellVerdict, gate: Mapping[str, str]) -> str:
    return f"{cell.outcome}, exit {cell.exit_code}: {gloss(cell.outcome, gate)}"
