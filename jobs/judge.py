"""From one frozen input document to one verdict document: pure, and deterministic under order and duplicates of its
rows.

No clock, no randomness, no I/O. The manifest decides which cells and runs there are; an absent one never reads as
pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from jobs import collector, declared, goldens, losses, more_runs, outcomes, over_batches, stats, waivers, wording
from jobs.cells_read import CellsRead, Passed, cards_of, text_of
from jobs.docket import Docket
from jobs.document import Document
from jobs.judge_cell import JudgedCell, judge_cell
from jobs.judge_pair import rows_of_time
from jobs.model import CellInput, CellPlan, JudgeInput, RunFact
from jobs.more_runs import BaseAgain, FreshBlocks
from jobs.near_tie import Adjudication, FollowUp
from jobs.noise import Calibration
from jobs.verdict import Finding, Outcome, Verdict

Asked = FollowUp | BaseAgain | FreshBlocks
"""What the judge may ask before it answers."""

Piece = TypeVar("Piece", bound=Document)


def judge(doc: JudgeInput, *, runs_more: bool = True) -> Verdict | tuple[Asked, ...]:
    """The verdict on a sweep, or what must be asked first: over all, `limits.follow_ups` questions at most.

    `runs_more`: whether there is anybody who could make further runs; if not, none are asked for.
    """
    with collector.paused():
        doc = normalise(doc)
        further = sum(len(tuple(more_runs.given(cell.plan, cell.runs))) for cell in doc.cells)
        around = doc.model_copy(update={"cells": ()})
        given = {cell.plan.cell: cell for cell in doc.cells}
        return _judge(CellsRead(around, iter(doc.cells), further, names_cards=True), given, runs_more=runs_more)


def judge_read(read: CellsRead, *, runs_more: bool = True) -> Verdict | tuple[Asked, ...]:
    """The same of a sweep whose cells are read one after another, each with all its runs: none is kept."""
    if over_batches.references(read.around.manifest):  # cells that are held against others
        cells = tuple(read.cells)
        stamp = read.around.stamp.model_copy(update={"cards": cards_of(cells)})
        return judge(read.around.model_copy(update={"cells": cells, "stamp": stamp}), runs_more=runs_more)
    with collector.paused():
        ordered = (cell for one in read.cells for cell in _one_cell([one]))
        around = normalise(read.around)
        return _judge(CellsRead(around, ordered, read.further), {}, runs_more=runs_more)


def concluded(doc: JudgeInput, why: str) -> Verdict:
    """The verdict although questions may be open: `why` nobody answers them. It is on the document as given."""
    digest = input_digest(normalise(doc))
    while isinstance(answer := judge(doc, runs_more=False), tuple):
        unanswered = (Adjudication(asked=one, failure=why) for one in answer if isinstance(one, FollowUp))
        doc = doc.model_copy(update={"adjudications": (*doc.adjudications, *unanswered)})
    return answer.model_copy(update={"input_digest": digest})


def _judge(read: CellsRead, given: Mapping[str, CellInput], *, runs_more: bool) -> Verdict | tuple[Asked, ...]:
    """`read`: normalised; `given`: by name the cells that others are held against."""
    doc = read.around
    room = max(0, doc.manifest.limits.follow_ups - len(doc.adjudications) - read.further)
    rows = rows_of_time(doc.manifest)
    in_force = doc.manifest.reviewed.in_force(waivers.day_of(doc.stamp))
    blessed = goldens.in_force(doc.manifest, doc.retracted_goldens)
    noise: dict[str, list[Calibration]] = {}
    for known in doc.calibrations:
        noise.setdefault(known.cell, []).append(known)
    smaller = over_batches.references(doc.manifest)
    planned = {plan.cell: plan for plan in doc.manifest.cells}
    passed, judged, found = Passed(doc), list[JudgedCell](), list[Finding]()
    for plan, cells in _by_plan(doc.manifest.cells, read.cells):
        for cell in cells:
            passed.add(cell)
            found += _faults_of_rows(doc, planned, cell)
        if plan is None:
            continue
        runs, other = _runs(cells[-1] if cells else None), smaller.get(plan.cell)
        beside = None if other is None else CellInput(plan=other, runs=_runs(given.get(other.cell)))
        answers = [answer for answer in doc.adjudications if answer.asked.cell == plan.cell]
        judged.append(
            judge_cell(
                doc.manifest,
                plan,
                runs,
                answers,
                room=room,
                time_rows=rows,
                runs_more=runs_more,
                smaller=beside,
                waivers=in_force,
                golden=blessed.get(plan.cell),
                noise=noise.get(plan.cell, ()),
            )
        )
    asked = tuple(dict.fromkeys(question for cell in judged for question in cell.open_questions))
    if asked[:room]:
        return asked[:room]
    if not read.names_cards:
        stamp = doc.stamp.model_copy(update={"cards": tuple(sorted(passed.cards - {""}))})
        doc = doc.model_copy(update={"stamp": stamp})
    return _verdict(doc, judged, passed, found)


def _by_plan(
    plans: Iterable[CellPlan], cells: Iterator[CellInput]
) -> Iterator[tuple[CellPlan | None, list[CellInput]]]:
    """Each planned cell with what was given of it, maybe nothing; at last, without a plan, what no plan names."""
    after = next(cells, None)
    for plan in plans:
        own: list[CellInput] = []
        while after is not None and after.plan.cell == plan.cell:
            own.append(after)
            after = next(cells, None)
        yield plan, own
    yield None, [*([] if after is None else [after]), *cells]


def _verdict(doc: JudgeInput, judged: Sequence[JudgedCell], passed: Passed, found: Sequence[Finding]) -> Verdict:
    cells = tuple(cell.verdict for cell in judged)
    findings = outcomes.worst_first(
        [
            *_faults_of_asking(doc),
            *found,
            *declared.findings(doc.manifest, cells),
            *(finding for cell in judged for finding in cell.findings),
        ]
    )
    leading = outcomes.leading(findings)
    ruled = (
        *waivers.reviewed_rows(doc.manifest, doc.stamp, findings, cells),
        *goldens.reviewed_rows(doc.manifest, cells, doc.retracted_goldens),
    )
    outcome: Outcome = leading.outcome if leading else "PASS"
    if leading is None and any(cell.outcome == "IMPROVED" for cell in cells):
        outcome = "IMPROVED"
    gate = doc.manifest.gate
    return Verdict(
        sweep=doc.manifest.name,
        outcome=outcome,
        exit_code=outcomes.fold(finding.exit_code for finding in findings),
        headline=wording.headline(outcome, leading, findings, cells),
        next_step=wording.next_step(leading, outcome),
        findings=findings,
        cells=cells,
        set_aside=tuple(row for cell in judged for row in cell.set_aside),
        warnings=losses.warnings(cells),
        notes=(
            *(f"{arm.name}: {arm.note}" for arm in doc.manifest.arms if arm.note),
            *declared.notes(doc.manifest, cells),
            *waivers.notes(ruled),
        ),
        reviewed=(*declared.reviewed_rows(doc.manifest, cells), *ruled),
        blind_spots=wording.blind_spots(doc, cells, passed),
        cells_expected=len(doc.manifest.cells),
        cells_judged=sum(cell.compared for cell in judged),
        varies=doc.manifest.varies,
        gate={"identity": gate.identity, "exact": gate.exact, "time": gate.time},
        time_false_alarms=stats.FALSE_ALARMS if any(cell.time for cell in cells) else None,
        input_digest=passed.digest(doc),
        stamp=doc.stamp,
    )


def normalise(doc: JudgeInput) -> JudgeInput:
    """The same document in its one order: cells as in the manifest, runs by block and position, no duplicate rows."""
    parts: dict[str, list[CellInput]] = {}
    for cell in doc.cells:
        parts.setdefault(cell.plan.cell, []).append(cell)
    order = {plan.cell: index for index, plan in enumerate(doc.manifest.cells)}
    cells = [
        cell
        for name in sorted(parts, key=lambda name: (order.get(name, len(order)), name))
        for cell in _one_cell(parts[name])
    ]
    return doc.model_copy(
        update={
            "cells": tuple(cells),
            "adjudications": tuple(_sorted_once(doc.adjudications)),
            "calibrations": tuple(_sorted_once(doc.calibrations)),
        }
    )


def _one_cell(parts: Sequence[CellInput]) -> list[CellInput]:
    """A cell's rows put together: all runs with its first plan, and each other plan that claims its name without."""
    plans = _each_once([part.plan for part in parts])
    by_id: dict[str, list[RunFact]] = {}
    for run in (run for part in parts for run in part.runs):
        by_id.setdefault(run.run_id, []).append(_ordered(run))
    runs = sorted((run for same in by_id.values() for run in _each_once(same)), key=_run_key)
    return [CellInput.made(plan=plan, runs=() if index else tuple(runs)) for index, plan in enumerate(plans)]


