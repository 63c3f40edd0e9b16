"""Field reports on comparisons and gates, held against the judge, the store and the reports; each with its mirror."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs import stats
from jobs.adapters import native
from jobs.baselines import merge_base
from jobs.errors import RefError
from jobs.git_trees import resolve_ref
from jobs.judge import judge
from jobs.model import ArmPlan, Certificate, Gate, JudgeInput, RunFact
from jobs.store import Store
from jobs.verdict import TimeRow, Verdict
from orchestrator.conclude import judge_sweep
from reports.render import render
from tests.unit.store_sweeps import Clock
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)

FORMS = ("comment", "html", "json", "text")
STEP_NS = 20_000_000


def judged(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def times(verdict: Verdict) -> dict[str, TimeRow]:
    return {row.metric: row for row in verdict.cells[0].time}


def wave(block: int, run: int) -> float:
    """Noise of about a percent that repeats and hangs on block and run alone."""
    return 1 + 0.01 * (((block * 7 + run * 13) % 11) - 5) / 5


# ---- 20: zero, absent, not a number ------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["base", "head"])
@pytest.mark.parametrize("figure", [float("nan"), float("inf"), float("-inf")])
def test_field_20_no_such_figure_reaches_store_or_report(store: Store, documents: Any, arm: str, figure: float) -> None:
    broken = documents.arm(changes={"htod_bytes": figure}, config={"policy": "lru" if arm == "base" else "stable"})
    sweep_id = put(store, documents.sweep(**{arm: broken, **({"null": documents.arm()} if arm == "base" else {})}))
    verdict = judge_sweep(store, sweep_id)
    assert verdict.exit_code in (1, 3) and verdict.outcome in ("BROKEN_INVARIANT", "MISSING")
    document = render(verdict, "json")
    json.loads(document, parse_constant=lambda word: pytest.fail(f"{word} in the document"))
    row = next(row for row in verdict.cells[0].exact if row.metric == "htod_bytes")
    assert row.klass == "not_recorded" or row.klass == "varies"


# ---- 21: which way is better -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "klass", "outcome"), [(1 / 1.2, "BETTER", "IMPROVED"), (1.2, "WORSE", "TIME_WORSE")]
)
def test_field_21_a_rate_and_a_time_of_one_change_agree(
    documents: Any, factor: float, klass: str, outcome: str
) -> None:
    """Tokens a second up by a fifth and time a token down by a sixth are one gain; reversed they are one loss."""
    head = documents.stable_arm(step_ns=lambda block, run: round(STEP_NS * factor * wave(block, run)))
    base = documents.arm(step_ns=lambda block, run: round(STEP_NS * wave(block, run + 1)))
    verdict = judged(documents.sweep(base=base, head=head, cell={"blocks": 24}, gate=Gate(time="block")))
    rows = times(verdict)
    assert (rows["decode_ms_per_token"].klass, rows["tokens_per_s"].klass) == (klass, klass)
    assert verdict.outcome == outcome


# ---- 23 and 25: a base that is not there, or comes later ---------------------------------------------------------


@pytest.mark.parametrize("arm", ["base", "head"])
def test_field_23_an_arm_whose_runs_all_failed_leaves_no_pass_under_any_gate(documents: Any, arm: str) -> None:
    lost = documents.lost("failed", "out_of_memory: no room")
    script = documents.arm(fact=lost) if arm == "base" else documents.stable_arm(fact=lost)
    for gate, codes in ((Gate(), (1, 3)), (Gate(identity="advise", exact="advise", time="advise"), (0,))):
        verdict = judged(documents.sweep(**{arm: script}, gate=gate))
        assert verdict.exit_code in codes
        assert verdict.outcome in ("MISSING", "REGRESSED"), "its name never reads as green"
        assert "no room" in verdict.headline


def test_field_25_a_head_measured_before_its_base_is_open_until_base_arrives(
    store: Store, clock: Clock, documents: Any
) -> None:
    """The verdict that then is made speaks in the first one's place, under the same sweep."""
    doc = documents.sweep(null=None)
    heads = documents.replace_runs(doc, lambda run: run if run.arm == "head" else None)
    sweep_id = put(store, heads)
    first = judge_sweep(store, sweep_id)
    assert (first.outcome, first.exit_code) == ("MISSING", 3)
    assert "base" in first.headline and store.sweep(sweep_id).state == "open"
    clock.pass_s(600)
    put(store, doc)
    second = judge_sweep(store, sweep_id)
    assert (second.outcome, second.exit_code, store.sweep(sweep_id).state) == ("IMPROVED", 0, "judged")
    assert store.verdict(sweep_id) == second
    assert render(first, "comment").splitlines()[0] == render(second, "comment").splitlines()[0], "one comment"


