"""Field reports on token identity, held against the judge, the store and the reports; each with its mirror."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.contract import IdentityContract
from jobs.judge import judge
from jobs.model import Gate, JudgeInput, Missing, RunFact, SequenceTokens
from jobs.store import Store
from jobs.verdict import IdentityRow, Verdict
from orchestrator.conclude import judge_sweep
from reports.render import render
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)

ARMS = ("base", "head")


def judged(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def pair(verdict: Verdict) -> IdentityRow:
    return next(row for row in verdict.cells[0].identity if row.what == "pair")


def with_id(documents: Any, at: int, token: int = 9) -> Any:
    return lambda _run, _generation: (*documents.IDS[:at], token, *documents.IDS[at + 1 :])


def arms(documents: Any, which: str, **script: Any) -> dict[str, Any]:
    """A script for base (and its null arm) or for head."""
    if which == "head":
        return {"head": documents.stable_arm(**script)}
    return {"base": documents.arm(**script), "null": documents.arm(**script)}


# ---- 32: where the claim ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ARMS)
def test_field_32_inside_the_scope_a_difference_names_its_place_and_both_gaps(documents: Any, which: str) -> None:
    doc = documents.sweep(**arms(documents, which, ids=with_id(documents, 19), gap=2.5))
    if which == "head":
        doc = documents.sweep(**arms(documents, "base", gap=1.25), head=documents.stable_arm(
            ids=with_id(documents, 19), gap=2.5))  # fmt: skip
    verdict = judged(doc)
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    row = pair(verdict)
    assert (row.first_difference, row.common_prefix, row.place) == (19, 19, "generation 1")
    assert {row.left_id, row.right_id} == {documents.IDS[19], 9}
    assert (row.left_gap, row.right_gap) == ((2.5, 0.5) if which == "base" else (1.25, 2.5))
    assert "at index 19" in verdict.headline


@pytest.mark.parametrize("which", ARMS)
@pytest.mark.parametrize("device", [{"uuid": "GPU-Y"}, {"driver": "sim 2"}])
def test_field_32_outside_the_scope_other_tokens_are_not_called_wrong(
    documents: Any, which: str, device: dict[str, str]
) -> None:
    verdict = judged(documents.sweep(**arms(documents, which, ids=with_id(documents, 19), device=device)))
    assert verdict.exit_code == 3
    assert pair(verdict).klass == "NOT_COMPARABLE"
    assert "VIOLATION" not in {one.outcome for one in verdict.findings}


@pytest.mark.parametrize("which", ARMS)
def test_field_32_row_three_of_a_batch_that_differs_is_named(documents: Any, which: str) -> None:
    """A batch of four with one prompt: its third sequence is not what the first one is."""

    def batched(run: RunFact) -> RunFact:
        assert run.record is not None
        generations = tuple(
            generation.model_copy(
                update={
                    "further": tuple(
                        SequenceTokens(
                            ids=with_id(documents, 5)(0, 0) if run.arm == which and row == 3 else documents.IDS,
                            stop_reason="length",
                            gaps=(0.5,) * 32,
                        )
                        for row in (2, 3, 4)
                    )
                }
            )
            for generation in run.record.generations
        )
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})

    four = {**arms(documents, "base", emitted=4 * 96), **arms(documents, "head", emitted=4 * 96)}
    doc = documents.sweep(**four, cell={"config": {"weight_budget": "50%", "batch": 4}})
    verdict = judged(documents.replace_runs(doc, batched))
    found = [one for one in verdict.findings if one.outcome == "NONDETERMINISTIC"]
    assert any("seq 3 differs" in one.message and one.arm == which for one in found)
    assert verdict.exit_code == (1 if which == "head" else 3)


# ---- 33: graphs on and off ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ARMS)
def test_field_33_graphs_on_and_off_that_differ_are_told_with_the_step(documents: Any, which: str) -> None:
    """One build with and without capture: state that swaps sides under a graph shows at the first replayed step."""
    wrong = {which: with_id(documents, 2)}
    doc = documents.sweep(
        base=documents.arm(config={"capture": True}, effective={"capture": True}, gap=3.0,
                           **({"ids": wrong["base"]} if which == "base" else {})),
        null=documents.arm(config={"capture": True}, effective={"capture": True}, gap=3.0,
                           **({"ids": wrong["base"]} if which == "base" else {})),
        head=documents.arm(config={"capture": False}, effective={"capture": False}, gap=3.0,
                           changes={"segments": 0, "captures": 0, "replays": 0},
                           **({"ids": wrong["head"]} if which == "head" else {})),
        varies=("capture",),
    )  # fmt: skip
    verdict = judged(doc)
    assert (verdict.outcome, verdict.exit_code, pair(verdict).first_difference) == ("VIOLATION", 1, 2)
    assert verdict.varies == ("capture",)
    assert "at index 2 of generation 1" in verdict.headline
    for form in ("comment", "html", "text"):
        assert "capture" in render(verdict, form)


# ---- 35: cold and warm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ARMS)
def test_field_35_a_warm_server_and_a_cold_one_are_not_compared_unless_that_is_meant(
    documents: Any, which: str
) -> None:
    warm = {"config": {"policy": "lru" if which == "base" else "stable"}, "effective": {"prefix_reuse": True}}
    cold = {"effective": {"prefix_reuse": False}}
    scripts = {**arms(documents, "base", **cold), **arms(documents, "head", **cold)}
    assert judged(documents.sweep(**scripts)).exit_code == 0
    scripts |= arms(documents, which, **warm)
    verdict = judged(documents.sweep(**scripts))
    assert verdict.exit_code == 3
    assert any(one.outcome == "NOT_COMPARABLE" and "prefix_reuse" in one.message for one in verdict.findings)


@pytest.mark.parametrize("which", ARMS)
def test_field_35_generations_that_drift_on_a_warm_cache_are_found(documents: Any, which: str) -> None:
    def ids(_run: int, generation: int) -> tuple[int, ...]:
        return documents.IDS if generation == 0 else with_id(documents, 0)(0, 0)  # type: ignore[no-any-return]

    verdict = judged(documents.sweep(**arms(documents, which, ids=ids)))
    assert verdict.exit_code == 1
    assert any(one.outcome == "VIOLATION" and "generation 2" in one.message for one in verdict.findings)


# ---- 36: what is not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 15, 31, None])
@pytest.mark.parametrize("which", [*ARMS, "both"])
def test_field_36_ids_after_logits_that_are_not_finite_pass_in_no_arm_and_no_store(
    store: Store, documents: Any, which: str, at: int | None
) -> None:
    """At the first index, in the middle, at the last one, and everywhere; alike in both arms too."""

    def spoiled(run: RunFact) -> RunFact:
        if which not in (run.arm, "both"):
            return run
        assert run.record is not None
        gaps = tuple(float("nan") if at in (index, None) else 0.5 for index in range(32))
        generations = tuple(g.model_copy(update={"gaps": gaps}) for g in run.record.generations)
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})

    sweep_id = put(store, documents.replace_runs(documents.sweep(), spoiled))
    verdict = judge_sweep(store, sweep_id)
    assert verdict.exit_code == 1
    named = {one.arm for one in verdict.findings if "not finite" in one.message or "gap" in one.message}
    assert named >= ({which} if which != "both" else set(ARMS))
    assert "nan" not in render(verdict, "json").lower()


# ---- 39: rows of a ragged batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ARMS)
def test_field_39_the_short_row_that_is_wrong_is_found_though_the_longest_is_right(documents: Any, which: str) -> None:
    def batched(run: RunFact) -> RunFact:
        assert run.record is not None
        short = with_id(documents, 0)(0, 0) if run.arm == which else documents.IDS
        rows = (SequenceTokens(ids=short, stop_reason="length", gaps=(3.0,) * 32),)
        generations = tuple(g.model_copy(update={"further": rows}) for g in run.record.generations)
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})

    cell = {"config": {"weight_budget": "50%", "batch": 2}, "further_prompts": ((7,),)}
    null = {"null": documents.arm(gap=3.0)}
    doc = documents.sweep(base=documents.arm(gap=3.0), head=documents.stable_arm(gap=3.0), cell=cell, **null)
    verdict = judged(documents.replace_runs(doc, batched))
    assert verdict.exit_code in (1, 3)
    assert pair(verdict).sequence == 1
    assert "sequence 2" in pair(verdict).place


# ---- 41: how it ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ARMS)
def test_field_41_a_run_that_ends_at_three_is_found_whichever_arm_it_is(documents: Any, which: str) -> None:
    ended = {"ids": lambda _r, _g: documents.IDS[:3], "stop": lambda _r, _g: "eos"}
    verdict = judged(documents.sweep(**arms(documents, which, **ended), cell=None))
    assert verdict.exit_code == 1
    assert {one.outcome for one in verdict.findings} & {"SHORT", "LONG"}
    row = pair(verdict)
    assert row.common_prefix == 3
    assert {row.left_length, row.right_length} == {3, 32}
    assert {row.left_stop, row.right_stop} == {"eos", "length"}


@pytest.mark.parametrize("which", ARMS)
def test_field_41_no_ids_give_no_rate_and_no_pass(documents: Any, which: str) -> None:
    nothing = {"ids": lambda _r, _g: (), "stop": lambda _r, _g: "eos"}
    verdict = judged(documents.sweep(**arms(documents, which, **nothing), gate=Gate(time="block")))
    assert verdict.exit_code != 0
    (arm,) = [arm for arm in verdict.cells[0].arms if arm.arm == which]
    for name in ("tokens_per_s", "htod_bytes_per_token", "decode_ms_per_token"):
        assert isinstance(arm.values.get(name, Missing(missing="absent")), Missing), name


def test_field_41_equal_ids_with_another_stop_are_no_equal_ending(documents: Any) -> None:
    for left, right in (("length", "eos"), ("eos", "length")):
        base, head = ({"stop": lambda _r, _g, word=word: word} for word in (left, right))
        doc = documents.sweep(**arms(documents, "base", **base), **arms(documents, "head", **head))
        assert judged(doc).exit_code == 1
    prefix = documents.sweep(head=documents.stable_arm(stop=lambda _r, _g: "eos"), identity=IdentityContract(
        compare="prefix"))  # fmt: skip
    assert pair(judged(prefix)).klass == "IDENTICAL", "a prefix contract forgives the stop alone"
