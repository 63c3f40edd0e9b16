"""What was not measured never passes: absent metrics, lost capture, unproven certificates, settings not read back."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from jobs.contract import IdentityContract
from jobs.docket import EVIDENCE
from jobs.gates import CLOSING, GATING
from jobs.judge import judge, stamped
from jobs.model import Equation, Gate, Interval, JudgeInput, Missing, RunSettings
from jobs.reviewed import Expectation
from jobs.verdict import MetricRow, Verdict

EVERY = Gate(identity="advise", exact="advise", time="advise")
NONE = Gate(identity="off", exact="off", time="off")


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def outcomes_of(verdict: Verdict) -> set[str]:
    return {finding.outcome for finding in verdict.findings}


def exact(verdict: Verdict, metric: str) -> MetricRow:
    return next(row for row in verdict.cells[0].exact if row.metric == metric)


# ---- gating metrics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GATING))
@pytest.mark.parametrize("arms", [("base",), ("head",), ("base", "head")])
def test_a_gating_metric_that_an_arm_did_not_record_is_missing(
    documents: Any, name: str, arms: tuple[str, ...]
) -> None:
    gone = {"changes": {name: None}}
    doc = documents.sweep(
        base=documents.arm(**(gone if "base" in arms else {})),
        head=documents.stable_arm(**(gone if "head" in arms else {})),
    )
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    said = [f.message for f in verdict.findings if f.message.startswith(f"{name} gates and could not be compared")]
    assert said == [f"{name} gates and could not be compared: {' and '.join(arms)}: not recorded"]


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        math.nan,
        math.inf,
        -1,
        Missing(missing="not a storable number: beyond 64 bits"),  # how the store gives such a figure back
        Missing(missing="not a storable number: nan"),
    ],
)
@pytest.mark.parametrize("arms", [("base",), ("head",), ("base", "head")])
def test_a_figure_that_cannot_be_breaks_the_record(documents: Any, value: Any, arms: tuple[str, ...]) -> None:
    odd = {"changes": {"step_kernels": value}}
    doc = documents.sweep(
        base=documents.arm(**(odd if "base" in arms else {})),
        head=documents.stable_arm(**(odd if "head" in arms else {})),
    )
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("BROKEN_INVARIANT", 1)


@pytest.mark.parametrize(
    ("flag", "outcome"),
    [
        ("generations.1.gaps: not finite", "VIOLATION"),
        ("generations.1.counters.decode.hits: nan", "BROKEN_INVARIANT"),
        ("equations.0: inf", "BROKEN_INVARIANT"),
    ],
)
def test_what_the_store_could_not_keep_is_judged_by_its_flag(documents: Any, flag: str, outcome: str) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"flags": (flag,)})))
    assert (verdict.outcome, verdict.exit_code) == (outcome, 1)
    assert flag in verdict.headline


def test_a_flag_of_text_alone_breaks_nothing(documents: Any) -> None:
    flagged = documents.stable_arm(record={"flags": ("log_tail: NUL or half a surrogate pair",)})
    assert verdict_of(documents.sweep(head=flagged)).outcome == "IMPROVED"


def test_an_absent_gating_metric_of_a_gate_that_advises_is_noted_and_no_pass(documents: Any) -> None:
    doc = documents.sweep(head=documents.arm(changes={"step_kernels": None}), gate=EVERY)
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 0)


def test_a_gating_metric_that_varies_is_no_pass_where_its_gate_advises(documents: Any) -> None:
    head = documents.arm(by_run=lambda run: {"step_kernels": 640 + run})
    verdict = verdict_of(documents.sweep(head=head, gate=EVERY))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 0)


def one_token(documents: Any, tokens: int = 1, **head: Any) -> Any:
    """A sweep whose arms give `tokens` ids a generation and record no kernels of a one-token step."""
    first = {"ids": lambda _run, _generation: documents.IDS[:tokens], "changes": {"step_kernels": None}}
    settings = RunSettings(tokens=tokens, generations=3, ignore_eos=True)
    arms = {"base": documents.arm(**first), "head": documents.arm(**{**first, **head})}
    return verdict_of(documents.sweep(cell={"settings": settings}, **arms))


def test_a_counter_of_steps_that_could_not_be_is_not_asked_for_and_that_is_said(documents: Any) -> None:
    """`tokens: 1`: the one id is the prefill's."""
    verdict = one_token(documents)
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    row = exact(verdict, "step_kernels")
    assert (row.klass, row.gating) == ("not_recorded", False)
    assert "no one-token step ran" in row.note
    assert any(note.startswith("step_kernels of head: not asked for") for note in verdict.cells[0].notes)
    assert exact(verdict, "segments").gating


