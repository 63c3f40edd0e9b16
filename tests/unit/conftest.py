"""Synthetic judge inputs: a sweep of one cell in which each arm follows a script, with counters that close."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jobs.metrics import derive
from jobs.model import (
    ArmPlan,
    ArmRole,
    AttemptFact,
    CellInput,
    CellPlan,
    Certificate,
    Equation,
    Generation,
    JudgeInput,
    KeyBytes,
    Manifest,
    Missing,
    RunFact,
    RunRecord,
    RunSettings,
    SeamRow,
    Stamp,
    Witness,
)
from jobs.order import run_order

IDS = (
    7042,
    30,
    198,
    198,
    504,
    2988,
    314,
    42,
    216,
    34,
    32,
    33,
    40,
    29,
    32,
    33,
    29,
    34,
    34,
    216,
    33,
    34,
    42,
    33,
    34,
    42,
    37,
    35,
    30,
    2,
    198,
    1,
)
"""SmolLM2-135M after "The capital of France is": 32 greedy ids in fp32, the end id ignored."""

KEYS, WEIGHT_BYTES, CAPACITY_BYTES = 211, 84_934_656, 41_943_040
WATCHED: Mapping[str, Any] = {"before": {"used_bytes": 0}, "after": {"used_bytes": 0}, "samples": 3}
"""What a certificate holds beside its word: it was looked before, during and after."""
LEDGER = ("ref_underflows", "unaccounted_bytes", "quarantined_bytes", "oversubscribed_bytes")
STEADY = ("fallbacks", "vmm_calls_steady", "alloc_calls_steady")


def lru_counters(steps: int) -> dict[str, int | float]:
    """A pure cyclic scan under LRU: nothing is ever hit."""
    return _counters(steps, hits=0, hit_bytes=0, bypassed=0, bypassed_bytes=0, evictions=KEYS * steps)


def stable_counters(steps: int) -> dict[str, int | float]:
    """What fits stays: 90 keys of 36 MB are hit in each step."""
    return _counters(
        steps, hits=90 * steps, hit_bytes=36_000_000 * steps, bypassed=11 * steps, bypassed_bytes=9_000_000 * steps
    )


def resident_counters(steps: int) -> dict[str, int | float]:
    """A path that never streams."""
    return _counters(steps, hits=KEYS * steps, hit_bytes=WEIGHT_BYTES * steps, bypassed=0, bypassed_bytes=0)


def _counters(
    steps: int, *, hits: int, hit_bytes: int, bypassed: int, bypassed_bytes: int, evictions: int = 0
) -> dict[str, int | float]:
    touches, htod = KEYS * steps, WEIGHT_BYTES * steps - hit_bytes
    page_ins = touches - hits
    return {
        "touches": touches,
        "hits": hits,
        "hit_bytes": hit_bytes,
        "page_ins": page_ins,
        "retained_page_ins": page_ins - bypassed,
        "retained_bytes": htod - bypassed_bytes,
        "bypassed_page_ins": bypassed,
        "bypassed_page_in_bytes": bypassed_bytes,
        "staged_page_ins": 0,
        "staged_bytes": 0,
        "htod_bytes": htod,
        "device_htod_bytes": htod,
        "evictions": evictions,
        "segments": 1,
        "step_kernels": 640,
        "captures": steps // 32,
        "replays": steps - steps // 32,
        "host_syncs": steps,
        "peak_resident_bytes": 41_000_000,
        "peak_committed_bytes": CAPACITY_BYTES + 4_194_304,
        **dict.fromkeys(LEDGER + STEADY, 0),
    }


@dataclass(frozen=True)
class Script:
    """What one arm does. `ids` and `stop` by (run number from 0, generation index)."""

    counters: Callable[[int], Mapping[str, int | float]] = lru_counters
    changes: Mapping[str, Any] = field(default_factory=dict)  # counters that differ from `counters`
    by_run: Callable[[int], Mapping[str, Any]] = lambda _run: {}  # the same, run by run
    ids: Callable[[int, int], tuple[int, ...]] = lambda _run, _generation: IDS
    stop: Callable[[int, int], str | None] = lambda _run, _generation: "length"
    gap: float = 0.5
    step_ns: Callable[[int, int], int] = lambda _block, _run: 20_000_000
    config: Mapping[str, Any] = field(default_factory=lambda: {"policy": "lru"})
    effective: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)  # fields of RunRecord that differ
    fact: Mapping[str, Any] = field(default_factory=dict)  # fields of RunFact that differ
    plan: Mapping[str, Any] = field(default_factory=dict)  # fields of ArmPlan that differ
    equations: tuple[Equation, ...] = ()
    emitted: int | None = None
    phases: Callable[[int], Mapping[str, Mapping[str, int]]] = lambda _generation: {}  # counters of a generation


STABLE = Script(counters=stable_counters, config={"policy": "stable"})


class Documents:
    """Builds documents; `cell` and `manifest` keywords change the plan."""

    IDS = IDS
    WATCHED = WATCHED
    lru, stable, resident = staticmethod(lru_counters), staticmethod(stable_counters), staticmethod(resident_counters)

    def arm(self, **changes: Any) -> Script:
        """An arm under lru."""
        return Script(**changes)

    def stable_arm(self, **changes: Any) -> Script:
        """An arm under stable."""
        return replace(STABLE, **changes)

    def sweep(
        self,
        *,
        base: Script | None = None,
        head: Script | None = None,
        null: Script | None = None,
        others: Mapping[str, Script] | None = None,
        cell: Mapping[str, Any] | None = None,
        **manifest: Any,
    ) -> JudgeInput:
        """A sweep of one cell: base under lru, its null, head under stable, unless told otherwise."""
        base = base or Script()
        scripts = {"base": base, "null": null or base, "head": head or STABLE, **(others or {})}
        plan = self.plan(tuple(scripts), **(cell or {}))
        arms = tuple(_arm(name, script) for name, script in scripts.items())
        asked = Manifest(**{"name": "residency", "arms": arms, "cells": (plan,), "varies": ("policy",), **manifest})
        runs = tuple(run for block in range(plan.blocks) for run in _block(plan, scripts, block))
        return JudgeInput(
            manifest=asked,
            manifest_digest=asked.digest(),
            cells=(CellInput(plan=plan, runs=runs),),
            stamp=Stamp(sweep_id="swp_1", harness_digest="h" * 64, harness_version="0.1.0"),
        )

    def plan(self, arms: tuple[str, ...], **changes: Any) -> CellPlan:
        """The cell: 32 tokens, three generations, one witness that bytes stream."""
        fields: dict[str, Any] = {
            "cell": "smollm2/capital/weight_budget=50%",
            "model": "smollm2",
            "model_path": "/models/smollm2",
            "model_digest": "m" * 64,
            "prompt": "capital",
            "prompt_ids": (504, 3575, 282, 4649, 314),
            "config": {"weight_budget": "50%"},
            "settings": RunSettings(tokens=32, generations=3, ignore_eos=True),
            "arms": arms,
            "witnesses": (Witness(expr="page_ins > 0"),),
        }
        return CellPlan(**{**fields, **changes})

    def replace_runs(self, doc: JudgeInput, change: Callable[[RunFact], RunFact | None]) -> JudgeInput:
        """The document with every run changed, or left out where `change` gives None."""
        cells = tuple(
            cell.model_copy(update={"runs": tuple(new for run in cell.runs if (new := change(run)) is not None)})
            for cell in doc.cells
        )
        return doc.model_copy(update={"cells": cells})

    def lost(self, state: str, reason: str = "", tries: int = 3) -> dict[str, Any]:
        """Fields of a run that never came to a record: `tries` attempts that ended in `state`."""
        attempts = tuple(
            AttemptFact.model_validate({"attempt_id": f"att_x{n}", "number": n, "state": state, "reason": reason})
            for n in range(1, tries + 1)
        )
        return {"state": "exhausted", "attempts": attempts, "record": None}


def _arm(name: str, script: Script) -> ArmPlan:
    roles: dict[str, ArmRole] = {"base": "base", "head": "head", "null": "null"}
    fields: dict[str, Any] = {
        "name": name,
        "role": roles.get(name, "variant"),
        "source": "checkout",
        "tree_digest": "e" * 64,
        "config": dict(script.config),
    }
    return ArmPlan(**{**fields, **script.plan})


def _block(plan: CellPlan, scripts: Mapping[str, Script], block: int) -> list[RunFact]:
    runs, seen = [], dict.fromkeys(scripts, 0)
    for position, name in enumerate(run_order(plan, block)):
        number = seen[name]
        seen[name] += 1
        script = scripts[name]
        run_id = f"run_{block}_{position}_{name}"
        record = _record(plan, script, run_id, block, number)
        fields: dict[str, Any] = {
            "run_id": run_id,
            "block_id": f"blk_{block}",
            "block": block,
            "position": position,
            "arm": name,
            "state": "complete",
            "attempts": (AttemptFact(attempt_id=record.attempt_id, number=1, state="measured"),),
            "record": record,
        }
        runs.append(RunFact(**{**fields, **script.fact}))
    return runs


def _record(plan: CellPlan, script: Script, run_id: str, block: int, number: int) -> RunRecord:
    generations = tuple(_generations(plan, script, block, number))
    measured = [generation for generation in generations if not generation.warmup]
    steps = sum(len(generation.ids) for generation in measured)
    emitted = steps if script.emitted is None else script.emitted
    asked: dict[str, Any] = {**script.counters(steps), "emitted_tokens": emitted}
    asked.update({**script.changes, **script.by_run(number)})
    counters = {name: value for name, value in asked.items() if value is not None}  # None: not recorded
    facts = {
        "weight_bytes": WEIGHT_BYTES,
        "capacity_bytes": CAPACITY_BYTES,
        "budget_bytes": WEIGHT_BYTES // 2,
        "keys": KEYS,
        "floor_bytes_per_token": WEIGHT_BYTES - CAPACITY_BYTES,
    }
    device = {"kind": "sim", "name": "sim-h200", "uuid": "SIM-0", "driver": "sim 1", "granule_bytes": 2_097_152}
    device.update(script.device)
    effective = {**plan.config, **script.config, "capture": True, **script.effective}
    fields: dict[str, Any] = {
        "run_id": run_id,
        "attempt_id": f"att_{run_id}",
        "attempt_number": 1,
        "exit_code": 0,
        "engine_digest": "e" * 64,
        "module_path": "/trees/e/engine/__init__.py",
        "model_digest": plan.model_digest,
        "effective_config": {name: {"value": value, "source": "request"} for name, value in effective.items()},
        "device": device,
        "generations": generations,
        "counters": counters,
        "metrics": derive(counters, facts, generations),
        "facts": facts,
        "seams": (SeamRow(step=3, node="/lm_head", op="MatMul", reason="host_read", path="eager"),),
        "keys": (KeyBytes(key="layer.0.up", nbytes=1_000_000, retained=2, bypassed=3),),
        "equations": script.equations or (_w1(counters),),
        "certificate": Certificate(
            uuid=str(device["uuid"]), card="sim-h200", driver="sim 1", verdict="clear", grade="scripted", **WATCHED
        ),
    }
    return RunRecord(**{**fields, **script.record})


def _generations(plan: CellPlan, script: Script, block: int, number: int) -> list[Generation]:
    settings = plan.settings
    return [
        Generation.model_validate(
            {
                "index": index,
                "warmup": index < settings.warmups,
                "ids": script.ids(number, index),
                "stop_reason": script.stop(number, index),
                "gaps": (script.gap,) * len(script.ids(number, index)),
                "prefill_ns": 90_000_000,
                "step_ns": (script.step_ns(block, number),) * max(0, len(script.ids(number, index)) - 1),
                "counters": script.phases(index),
            }
        )
        for index in range(settings.warmups + settings.generations)
    ]


def _w1(counters: Mapping[str, Any]) -> Equation:
    lhs, rhs = (
        0 if isinstance(value, Missing) or value is None else value
        for value in (counters.get("page_ins"), counters.get("touches"))
    )
    return Equation(name="W1", text="page_ins <= touches", relation="<=", lhs=lhs, rhs=rhs, holds=True)


@pytest.fixture(scope="session")
def documents() -> Documents:
    """The builder of synthetic judge inputs."""
    return Documents()