def test_field_25_a_base_that_was_pushed_away_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    gone = repository(tmp_path)
    with pytest.raises(RefError, match=f"no such git ref: '{gone}'"):
        resolve_ref(tmp_path, gone)


# ---- 27: other hardware ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["base", "head"])
@pytest.mark.parametrize(
    ("device", "names"),
    [({"uuid": "GPU-Y"}, "GPU-Y"), ({"driver": "sim 2"}, "sim 2"), ({"uuid": "GPU-Y", "driver": "sim 2"}, "GPU-Y")],
)
def test_field_27_arms_on_another_card_or_driver_are_not_comparable(
    documents: Any, arm: str, device: dict[str, str], names: str
) -> None:
    script = documents.arm(device=device) if arm == "base" else documents.stable_arm(device=device)
    null = {"null": documents.arm(device=device)} if arm == "base" else {}
    verdict = judged(documents.sweep(**{arm: script}, **null))
    assert verdict.exit_code == 3
    assert "NOT_COMPARABLE" in {one.outcome for one in verdict.findings}
    assert any(names in one.message for one in verdict.findings)
    assert not any(row.klass in ("improved", "regressed") for row in verdict.cells[0].exact)


@pytest.mark.parametrize("slowed", ["base", "head"])
def test_field_27_heat_in_one_arm_alone_takes_its_times_and_warns(documents: Any, slowed: str) -> None:
    hot = Certificate(uuid="SIM-0", card="c", driver="d", verdict="throttled", grade="pids", **documents.WATCHED)

    def change(run: RunFact) -> RunFact:
        assert run.record is not None
        record = run.record.model_copy(update={"certificate": hot})
        return run.model_copy(update={"record": record}) if run.arm == slowed else run

    slow = {"step_ns": lambda _block, _run: 2 * STEP_NS}
    script = documents.arm(**slow) if slowed == "base" else documents.stable_arm(**slow)
    doc = documents.sweep(**{slowed: script}, null=documents.arm(), cell={"blocks": 24}, gate=Gate(time="block"))
    verdict = judged(documents.replace_runs(doc, change))
    assert times(verdict)["decode_ms_per_token"].klass == "THROTTLED_OUT"
    assert verdict.outcome != "TIME_WORSE" and verdict.exit_code == 3
    assert any("Unequal loss" in warning for warning in verdict.warnings)


# ---- 28: rows, not their mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("worse", "outcome", "code"), [(4, "REGRESSED", 1), (0, "IMPROVED", 0)])
def test_field_28_headline_table_code_and_forms_never_disagree(
    documents: Any, worse: int, outcome: str, code: int
) -> None:
    """Of the counters that gate five are far better, and four worse or as they were."""
    better = {"htod_bytes": None, "segments": 2, "fallbacks": 0, "host_syncs": 1, "step_kernels": 100}
    steady = {"vmm_calls_steady": 1, "alloc_calls_steady": 1, "peak_committed_bytes": 99, "peak_resident_bytes": 99}
    base = documents.arm(changes={"segments": 9, "fallbacks": 9, "host_syncs": 9, "step_kernels": 900, **steady})
    changes = {name: value for name, value in better.items() if value is not None}
    moved = dict(list(steady.items())[:worse])
    head = documents.stable_arm(changes={**changes, **steady, **{name: value + 30 for name, value in moved.items()}})
    verdict = judged(documents.sweep(base=base, head=head))
    classes = [row.klass for row in verdict.cells[0].exact if row.gating]
    assert (classes.count("improved"), classes.count("regressed")) == (5, worse)
    assert (verdict.outcome, verdict.exit_code, verdict.cells[0].outcome) == (outcome, code, outcome)
    for form in FORMS:
        text = render(verdict, form)  # type: ignore[arg-type]
        assert outcome in text
        assert not (code and "IMPROVED" in text), form