@pytest.mark.parametrize(
    ("tokens", "head"), [(2, {}), (1, {"changes": {}}), (1, {"changes": {"step_kernels": None, "segments": None}})]
)
def test_a_counter_that_could_be_there_is_asked_for(documents: Any, tokens: int, head: dict[str, Any]) -> None:
    """A second id was given; or one arm records it; or another counter is gone, which needs no step."""
    verdict = one_token(documents, tokens, **head)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)


# ---- capture -----------------------------------------------------------------------------------------------------

EAGER = {"segments": 0, "captures": 0, "replays": 0}


@pytest.mark.parametrize("name", ["segments", "replays"])
def test_capture_that_is_lost_is_a_regression(documents: Any, name: str) -> None:
    changes = EAGER if name == "segments" else {name: 0}
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(changes=changes)))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    row = exact(verdict, name)
    assert (row.klass, row.gating) == ("regressed", True)
    assert "capture is lost" in row.note


@pytest.mark.parametrize("name", ["segments", "replays"])
def test_capture_that_differs_on_purpose_is_neutral_with_a_note(documents: Any, name: str) -> None:
    off = {"policy": "lru", "capture": False}
    head = documents.arm(config=off, effective={"capture": False}, changes=EAGER)
    verdict = verdict_of(documents.sweep(head=head, varies=("capture",)))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    assert (exact(verdict, name).klass, exact(verdict, name).gating) == ("neutral", name == "segments")
    assert "on purpose" in exact(verdict, name).note


def test_capture_declined_by_the_engine_is_no_purpose(documents: Any) -> None:
    """`varies` names capture, and both arms were asked for it."""
    head = documents.arm(changes=EAGER)
    verdict = verdict_of(documents.sweep(head=head, varies=("capture",)))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)


def test_capture_that_is_gained_is_neither_better_nor_worse(documents: Any) -> None:
    base = documents.arm(changes=EAGER)
    verdict = verdict_of(documents.sweep(base=base, head=documents.arm()))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    assert exact(verdict, "segments").klass == "neutral"


def test_fewer_segments_among_captured_arms_are_better(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(base=documents.arm(changes={"segments": 4}), head=documents.arm()))
    assert exact(verdict, "segments").klass == "improved"


# ---- gates that are off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_measured", [True, False])
def test_all_gates_off_never_pass(documents: Any, is_measured: bool) -> None:
    doc = documents.sweep(gate=NONE)
    if not is_measured:
        doc = documents.replace_runs(doc, lambda run: run.model_copy(update=documents.lost("lost", "gone")))
    verdict = verdict_of(doc)
    assert verdict.exit_code in (3, 4)
    assert "MISSING" in outcomes_of(verdict)
    assert any("every gate is off" in finding.message for finding in verdict.findings)


def test_evidence_that_only_advises_keeps_its_name(documents: Any) -> None:
    doc = documents.replace_runs(documents.sweep(gate=EVERY), lambda _run: None)
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 0)


# ---- prefixes ----------------------------------------------------------------------------------------------------


def test_one_id_against_thirty_two_is_short_also_under_a_prefix_contract(documents: Any) -> None:
    verdict = verdict_of(_shorter(documents, 1, IdentityContract(compare="prefix")))
    assert (verdict.outcome, verdict.exit_code) == ("SHORT", 1)
    assert not any(row.klass == "improved" for row in verdict.cells[0].exact)


