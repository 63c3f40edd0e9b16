"""Calibration: base against itself gives the noise of a scenario on a card, and later sweeps show it beside times."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from jobs import stats
from jobs.calibration import AGAIN, DEFAULT_BLOCKS, MODELLED, against_itself, is_against_itself, measured
from jobs.errors import SpecError
from jobs.judge import judge
from jobs.model import JudgeInput, RunSettings, Witness
from jobs.noise import Calibration, scenario_digest
from jobs.reviewed import Reviewed, Waiver
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.conclude import judge_sweep
from reports.render import render
from tests.unit.store_sweeps import Clock
from tests.unit.stored_documents import itself, put

pytest_plugins = ("tests.unit.jobs_store_cases",)

BLOCKS = 8
FACTORS = (1.0, 1.02, 0.99, 1.03, 0.98, 1.01, 1.0, 0.97)


def noisy(documents: Any) -> JudgeInput:
    """Base against itself, where the second arm is slower by a known factor in each block."""
    return itself(documents, BLOCKS, step_ns=lambda block, _run: round(20_000_000 * FACTORS[block]))


def told(doc: JudgeInput) -> dict[str, Calibration]:
    return {one.metric: one for one in measured(doc, doc.cells[0])}


def test_sigma_is_that_of_the_blocks_log_ratios(documents: Any) -> None:
    found = told(noisy(documents))
    sigma = statistics.stdev(math.log(factor) for factor in FACTORS)
    one = found["decode_ms_per_token"]
    assert one.sigma == pytest.approx(sigma, rel=1e-6)
    assert (one.blocks, one.budget_blocks, one.card, one.uuid) == (BLOCKS, DEFAULT_BLOCKS, "sim-h200", "SIM-0")
    assert found["tokens_per_s"].sigma == pytest.approx(sigma, rel=1e-6)
    assert found["prefill_ms"].sigma == 0
    assert one.smallest_detectable == stats.detectable(one.sigma, 16, rows=3)


def test_the_smallest_change_is_that_which_a_sweep_of_such_noise_prints() -> None:
    """The same figure as of blocks with that spread: one formula, two ways to it."""
    logs = [0.01 * (-1) ** block for block in range(16)]
    blocks = [stats.BlockTimes((1.0,), (math.exp(value),)) for value in logs]
    sigma = stats.spread(blocks)
    assert sigma is not None
    assert sigma == pytest.approx(statistics.stdev(logs))
    printed = stats.paired_ratio(blocks, confidence=1 - stats.FALSE_ALARMS / 3).smallest_detectable
    assert stats.detectable(sigma, 16, rows=3) == pytest.approx(printed)
    assert stats.spread(blocks[:1]) is None
    assert stats.detectable(0.0, 16) == pytest.approx(stats.RELATIVE_FLOOR)


def test_base_is_held_against_itself_and_nothing_else(documents: Any) -> None:
    doc = documents.sweep(
        cell={
            "fresh_blocks": 16,
            "witnesses": (Witness(expr="page_ins > 0", arms=("base",)), Witness(expr="hits > 0", arms=("head",))),
        }
    )
    waiver = Waiver.model_validate(
        {"cell": "*", "metric": "*", "outcome": "REGRESSED", "reason": "r", "evidence": "e", "written": "2026-01-01",
         "expires": "2026-02-01", "by": "b"}
    )  # fmt: skip
    given = doc.manifest.model_copy(update={"reviewed": Reviewed(waivers=(waiver,))})
    manifest = against_itself(given, 24)
    assert [(arm.name, arm.role, arm.config) for arm in manifest.arms] == [
        ("base", "base", {"policy": "lru"}), (AGAIN, "head", {"policy": "lru"})
    ]  # fmt: skip
    (cell,) = manifest.cells
    assert (cell.arms, cell.blocks, manifest.varies, manifest.reviewed.is_empty) == (("base", AGAIN), 24, (), True)
    assert cell.fresh_blocks == 0, "all blocks were asked for, and no change is to be decided on"
    assert [(row.expr, row.arms) for row in cell.witnesses] == [("page_ins > 0", ())]
    assert is_against_itself(manifest)
    assert not is_against_itself(doc.manifest)


def test_a_sweep_of_plans_alone_has_nothing_to_calibrate(documents: Any) -> None:
    doc = documents.sweep(cell={"settings": RunSettings(tokens=8, arithmetic="none", device="sim")})
    with pytest.raises(SpecError, match="no times to calibrate"):
        against_itself(doc.manifest, 24)


def test_too_few_blocks_on_a_card_give_nothing(documents: Any) -> None:
    doc = noisy(documents)

    def moved(run: Any) -> Any:
        device = {**run.record.device, "uuid": "SIM-1" if run.block < 3 else "SIM-0"}
        return run.model_copy(update={"record": run.record.model_copy(update={"device": device})})

    assert told(documents.replace_runs(doc, moved)) == {}, "three on one card and five on another"
    assert told(documents.replace_runs(doc, lambda run: run if run.block < 5 else None)) == {}
    assert set(told(documents.replace_runs(doc, lambda run: run if run.block < 6 else None)))


def test_the_modelled_clock_is_calibrated_apart_and_repeats(documents: Any) -> None:
    doc = noisy(documents)

    def modelled(run: Any) -> Any:
        counters = {**run.record.counters, "modelled_ns": 96_000_000}
        return run.model_copy(update={"record": run.record.model_copy(update={"counters": counters})})

    found = told(documents.replace_runs(doc, modelled))
    assert found[MODELLED].sigma == 0
    assert found[MODELLED].smallest_detectable == pytest.approx(0.01)


# ---- in the store ------------------------------------------------------------------------------------------------


def calibrated(store: Store, clock: Clock, documents: Any, key: str = "aa") -> tuple[str, list[Calibration]]:
    sweep_id = put(store, noisy(documents), key)
    verdict = judge_sweep(store, sweep_id)
    assert verdict.exit_code == 0
    doc = store.judge_input(sweep_id)
    found = list(measured(doc, doc.cells[0]))
    store.write_calibrations(sweep_id, found)
    clock.pass_s(1)
    return sweep_id, found


def rows(verdict: Verdict) -> dict[str, Calibration | None]:
    return {row.metric: row.calibrated for row in verdict.cells[0].time}


def test_later_sweeps_of_the_scenario_show_it_beside_their_times(store: Store, clock: Clock, documents: Any) -> None:
    before = put(store, documents.sweep(), "before")
    clock.pass_s(1)
    sweep_id, found = calibrated(store, clock, documents)
    after = put(store, documents.sweep(), "after")
    assert rows(judge_sweep(store, before)) == {"decode_ms_per_token": None, "tokens_per_s": None, "prefill_ms": None}
    assert store.judge_input(before).calibrations == ()
    verdict = judge_sweep(store, after)
    one = rows(verdict)["decode_ms_per_token"]
    assert one is not None
    assert (one.sweep, one.sigma, one.blocks) == (sweep_id, found[0].sigma, BLOCKS)
    assert judge_sweep(store, after) == verdict, "judging again changes nothing"
    assert store.verdict(after) == verdict
    for form in ("comment", "html", "text"):
        assert "of 3 rows the noise is calibrated" in " ".join(render(verdict, form).split()), form
    assert sweep_id in render(verdict, "comment")
    assert "Calibrated noise: base against itself" in render(verdict, "html")
    assert Verdict.model_validate_json(verdict.canonical()) == verdict


def test_the_newest_counts_and_what_is_retracted_is_not_known(store: Store, clock: Clock, documents: Any) -> None:
    first, _ = calibrated(store, clock, documents, "one")
    second, _ = calibrated(store, clock, documents, "two")
    after = put(store, documents.sweep(), "after")
    newest = rows(judge_sweep(store, after))["prefill_ms"]
    assert newest is not None and newest.sweep == second
    store.retract(second, "the fan was blocked", "Ada")
    older = rows(judge_sweep(store, after))["prefill_ms"]
    assert older is not None and older.sweep == first


@pytest.mark.parametrize(
    "other",
    [{"model_digest": "x"}, {"prompt_ids": (1, 2)}, {"config": {"weight_budget": "75%"}},
     {"settings": RunSettings(tokens=32, generations=4, ignore_eos=True)}],
)  # fmt: skip
def test_noise_of_another_scenario_is_not_shown(
    store: Store, clock: Clock, documents: Any, other: dict[str, Any]
) -> None:
    calibrated(store, clock, documents)
    sweep_id = put(store, documents.sweep(cell=other), "after")
    assert store.judge_input(sweep_id).calibrations == ()


def test_base_s_config_and_program_are_part_of_the_scenario(documents: Any) -> None:
    doc = documents.sweep()
    (plan,), base = doc.manifest.cells, doc.manifest.arms[0]
    digest = scenario_digest(plan, base)
    for changed in ({"config": {"policy": "stable"}}, {"adapter": "command"}, {"command": ("other",)}):
        assert scenario_digest(plan, base.model_copy(update=changed)) != digest
    for same in ({"commit": "c" * 40}, {"tree_digest": "f" * 64}, {"name": "b"}):
        assert scenario_digest(plan, base.model_copy(update=same)) == digest


def noise(**fields: Any) -> Calibration:
    given = {"cell": "smollm2/capital/weight_budget=50%", "metric": "prefill_ms", "card": "sim-h200", "uuid": "SIM-0",
             "blocks": 24, "sigma": 0.02, "smallest_detectable": 0.05, "budget_blocks": 24, "sweep": "swp_0",
             "at": "2026-11-30T00:00:00+00:00"}  # fmt: skip
    return Calibration.model_validate({**given, **fields})


def test_another_card_of_the_model_serves_where_this_one_is_not_known_and_is_named(documents: Any) -> None:
    doc = documents.sweep()
    known = (noise(uuid="SIM-9", sigma=0.5), noise(), noise(uuid="SIM-8", card="another"))
    for order in (known, known[::-1]):
        verdict = judge(doc.model_copy(update={"calibrations": order}))
        assert isinstance(verdict, Verdict)
        here = rows(verdict)["prefill_ms"]
        assert here is not None and here.uuid == "SIM-0"
        assert "on this card" in render(verdict, "comment")
    verdict = judge(doc.model_copy(update={"calibrations": (known[0], known[2])}))
    assert isinstance(verdict, Verdict)
    there = rows(verdict)["prefill_ms"]
    assert there is not None and there.uuid == "SIM-9"
    assert "on another card of this model, `SIM-9`" in render(verdict, "comment")


def test_noise_beyond_any_use_is_said_in_words(documents: Any) -> None:
    doc = documents.sweep().model_copy(update={"calibrations": (noise(smallest_detectable=None, sigma=99.0),)})
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    assert "beyond any use in 24" in render(verdict, "comment")


def test_order_and_repetition_of_what_is_known_change_nothing(documents: Any) -> None:
    one, two, *_ = (noise.model_copy(update={"at": "2026"}) for noise in told(noisy(documents)).values())
    two = one.model_copy(update={"sigma": one.sigma + 1})
    doc = documents.sweep()
    first, second = (judge(doc.model_copy(update={"calibrations": known})) for known in ((one, two), (two, one, two)))
    assert first == second


def test_noise_that_rests_on_a_run_that_was_retracted_is_not_known(store: Store, clock: Clock, documents: Any) -> None:
    sweep_id, found = calibrated(store, clock, documents)
    clock.pass_s(1)
    after = put(store, documents.sweep(), "after")
    assert len(store.judge_input(after).calibrations) == len(found) > 0
    store.retract(store.judge_input(sweep_id).cells[0].runs[0].run_id, "the fan was blocked", "Ada")
    assert store.judge_input(after).calibrations == ()
