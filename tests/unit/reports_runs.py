"""A judge's input made in code for the tests of the reports: four runs of one cell, one of them not as the others."""

from __future__ import annotations

from jobs import timeline
from jobs.model import (
    ArmPlan,
    AttemptFact,
    CellInput,
    CellPlan,
    Certificate,
    Generation,
    Interval,
    JudgeInput,
    KeyBytes,
    Manifest,
    RunFact,
    RunRecord,
    RunSettings,
)
from jobs.timeline import Timeline
from tests.unit.reports_samples import CELL, IDS, STABLE, WEIGHTS, stamp


def judge_input(log: str = "engine: loaded 211 keys\n", word: str = CELL) -> JudgeInput:
    """Two runs of two arms; head's second generation differs from index 19 on, and its first attempt was set aside."""
    plans = (
        ArmPlan(name="base", role="base", source="checkout", config={"policy": "lru"}),
        ArmPlan(name="head", role="head", source="checkout", python_path="/tmp/some tree", config={"policy": "stable"}),
    )
    plan = CellPlan(
        cell=word,
        model="smollm2",
        model_path="/models/smollm2; rm -rf x",
        model_digest="ef" * 32,
        prompt="capital",
        prompt_ids=(504, 3575, 282, 4649, 314),
        config={"weight_budget": "50%", "capture": True},
        settings=RunSettings(tokens=24, generations=2, ignore_eos=True),
        arms=("base", "head"),
    )
    runs = tuple(_run(place, name, log) for place, name in enumerate(("base", "head", "head", "base")))
    manifest = Manifest(name="smollm2-residency", arms=plans, cells=(plan,))
    return JudgeInput(
        manifest=manifest, manifest_digest=manifest.digest(), cells=(CellInput(plan=plan, runs=runs),), stamp=stamp()
    )


def along(place: int) -> Timeline:
    """Sixteen samples of a card in 3 s: run 1 slowed from 1.0 s to 1.2 s, and of its memory one sample was not told."""
    slowed = place == 1
    return Timeline(
        at_ms=tuple(range(0, 3_200, 200)),
        end_ms=3_000,
        samples_a_point=1,
        series={
            "sm_clock_mhz": (*([1_980] * 5), *([345] * 2 if slowed else [1_980] * 2), *([1_980] * 9)),
            "memory_clock_mhz": (3_201,) * 16,
            "used_bytes": (0, *([4 << 30] * 7), None if slowed else 4 << 30, *([6 << 30] * 7)),
            "utilisation_percent": (0, 0, 55, *([98] * 12), 0),
            "throttle_bits": (1, 1, *([0] * 3), *([0x44] * 2 if slowed else [0] * 2), *([0] * 9)),
        },
        warm_up_ms=(500, 900),
        timed_ms=(900, 2_700),
    )


def _run(place: int, name: str, log: str) -> RunFact:
    changed = (*IDS[:19], 46283, 1, 1, 1, 1)
    generations = tuple(
        Generation(
            index=index,
            warmup=False,
            ids=changed if name == "head" and index else IDS,
            stop_reason="length",
            gaps=(0.5,) * 24,
            counters={"prefill": {"page_ins": 210}, "decode": {"page_ins": 94 + place}},
            prefill_ns=240_000_000,
            step_ns=tuple(60_000_000 + 1_000_003 * ((step * 7 + place) % 11) for step in range(23)),
        )
        for index in range(2)
    )
    record = RunRecord(
        run_id=f"run_0{place}",
        attempt_id=f"att_0{place}",
        attempt_number=1,
        exit_code=0,
        engine_digest="9f" * 32,
        module_path="/checkout/engine/__init__.py",
        model_digest="ef" * 32,
        effective_config={
            "policy": {"value": "lru", "source": "request"},
            "granule": {"value": 4096, "source": "default"},
            "capture": {"value": True, "source": "derived", "reason": "nothing stood against it"},
        },
        device={"kind": "sim", "name": "sim-h200", "uuid": "SIM-1", "granule_bytes": 4096},
        generations=generations,
        counters={"page_ins": 3_008, "htod_bytes": 2**53 + 1},
        metrics={"byte_hit_rate": 0.7016, "htod_bytes_per_token": STABLE},
        facts={"weight_bytes": WEIGHTS},
        keys=(
            KeyBytes(key="norm", nbytes=5_000, hits=16),
            KeyBytes(key="head", nbytes=1_000_000, hits=2, retained=1, bypassed=13, evicted=1),
            KeyBytes(key="never read", nbytes=77),
            KeyBytes(key="table", nbytes=9_000_000, gathered_bytes=4_096),
        ),
        certificate=Certificate(
            uuid="SIM-1",
            card="sim-h200",
            driver="sim 1",
            verdict="clear",
            grade="scripted",
            before={"used_bytes": 0},
            after={"used_bytes": 0},
            samples=4,
            during={"throttle_bits": 0, timeline.FIELD: along(place).model_dump(mode="json")},
            intervals=(Interval(start_s=2.5, end_s=4.0, what="process 4242", pid=4242),) if place == 2 else (),
        ),
        peak_rss_bytes=812_000_000,
        started_at=f"2026-11-29T10:0{place}:00Z",
        ended_at=f"2026-11-29T10:0{place}:30Z",
        log_tail=log,
    )
    attempts: tuple[AttemptFact, ...] = (AttemptFact(attempt_id=f"att_0{place}", number=1, state="measured"),)
    if place == 1:
        dirty = AttemptFact(attempt_id="att_x", number=0, state="contaminated", reason="pid 4242 came up")
        attempts = (dirty, *attempts)
    return RunFact(
        run_id=f"run_0{place}",
        block_id="blk_0",
        block=0,
        position=place,
        arm=name,
        state="complete",
        attempts=attempts,
        record=record,
    )