@pytest.mark.parametrize(("given", "outcome", "code"), [(7, "SHORT", 1), (8, "MISSING", 3), (31, "MISSING", 3)])
def test_forgiven_lengths_are_different_work(documents: Any, given: int, outcome: str, code: int) -> None:
    verdict = verdict_of(_shorter(documents, given, IdentityContract(compare="prefix", min_tokens=8)))
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    assert not any(row.klass == "improved" for row in verdict.cells[0].exact)


def test_forgiven_lengths_pass_where_counters_are_not_asked(documents: Any) -> None:
    contract = IdentityContract(compare="prefix", min_tokens=8)
    verdict = verdict_of(_shorter(documents, 9, contract, gate=Gate(exact="off")))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)


def _shorter(documents: Any, given: int, contract: IdentityContract, **manifest: Any) -> JudgeInput:
    head = documents.stable_arm(ids=lambda _r, _g: documents.IDS[:given], stop=lambda _r, _g: "eos")
    settings = RunSettings(tokens=32, generations=3)
    doc: JudgeInput = documents.sweep(head=head, identity=contract, cell={"settings": settings}, **manifest)
    return doc


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"effective_config": {}}, "policy was asked as lru and the run does not say how it ran"),
        (
            {"effective_config": {"policy": "lru", "weight_budget": None}},
            "weight_budget was asked as 50% and ran as None",
        ),
        ({"effective_config": {"policy": "lru", "weight_budget": 7}}, "weight_budget was asked as 50% and ran as 7"),
        ({"effective_config": {"policy": "lru"}}, "weight_budget was asked as 50% and the run does not say"),
        ({"facts": {"weight_bytes": 100}}, "does not say how many bytes"),
        ({"facts": {"weight_bytes": 100, "budget_bytes": 100}}, "which is 50 bytes, and the run held itself to 100"),
    ],
)
def test_a_setting_that_both_arms_cannot_show_is_not_comparable(documents: Any, record: Any, words: str) -> None:
    both = documents.arm(record=record)
    verdict = verdict_of(documents.sweep(base=both, head=both))
    assert (verdict.outcome, verdict.exit_code) == ("NOT_COMPARABLE", 3)
    assert any(words in finding.message for finding in verdict.findings), verdict.findings


def test_a_share_may_come_back_in_bytes(documents: Any) -> None:
    both = documents.arm(effective={"weight_budget": 84_934_656 // 2})
    assert verdict_of(documents.sweep(base=both, head=both)).outcome == "PASS"


def test_a_granule_is_the_devices(documents: Any) -> None:
    both = documents.arm(config={"policy": "lru", "granule": 4096})
    assert verdict_of(documents.sweep(base=both, head=both)).outcome == "NOT_COMPARABLE"
    both = documents.arm(config={"policy": "lru", "granule": 4096}, device={"granule_bytes": 4096})
    assert verdict_of(documents.sweep(base=both, head=both)).outcome == "PASS"


def test_a_device_that_was_asked_must_be_the_one_that_ran(documents: Any) -> None:
    settings = RunSettings(tokens=32, generations=3, ignore_eos=True, device="cuda")
    verdict = verdict_of(documents.sweep(cell={"settings": settings}))
    assert (verdict.outcome, verdict.exit_code) == ("NOT_COMPARABLE", 3)


# ---- certificates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["clear", "throttled"])
@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ({"samples": 0}, "no sample was taken"),
        ({"grade": "none"}, "could not be told apart"),
        ({"before": {}}, "nothing was read before"),
        ({"after": {}}, "nothing was read after"),
    ],
)
def test_a_certificate_without_evidence_is_not_clear(documents: Any, word: str, lacking: Any, words: str) -> None:
    sound = documents.sweep().cells[0].runs[0].record.certificate.model_copy(update={"verdict": word})
    bare = sound.model_copy(update=lacking)
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": bare})))
    assert (verdict.outcome, verdict.exit_code) == ("CONTAMINATED", 3)
    assert words in verdict.headline