def _each_once(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Pieces without repetition, by their text; the usual single one is not written out for it."""
    return pieces if len(pieces) == 1 else _sorted_once(pieces)


def _sorted_once(pieces: Iterable[Piece]) -> list[Piece]:
    texts = {text_of(piece): piece for piece in pieces}
    return [texts[text] for text in sorted(texts)]


def stamped(verdict: Verdict, harness_digest: str, harness_version: str) -> Verdict:
    """The verdict with the harness that judged it, which need not be the one that it was submitted to."""
    stamp = verdict.stamp.model_copy(update={"judge_digest": harness_digest, "judge_version": harness_version})
    return verdict.model_copy(update={"stamp": stamp})


def input_digest(doc: JudgeInput) -> str:
    """sha256 of a normalised document. It is taken cell by cell: ten thousand are never written out whole."""
    passed = Passed(around := doc.model_copy(update={"cells": ()}))
    for cell in doc.cells:
        passed.add(cell)
    return passed.digest(around)


def _runs(given: CellInput | None) -> tuple[RunFact, ...]:
    """A cell's runs, each once."""
    first: dict[str, RunFact] = {}
    for run in given.runs if given else ():
        first.setdefault(run.run_id, run)
    return tuple(first.values())


def _faults_of_asking(doc: JudgeInput) -> Iterable[Finding]:
    """That nothing was asked, or nothing is judged."""
    if not doc.manifest.cells:
        empty = Docket("", doc.manifest.gate)
        empty.add("MISSING", "identity", "the manifest holds no cell: nothing was asked, so nothing is proven")
        yield from empty.findings()
    if not outcomes.judges(doc.manifest.gate):
        unjudged = Docket("", doc.manifest.gate)
        remedy = "Set one of gate.identity, gate.exact and gate.time to block or advise."
        unjudged.add("MISSING", "identity", "every gate is off: nothing was judged", remedy=remedy)
        yield from unjudged.findings()


def _faults_of_rows(doc: JudgeInput, planned: Mapping[str, CellPlan], cell: CellInput) -> Iterable[Finding]:
    """Rows of a cell that contradict the manifest or each other."""
    docket = Docket(cell.plan.cell, doc.manifest.gate)
    if cell.plan.cell not in planned:
        docket.add("INFRASTRUCTURE", "infrastructure", "results for a cell that the manifest does not hold")
    elif cell.plan is not planned[cell.plan.cell] and cell.plan != planned[cell.plan.cell]:
        docket.add("INFRASTRUCTURE", "infrastructure", "results for a plan that is not the manifest's")
    ids = [run.run_id for run in cell.runs]
    for run_id in sorted({run_id for run_id in ids if ids.count(run_id) > 1}):
        message = f"run {run_id} is there twice with different content"
        docket.add("INFRASTRUCTURE", "infrastructure", message, run_ids=[run_id])
    return docket.findings()


def _ordered(run: RunFact) -> RunFact:
    """A run with its attempts and generations in order; itself where they are."""
    attempts = tuple(sorted(run.attempts, key=lambda attempt: (attempt.number, attempt.attempt_id)))
    if attempts != run.attempts:
        run = run.model_copy(update={"attempts": attempts})
    if run.record is None or all(one.index < other.index for one, other in pairwise(run.record.generations)):
        return run
    generations = tuple(sorted(run.record.generations, key=lambda generation: (generation.index, text_of(generation))))
    return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})


def _run_key(run: RunFact) -> tuple[int, int, str]:
    return (run.block, run.position, run.run_id)