# ---- 29: false alarms --------------------------------------------------------------------------------------------


def test_field_29_one_commit_twenty_times_raises_no_flag_and_the_rate_is_printed(documents: Any) -> None:
    """Twenty sweeps of seventeen cells with three times each; the rate itself is simulated in `benchmarks`."""
    for seed in range(20):

        def step(block: int, run: int, seed: int = seed) -> int:
            return round(STEP_NS * wave(block * 3 + seed, run + seed * 5) * (1 + 0.05 * block / 24))

        arm = documents.arm(step_ns=step)
        verdict = judged(documents.sweep(base=arm, head=documents.arm(step_ns=lambda b, r: step(b, r + 3)),
                                         cell={"blocks": 24}, varies=()))  # fmt: skip
        assert not {row.klass for row in verdict.cells[0].time} & {"WORSE", "BETTER"}, seed
    assert verdict.time_false_alarms == stats.FALSE_ALARMS <= 0.01
    for form in ("comment", "html", "text"):
        assert "of sweeps without a change, 1 % at most" in " ".join(render(verdict, form).split())


@pytest.mark.parametrize("arm", ["base", "head"])
def test_field_29_one_run_that_is_twice_as_slow_in_all_its_times_is_no_finding(documents: Any, arm: str) -> None:
    def step(block: int, run: int) -> int:
        return round(STEP_NS * wave(block, run) * (2 if (block, run % 2) == (11, 0) else 1))

    scripts = {"base": documents.arm(step_ns=lambda b, r: round(STEP_NS * wave(b, r))), "head": documents.stable_arm(
        step_ns=lambda b, r: round(STEP_NS * wave(b, r + 1)))}  # fmt: skip
    scripts[arm] = documents.arm(step_ns=step) if arm == "base" else documents.stable_arm(step_ns=step)
    verdict = judged(documents.sweep(**scripts, cell={"blocks": 24}, gate=Gate(time="block")))
    assert not {row.klass for row in verdict.cells[0].time} & {"WORSE", "BETTER"}


def test_field_29_a_slow_host_that_slows_both_arms_is_no_change_and_a_slow_head_is_one(documents: Any) -> None:
    def step(factor: float) -> Any:
        return lambda block, run: round(STEP_NS * factor * wave(block, run) * (2 if block >= 12 else 1))

    both = judged(documents.sweep(base=documents.arm(step_ns=step(1)), head=documents.stable_arm(step_ns=step(1)),
                                  cell={"blocks": 24}))  # fmt: skip
    assert times(both)["decode_ms_per_token"].klass == "SAME"
    head = judged(documents.sweep(base=documents.arm(step_ns=step(1)), head=documents.stable_arm(step_ns=step(2)),
                                  cell={"blocks": 24}))  # fmt: skip
    assert times(head)["decode_ms_per_token"].klass == "WORSE"


def test_field_29_what_only_the_screen_shows_needs_fresh_blocks_to_confirm(documents: Any) -> None:
    def head(block: int, run: int) -> int:
        return round(STEP_NS * wave(block, run) * (1.5 if block < 8 else 1))

    doc = documents.sweep(
        base=documents.arm(step_ns=lambda b, r: round(STEP_NS * wave(b, r))),
        head=documents.stable_arm(step_ns=head),
        cell={"blocks": 24},
    )
    assert times(judged(doc))["decode_ms_per_token"].klass != "WORSE"


