"""From a sweep whose runs are done to its verdict, its files and its exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import SpecError
from jobs.judge import Asked, concluded, judge_read, stamped
from jobs.provenance import harness_digest, own_root
from jobs.retracted import struck
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.version import harness_version
from reports.charts import CHARTED, HISTORY_SWEEPS
from reports.render import is_ours, remove_pages, render
from reports.render.folder import Behind
from reports.render.site import INDEX, entries, has_sweeps, write_index, write_sweep

COMMENT, DOCUMENT = "comment.md", "verdict.json"


@dataclass(frozen=True, slots=True)
class Concluded:
    """A verdict and where it was written."""

    verdict: Verdict
    comment: Path
    page: Path
    document: Path


def judge_sweep(store: Store, sweep_id: str, *, final: bool = False) -> Verdict:
    """Judge what the store holds and keep the answer, stamped with the code that judged. Nothing is run for it.

    A sweep about which the oracle could still be asked stays open, as one with runs pending does, unless the answer is
    `final`.
    """
    pending = store.pending(sweep_id).pending
    answer = store.judged(sweep_id, judge_read)
    is_left = pending > 0 or not isinstance(answer, Verdict)
    verdict = answer if isinstance(answer, Verdict) else concluded(store.judge_input(sweep_id), "no worker was there")
    return _kept(store, sweep_id, verdict, closes=final or not is_left)


def verdict_or_questions(store: Store, sweep_id: str) -> Verdict | tuple[Asked, ...]:
    """Judge a sweep whose runs are settled and keep the answer, or what the judge asks before it gives one."""
    answer = store.judged(sweep_id, judge_read)
    return _kept(store, sweep_id, answer, closes=True) if isinstance(answer, Verdict) else answer


def _kept(store: Store, sweep_id: str, verdict: Verdict, *, closes: bool) -> Verdict:
    verdict = stamped(verdict, harness_digest(own_root()), harness_version())
    store.write_verdict(sweep_id, verdict, verdict.input_digest, closes=closes)
    return struck(verdict, store.retractions(sweep_id))  # the sweep can have been retracted


def make_folder(out: Path, reports: Sequence[str] = (INDEX, COMMENT, DOCUMENT)) -> None:
    """Make folder `out` for these reports, at once and not after hours of runs.

    Raises OSError when it cannot be made or written, SpecError where somebody else's file would be replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))
    for report in (out / name for name in reports):
        if os.path.lexists(report) and not (report.is_file() and is_ours(report)):
            raise SpecError(f"--out {out}: {report.name} there is no report of ours", "name another folder")


def withdraw_reports(out: Path) -> None:
    """Remove an earlier sweep's comment and document from folder `out`: they could be taken for a failing run's.

    Pages of sweeps stay, each under its own id, and so do somebody else's files. Raises OSError.
    """
    if not has_sweeps(out):
        remove_pages(out)  # of a form where a folder held one sweep
    for report in (out / COMMENT, out / DOCUMENT):
        if report.is_file() and is_ours(report):
            report.unlink()


def write_reports(store: Store, sweep_id: str, verdict: Verdict, out: Path, store_words: str) -> Concluded:
    """Comment, pages and document of a verdict in folder `out`. Raises OSError when it cannot be written.

    `store_words`: the option that names the store, for the commands in them.
    """
    page = write_site(store, sweep_id, verdict, out, store_words)
    comment, document = out / COMMENT, out / DOCUMENT
    comment.write_text(render(verdict, "comment", store=store_words), encoding="utf-8")
    document.write_text(render(verdict, "json") + "\n", encoding="utf-8")
    return Concluded(verdict, comment, page, document)


def write_site(store: Store, sweep_id: str, verdict: Verdict, out: Path, store_words: str) -> Path:
    """The pages of a sweep in a folder of sweeps, with its index; the path of the sweep's own page.

    Pages of other sweeps of this store, whose verdicts say something else by now (judged again, or retracted), are
    written again. Raises OSError when one cannot be written, SpecError where the folder's index cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)  # somebody may have removed it since
    page = _write_sweep(store, sweep_id, verdict, out, store_words)
    others = {entry.sweep_id: entry for entry in entries(out) if entry.sweep_id != sweep_id}
    for other, (outcome, _) in store.outcomes(tuple(others)).items():
        if outcome != others[other].outcome and (now := store.verdict(other)) is not None:
            _write_sweep(store, other, now, out, store_words)
    write_index(out)
    return page


def _write_sweep(store: Store, sweep_id: str, verdict: Verdict, out: Path, store_words: str) -> Path:
    frame = store.around_cells(sweep_id)
    behind = Behind(
        lambda names: frame.model_copy(update={"cells": store.cell_inputs(sweep_id, names)}),
        lambda cell: store.cell_histories(sweep_id, cell, CHARTED, last=HISTORY_SWEEPS),
    )
    return write_sweep(out, verdict, behind, manifest_digest=frame.manifest_digest, store=store_words)
