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


def in_batch(documents: Any, second: dict[int, tuple[int, ...]], prompt: tuple[int, ...]) -> JudgeInput:
    """A sweep with a batch of three: its second sequence has `prompt`, and head's gives `second` by generation."""

    def give(run: RunFact) -> RunFact:
        assert run.record is not None
        generations = []
        for g in run.record.generations:
            ids = second.get(g.index, documents.IDS) if run.arm == "head" else documents.IDS
            others = (ids, documents.IDS)
            further = tuple(SequenceTokens(ids=i, stop_reason="length", gaps=(0.5,) * len(i)) for i in others)
            generations.append(g.model_copy(update={"further": further}))
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": tuple(generations)})})

    doc: JudgeInput = documents.replace_runs(documents.sweep(), give)
    cell = doc.manifest.cells[0]
    further = () if prompt == cell.prompt_ids else (prompt,)
    plan = cell.model_copy(update={"config": {**cell.config, "batch": 3}, "further_prompts": further})
    manifest = doc.manifest.model_copy(update={"cells": (plan,)})
    cells = tuple(c.model_copy(update={"plan": plan}) for c in doc.cells)
    return doc.model_copy(update={"manifest": manifest, "cells": cells})


def test_sequences_of_one_prompt_that_differ_are_nondeterministic_and_both_are_named(documents: Any) -> None:
    prompt = documents.sweep().manifest.cells[0].prompt_ids
    other = (*documents.IDS[:-1], documents.IDS[-1] + 1)
    verdict = verdict_of(in_batch(documents, dict.fromkeys(range(8), other), prompt))
    found = [f for f in verdict.findings if f.outcome == "NONDETERMINISTIC" and f.gate == "identity"]
    assert found and all("head" in f.message and "seq 1" in f.message and "seq 2" in f.message for f in found)
    assert verdict.exit_code == 1
    clean = verdict_of(in_batch(documents, {}, prompt))
    assert not any(f.outcome == "NONDETERMINISTIC" for f in clean.findings)


def test_sequences_of_other_prompts_may_give_other_ids_and_those_of_the_same_still_may_not(documents: Any) -> None:
    """With two prompts in a batch of three, the third sequence has the first one's prompt again."""
    doc = in_batch(documents, {}, (7, 8, 9))

    def differ(run: RunFact, which: int) -> RunFact:
        assert run.record is not None
        generations = []
        for g in run.record.generations:
            further = list(g.further)
            ids = (*documents.IDS[:-1], documents.IDS[-1] + 1)
            further[which] = further[which].model_copy(update={"ids": ids})
            generations.append(g.model_copy(update={"further": tuple(further)}))
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": tuple(generations)})})

    second = verdict_of(documents.replace_runs(doc, lambda run: differ(run, 0)))
    assert not any(f.outcome == "NONDETERMINISTIC" for f in second.findings), "another prompt"
    third = verdict_of(documents.replace_runs(doc, lambda run: differ(run, 1)))
    assert any(f.outcome == "NONDETERMINISTIC" and "seq 3" in f.message for f in third.findings)