# ---- 30: commits that git has forgotten --------------------------------------------------------------------------


def test_field_30_a_sweep_of_commits_that_git_lost_still_reports_with_nothing_dropped(
    store: Store, documents: Any, tmp_path: Path
) -> None:
    gone = repository(tmp_path)
    doc = documents.sweep()
    arms = tuple(arm.model_copy(update={"source": "git:topic", "commit": gone}) for arm in doc.manifest.arms)
    sweep_id = put(store, doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"arms": arms})}))
    verdict = judge_sweep(store, sweep_id)
    assert verdict.exit_code == 0
    assert [row.id for row in store.sweeps()] == [sweep_id]
    for form in FORMS:
        assert gone[:7] in render(verdict, form).replace("<wbr>", "")  # type: ignore[arg-type]
    with pytest.raises(RefError):  # and nothing new can be run on it
        resolve_ref(tmp_path, "topic")


def test_field_30_a_lost_commit_drops_no_point_of_a_series_and_one_that_is_there_still_serves(
    store: Store, clock: Clock, documents: Any, tmp_path: Path
) -> None:
    gone = repository(tmp_path)
    kept = resolve_ref(tmp_path, "main")
    sweeps = []
    for commit, ref in ((gone, "topic"), (kept, "main")):
        doc = documents.sweep()
        arms = tuple(arm.model_copy(update={"source": f"git:{ref}", "commit": commit}) for arm in doc.manifest.arms)
        sweeps.append(put(store, doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"arms": arms})})))
        assert judge_sweep(store, sweeps[-1]).exit_code == 0
        clock.pass_s(1)
    series = [one for one in store.histories("htod_bytes") if any(point.arm == "head" for point in one.points)]
    assert [[point.sweep for point in one.points if point.arm == "head"] for one in series] == [sweeps]
    assert not any(point.struck for one in series for point in one.points)
    assert merge_base(tmp_path, "main", program=True).commit == kept, "what git lost is nobody's baseline"


# ---- 31: posting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2])
def test_field_31_the_verdict_stands_in_the_store_before_any_text_of_it_is_made(
    store: Store, documents: Any, segments: int
) -> None:
    """So no post that fails can change it, and its text can be had again at any time."""
    sweep_id = put(store, documents.sweep(head=documents.stable_arm(changes={"segments": segments})))
    verdict = judge_sweep(store, sweep_id)
    assert store.outcomes([sweep_id]) == {sweep_id: (verdict.outcome, verdict.exit_code)}
    assert verdict.exit_code == segments - 1
    again = store.verdict(sweep_id)
    assert again is not None and render(again, "comment") == render(verdict, "comment")


def test_field_31_no_token_and_no_store_reaches_an_engine() -> None:
    """What a runner's host holds does not pass; only what the sweep file itself gives an arm does."""
    names = ("GITHUB_TOKEN", "GH_TOKEN", "ACTIONS_RUNTIME_TOKEN", "ASSAY_STORE", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY")
    held = {**dict.fromkeys(names, "x"), "PATH": "/bin"}
    arm = ArmPlan(name="head", role="head", source="checkout", env={"OPENBLAS_CORETYPE": "HASWELL"})
    given = native.child_environment(arm, held)
    assert not set(names) & set(given)
    assert (given["PATH"], given["OPENBLAS_CORETYPE"]) == ("/bin", "HASWELL")


def repository(folder: Path) -> str:
    """A repository from which a branch was deleted and pruned; the commit that it had."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True,
                              env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull})  # fmt: skip
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "first")
    git("checkout", "-q", "-b", "topic")
    git("commit", "-q", "--allow-empty", "-m", "lost")
    gone = git("rev-parse", "HEAD")
    git("checkout", "-q", "main")
    git("branch", "-q", "-D", "topic")
    git("reflog", "expire", "--expire=now", "--all")
    git("gc", "-q", "--prune=now")
    return gone
