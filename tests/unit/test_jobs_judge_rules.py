"""The judge as a function: pure, deterministic, total over the manifest; exit codes by the table in the docs."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jobs import more_runs
from jobs.cells_read import CellsRead, cards_of
from jobs.contract import IdentityContract
from jobs.docket import Docket
from jobs.judge import input_digest, judge, judge_read, normalise
from jobs.model import AttemptFact, CellInput, Gate, JudgeInput, Manifest, RunFact
from jobs.outcomes import EXIT_WHEN_BLOCKING, exit_for, fold, leading, worst_first
from jobs.verdict import Outcome, Verdict
from jobs.wording import REMEDY

DOCS = Path(__file__).parents[2] / "docs" / "verdicts.md"


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def two_cells(documents: Any, head: Any = None) -> JudgeInput:
    """A sweep of two cells over one set of arms: one clean, one of `head`, whose tokens are wrong unless given."""
    clean = documents.sweep()
    wrong = documents.stable_arm(ids=lambda _r, gen: (*documents.IDS[:7], 1 + gen, *documents.IDS[8:]))
    other = documents.sweep(head=head or wrong, cell={"cell": "smollm2/poem/weight_budget=50%", "prompt": "poem"})
    runs = tuple(_named(run, f"poem_{run.run_id}") for run in other.cells[0].runs)
    cells = (clean.cells[0], CellInput(plan=other.cells[0].plan, runs=runs))
    manifest = clean.manifest.model_copy(update={"cells": tuple(cell.plan for cell in cells)})
    doc: JudgeInput = clean.model_copy(update={"manifest": manifest, "cells": cells})
    return doc


def _named(run: RunFact, name: str) -> RunFact:
    assert run.record is not None
    return run.model_copy(update={"run_id": name, "record": run.record.model_copy(update={"run_id": name})})


# ---- purity ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(random=st.randoms(use_true_random=False), is_split=st.booleans())
def test_order_and_duplicates_of_rows_change_nothing(documents: Any, random: Random, is_split: bool) -> None:
    doc = two_cells(documents)
    expected = verdict_of(doc)

    def shuffled(cell: CellInput) -> CellInput:
        runs = [*cell.runs, *random.choices(cell.runs, k=2)]
        random.shuffle(runs)
        return cell.model_copy(update={"runs": tuple(_inner(run, random) for run in runs)})

    cells = [shuffled(cell) for cell in doc.cells]
    if is_split:  # a cell's rows in two parts
        first = cells[0]
        cells += [first.model_copy(update={"runs": first.runs[:2]})]
        cells[0] = first.model_copy(update={"runs": first.runs[2:]})
    random.shuffle(cells)
    mixed = doc.model_copy(update={"cells": tuple(cells)})
    assert verdict_of(mixed).canonical() == expected.canonical()
    assert normalise(mixed) == normalise(doc)


@pytest.mark.parametrize("kind", ["two cells", "two batches", "more runs", "broken", "nothing"])
def test_cells_read_one_after_another_are_judged_as_the_whole_document(documents: Any, kind: str) -> None:
    """None is kept meanwhile; what they say of the whole, such as its cards, is said all the same."""
    doc = two_cells(documents)
    match kind:
        case "two batches":
            large = doc.cells[1].plan.model_copy(update={"config": {"weight_budget": "50%", "batch": 2}})
            small = doc.cells[0].plan
            plans = (large.model_copy(update={"prompt": small.prompt}), small)
            cells = tuple(CellInput(plan=one, runs=cell.runs) for one, cell in zip(plans, doc.cells[::-1], strict=True))
            contract = IdentityContract(scope=("card", "driver"))
            manifest = doc.manifest.model_copy(update={"cells": plans, "identity": contract})
            doc = doc.model_copy(update={"manifest": manifest, "cells": cells})
        case "more runs":  # base again, so that room for questions is less
            fresh = tuple(run.model_copy(update={"block": run.block + 9}) for run in doc.cells[0].runs)
            first = doc.cells[0].model_copy(update={"runs": fresh})
            doc = doc.model_copy(update={"cells": (first, doc.cells[1])})
        case "broken":
            doc = documents.replace_runs(doc, lambda run: None if run.position else _inner(run, Random(7)))
        case "nothing":
            doc = documents.replace_runs(doc, lambda run: None)
    doc = doc.model_copy(update={"stamp": doc.stamp.model_copy(update={"cards": cards_of(doc.cells)})})
    whole = judge(doc)
    around = doc.model_copy(update={"cells": (), "stamp": doc.stamp.model_copy(update={"cards": ()})})
    further = sum(len(tuple(more_runs.given(cell.plan, cell.runs))) for cell in doc.cells)
    assert judge_read(CellsRead(around, iter(doc.cells), further)) == whole
    assert not isinstance(whole, Verdict) or whole.input_digest == input_digest(normalise(doc))
    assert (further > 0) is (kind == "more runs")


def _inner(run: RunFact, random: Random) -> RunFact:
    assert run.record is not None
    generations = list(run.record.generations)
    random.shuffle(generations)
    return run.model_copy(update={"record": run.record.model_copy(update={"generations": tuple(generations)})})


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_order_of_keys_and_of_attempts_changes_nothing(documents: Any, seed: int) -> None:
    """Stores give objects back in an order of their own, and rows of attempts as they come."""
    random = Random(seed)
    doc = two_cells(documents)
    lost = AttemptFact(attempt_id="att_0", number=0, state="lost", reason="the worker went away")
    doc = documents.replace_runs(doc, lambda run: run.model_copy(update={"attempts": (lost, *run.attempts)}))
    mixed = documents.replace_runs(
        JudgeInput.model_validate(_reordered(doc.model_dump(), random)),
        lambda run: run.model_copy(update={"attempts": tuple(random.sample(run.attempts, k=2))}),
    )
    assert verdict_of(mixed).canonical() == verdict_of(doc).canonical()


def _reordered(value: Any, random: Random) -> Any:
    if isinstance(value, dict):
        return {key: _reordered(value[key], random) for key in random.sample(list(value), k=len(value))}
    return tuple(_reordered(one, random) for one in value) if isinstance(value, tuple) else value


def test_judging_leaves_its_input_as_it_was(documents: Any) -> None:
    doc = two_cells(documents)
    before = doc.canonical()
    first = verdict_of(doc)
    assert doc.canonical() == before
    assert verdict_of(doc).canonical() == first.canonical() and verdict_of(normalise(doc)) == first


def test_judging_twice_and_from_json_gives_one_verdict(documents: Any) -> None:
    doc = two_cells(documents)
    again = JudgeInput.model_validate_json(doc.model_dump_json(by_alias=True))
    assert verdict_of(again).canonical() == verdict_of(doc).canonical()
    assert verdict_of(doc).input_digest == normalise(doc).digest()


def test_any_change_of_content_changes_the_input_digest(documents: Any) -> None:
    one, two = documents.sweep(), documents.sweep(head=documents.stable_arm(gap=0.51))
    assert input_digest(normalise(one)) != input_digest(normalise(two))


@settings(max_examples=60, deadline=None)
@given(
    who=st.sampled_from(["base", "null", "head"]),
    cut=st.integers(0, 31),
    to=st.integers(0, 50_000),
    generation=st.integers(0, 2),
)
def test_no_wrong_token_anywhere_reads_as_pass(documents: Any, who: str, cut: int, to: int, generation: int) -> None:
    """One id, in one generation of every run of one arm: never exit 0, unless it is the id that stood there."""
    ids = (*documents.IDS[:cut], to, *documents.IDS[cut + 1 :])
    arm = documents.stable_arm if who == "head" else documents.arm
    script = arm(ids=lambda _r, gen: ids if gen == generation else documents.IDS)
    parts = {"base": documents.arm(), "null": documents.arm(), who: script}
    verdict = verdict_of(documents.sweep(**parts))
    assert (verdict.exit_code == 0) == (ids == documents.IDS)


@settings(max_examples=40, deadline=None)
@given(lost=st.sets(st.integers(0, 5), min_size=1))
def test_no_absent_run_reads_as_pass(documents: Any, lost: set[int]) -> None:
    doc = documents.replace_runs(documents.sweep(), lambda run: None if run.position in lost else run)
    assert verdict_of(doc).exit_code == 3


# ---- the manifest and the document -------------------------------------------------------------------------------


def test_the_worst_cell_gives_the_verdict_and_each_cell_keeps_its_own(documents: Any) -> None:
    verdict = verdict_of(two_cells(documents))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert [(cell.outcome, cell.exit_code) for cell in verdict.cells] == [("IMPROVED", 0), ("VIOLATION", 1)]
    assert verdict.headline.startswith("In smollm2/poem")


def test_a_gain_among_several_cells_is_of_the_cell_that_is_named(documents: Any) -> None:
    doc = two_cells(documents, head=documents.stable_arm())
    verdict = verdict_of(doc)
    assert verdict.outcome == "IMPROVED"
    assert verdict.headline.startswith(f"Same tokens in 2 cells; in {verdict.cells[0].cell}: htod_bytes fell by ")
    alone = verdict_of(documents.sweep())
    assert alone.headline.startswith(f"Same tokens in {alone.cells[0].cell}; htod_bytes fell by ")


def test_field_23_an_absent_cell_is_missing(documents: Any) -> None:
    doc = two_cells(documents)
    verdict = verdict_of(doc.model_copy(update={"cells": doc.cells[:1]}))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert (verdict.cells_expected, verdict.cells_judged) == (2, 1)
    assert [cell.outcome for cell in verdict.cells] == ["IMPROVED", "MISSING"]


def test_a_manifest_without_cells_is_no_pass(documents: Any) -> None:
    doc = documents.sweep()
    manifest: Manifest = doc.manifest.model_copy(update={"cells": ()})
    verdict = verdict_of(doc.model_copy(update={"manifest": manifest, "cells": ()}))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)


def test_a_sweep_without_a_head_compares_nothing(documents: Any) -> None:
    doc = documents.sweep()
    plan = doc.manifest.cells[0].model_copy(update={"arms": ("base", "null")})
    manifest = doc.manifest.model_copy(update={"cells": (plan,)})
    runs = tuple(run for run in doc.cells[0].runs if run.arm != "head")
    verdict = verdict_of(doc.model_copy(update={"manifest": manifest, "cells": (CellInput(plan=plan, runs=runs),)}))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "no arm under test" in verdict.headline


def test_results_that_the_manifest_does_not_know_are_our_fault(documents: Any) -> None:
    doc = two_cells(documents)
    manifest = doc.manifest.model_copy(update={"cells": doc.manifest.cells[:1]})
    verdict = verdict_of(doc.model_copy(update={"manifest": manifest}))
    assert (verdict.outcome, verdict.exit_code) == ("INFRASTRUCTURE", 4)
    changed = doc.cells[0].plan.model_copy(update={"repeats": 2})
    other = doc.model_copy(update={"cells": (doc.cells[0].model_copy(update={"plan": changed}), doc.cells[1])})
    assert "not the manifest's" in " ".join(finding.message for finding in verdict_of(other).findings)


def test_one_run_with_two_contents_is_our_fault(documents: Any) -> None:
    doc = documents.sweep()
    first = doc.cells[0].runs[0]
    assert first.record is not None
    other = first.model_copy(update={"record": first.record.model_copy(update={"exit_code": 13})})
    cell = doc.cells[0].model_copy(update={"runs": (*doc.cells[0].runs, other)})
    verdict = verdict_of(doc.model_copy(update={"cells": (cell,)}))
    assert verdict.exit_code == 4
    assert any("twice with different content" in finding.message for finding in verdict.findings)


def test_runs_of_an_unknown_arm_are_our_fault(documents: Any) -> None:
    doc = documents.sweep()
    stray = doc.cells[0].runs[0].model_copy(update={"arm": "ghost", "run_id": "run_ghost"})
    cell = doc.cells[0].model_copy(update={"runs": (*doc.cells[0].runs, stray)})
    verdict = verdict_of(doc.model_copy(update={"cells": (cell,)}))
    assert (verdict.outcome, verdict.exit_code) == ("INFRASTRUCTURE", 4)


# ---- exit codes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((), 0), ((0, 0), 0), ((0, 3), 3), ((3, 4), 4), ((4, 1, 3), 1), ((1, 2, 4), 2), ((0, 4), 4)],
)
def test_codes_fold_in_the_designs_order(codes: tuple[int, ...], expected: int) -> None:
    assert fold(codes) == expected
    assert fold(reversed(codes)) == expected


def test_every_outcome_has_a_code_a_remedy_and_a_line_in_the_docs() -> None:
    outcomes = set(get_args(Outcome))
    assert set(EXIT_WHEN_BLOCKING) == outcomes == set(REMEDY)
    rows = re.findall(r"^\| `([A-Z_]+)`[^|]*\| (\d)", DOCS.read_text(), flags=re.MULTILINE)
    assert {name: int(code) for name, code in rows} == dict(EXIT_WHEN_BLOCKING)


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_what_advises_costs_nothing_but_for_our_own_faults(outcome: Outcome) -> None:
    assert exit_for(outcome, "advise") == (4 if outcome == "INFRASTRUCTURE" else 0)
    assert exit_for(outcome, "block") == EXIT_WHEN_BLOCKING[outcome]


def test_nondeterminism_of_base_leaves_the_question_open() -> None:
    assert exit_for("NONDETERMINISTIC", "block", of_base=True) == 3
    assert exit_for("NONDETERMINISTIC", "block") == 1


def test_the_leading_finding_does_not_depend_on_order() -> None:
    docket = Docket("c", Gate())
    docket.add("REGRESSED", "exact", "b")
    docket.add("VIOLATION", "identity", "z")
    docket.add("VIOLATION", "identity", "a")
    docket.add("TIME_WORSE", "time", "t")
    docket.add("VACUOUS", "identity", "v")
    findings = docket.findings()
    assert worst_first(reversed(findings)) == findings
    first = leading(reversed(findings))
    assert first is not None
    assert (first.outcome, first.message) == ("VIOLATION", "a")
    assert first.remedy


def test_time_that_advises_is_noted_and_names_no_outcome() -> None:
    docket = Docket("c", Gate())
    docket.add("TIME_WORSE", "time", "slow")
    assert leading(docket.findings()) is None
    assert [finding.exit_code for finding in docket.findings()] == [0]


def test_the_headline_names_the_worst_change_of_all_cells(documents: Any) -> None:
    """The cell whose name comes first moved less; a head that gave nothing, which has no figure, comes before both."""
    little = documents.sweep(head=documents.arm(changes={"host_syncs": 100}))
    much = documents.sweep(head=documents.arm(changes={"host_syncs": 120}), cell={"cell": "z", "prompt": "poem"})
    runs = tuple(
        run.model_copy(
            update={"run_id": f"z_{run.run_id}", "record": run.record.model_copy(update={"run_id": f"z_{run.run_id}"})}
        )
        for run in much.cells[0].runs
    )
    cells = (little.cells[0], CellInput(plan=much.cells[0].plan, runs=runs))
    manifest = little.manifest.model_copy(update={"cells": tuple(cell.plan for cell in cells)})
    verdict = verdict_of(little.model_copy(update={"manifest": manifest, "cells": cells}))
    assert [round(finding.share or 0, 2) for finding in verdict.findings] == [0.25, 0.04]
    assert verdict.headline.startswith("In z: host_syncs rose by 24 (+25.0%)")
    crash = verdict.findings[-1].model_copy(update={"share": None, "message": "head crashed"})
    assert worst_first((*verdict.findings, crash))[0] == crash