@pytest.mark.parametrize(
    "against",
    [{"reasons": ("process 7 was there",)}, {"intervals": (Interval(start_s=0, end_s=5, what="process 7 was there"),)}],
)
def test_a_certificate_that_says_clear_and_holds_the_opposite_is_not_clear(documents: Any, against: Any) -> None:
    sound = documents.sweep().cells[0].runs[0].record.certificate
    head = documents.stable_arm(record={"certificate": sound.model_copy(update=against)})
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("CONTAMINATED", 3)
    assert "process 7 was there" in verdict.headline


def test_a_certificate_without_a_card_is_of_another_card(documents: Any) -> None:
    nobody = documents.sweep().cells[0].runs[0].record.certificate.model_copy(update={"uuid": ""})
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": nobody})))
    assert (verdict.outcome, verdict.exit_code) == ("INFRASTRUCTURE", 4)


def test_a_scripted_certificate_says_nothing_of_a_real_card(documents: Any) -> None:
    both = documents.arm(device={"kind": "cuda"})
    verdict = verdict_of(documents.sweep(base=both, head=both))
    assert (verdict.outcome, verdict.exit_code) == ("NOT_COMPARABLE", 3)


# ---- equations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted({n for text in CLOSING for n in text.replace("0", "").split() if n.isidentifier()})
)
def test_a_closing_counter_that_is_absent_is_missing(documents: Any, name: str) -> None:
    own = Equation(name="W0", text="1 == 1", relation="==", lhs=1, rhs=1, holds=True)
    both = documents.arm(changes={name: None}, equations=(own,))
    verdict = verdict_of(documents.sweep(base=both, head=both, cell={"witnesses": ()}))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    other = documents.arm(changes={name: None}, equations=(own,), plan={"adapter": "another"})
    spared = verdict_of(documents.sweep(base=other, head=other, cell={"witnesses": ()}))
    assert name in GATING or spared.outcome == "PASS"


def test_an_engine_that_states_no_equation_is_missing(documents: Any) -> None:
    both = documents.arm(record={"equations": ()})
    verdict = verdict_of(documents.sweep(base=both, head=both))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "equations" in verdict.headline


def test_ids_that_an_engine_does_not_count_are_missing(documents: Any) -> None:
    both = documents.arm(changes={"emitted_tokens": None})
    assert verdict_of(documents.sweep(base=both, head=both)).outcome == "MISSING"


# ---- origin ------------------------------------------------------------------------------------------------------


def test_a_verdict_names_the_harness_that_ran_and_the_one_that_judged(documents: Any) -> None:
    verdict = verdict_of(documents.sweep())
    again = stamped(verdict, "j" * 64, "9.9")
    assert (again.stamp.harness_digest, again.stamp.judge_digest, again.stamp.judge_version) == (
        "h" * 64,
        "j" * 64,
        "9.9",
    )
    assert again.input_digest == verdict.input_digest


def test_a_change_that_head_declares_itself_is_said_to_be(documents: Any) -> None:
    declared = Expectation(metric="step_kernels", reason="a fused kernel", self_declared=True)
    head = documents.arm(changes={"step_kernels": 700})
    verdict = verdict_of(documents.sweep(head=head, expectations=(declared,)))
    assert (verdict.outcome, verdict.exit_code) == ("DECLARED", 0)
    assert exact(verdict, "step_kernels").note == "self-declared: a fused kernel"


# ---- the docs ----------------------------------------------------------------------------------------------------


def test_the_docs_name_what_gates_and_what_is_evidence(checkout: Path) -> None:
    text = (checkout / "docs/verdicts.md").read_text(encoding="utf-8")
    gating = text.split("## Which metrics gate")[1].split(": lower is better")[0]
    assert set(re.findall(r"`(\w+)`", gating)) == GATING
    evidence = re.search(r"((?:`[A-Z_]+`[,\s and]*)+) mean that nothing is proven", text)
    assert evidence is not None
    assert set(re.findall(r"`([A-Z_]+)`", evidence[1])) == EVIDENCE
