"""What runs of a batch say by themselves: every sequence is there, whole, and named where it is not."""

from __future__ import annotations

from typing import Any

from jobs.judge import judge
from jobs.model import JudgeInput, RunFact, SequenceTokens
from jobs.verdict import Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def test_field_39_a_sequence_that_is_not_there_is_missing(documents: Any) -> None:
    """A cell with a batch of two, of which head gives one sequence: nothing says what the other would have been."""

    def give(run: RunFact) -> RunFact:
        assert run.record is not None
        other = SequenceTokens(ids=documents.IDS, stop_reason="length", gaps=(0.5,) * len(documents.IDS))
        fewer = ("head",) if run.arm == "head" else ()
        generations = [g.model_copy(update={"further": () if fewer else (other,)}) for g in run.record.generations]
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": tuple(generations)})})

    doc = documents.replace_runs(documents.sweep(), give)
    plan = doc.manifest.cells[0].model_copy(update={"config": {**doc.manifest.cells[0].config, "batch": 2}})
    manifest = doc.manifest.model_copy(update={"cells": (plan,)})
    cells = tuple(cell.model_copy(update={"plan": plan}) for cell in doc.cells)
    verdict = verdict_of(doc.model_copy(update={"manifest": manifest, "cells": cells}))
    assert verdict.exit_code != 0
    assert any("head: generation 1 has 1 of 2 sequences" in f.message for f in verdict.findings)
    assert not any("base: generation" in f.message for f in verdict.findings)
    assert any("at most 2 sequences at a time" in spot for spot in verdict.blind_spots)


def test_a_sequence_that_is_short_is_named(documents: Any) -> None:
    def shorten(run: RunFact) -> RunFact:
        assert run.record is not None
        other = SequenceTokens(ids=documents.IDS[:5], stop_reason="length")
        generations = tuple(g.model_copy(update={"further": (other,)}) for g in run.record.generations)
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})

    verdict = verdict_of(documents.replace_runs(documents.sweep(), shorten))
    found = [f.message for f in verdict.findings if f.outcome == "SHORT"]
    assert any("5 of 32 tokens with no declared stop (generation 1, sequence 2," in message for message in found)
