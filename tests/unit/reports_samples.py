"""Verdicts and judge inputs made in code for the tests of the reports: clean, broken, of many cells, or hostile."""

from __future__ import annotations

from typing import Any

from jobs.model import (
    Equation,
    KeyBytes,
    Missing,
    Reading,
    SeamRow,
    Stamp,
)
from jobs.verdict import (
    ArmView,
    CellVerdict,
    Finding,
    IdentityRow,
    InvariantRow,
    MetricRow,
    SetAside,
    TimeRow,
    Verdict,
    WitnessRow,
)

IDS = (7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33)
CELL = "smollm2/capital/weight_budget=50%"

WEIGHTS = 8_330_595_870
FLOOR = 1_191_045_340
LRU = 3_979_122_688
STABLE = 2_349_010_944

HOSTILE = (
    "bars | and || bars",
    "`one | bar in ticks`",
    "lone ` tick",
    "``` fence",
    "back\\slash | and \\| escaped bar \\",
    "new\nline\r\nand\ttab",
    "NUL \x00 and ESC \x1b[31m red",
    "@octocat and @org/team and a@example.com",
    "[text @octocat](https://example.com/x)",
    "#1 and octo/repo#2 and GH-3 and gh-4",
    "fixes #4, closes GH-5",
    "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<!-- --> --> <b>bold</b> </details></summary>",
    "javascript:alert(1) and www.example.com and https://example.com/?a=1&b=2",
    "\u2028line separator\u2029",
    "\u202eright to left\u202c \u200fmark",
    "\u05e9\u05dc\u05d5\u05dd hebrew",
    "x" * 300,
    "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 :tada: :+1:",
    "*bold* _it_ ~~gone~~ **b** __b__",
    "# heading",
    "- item",
    "1. item",
    "&amp; &lt; &#35;1 &copy;",
    "{{ 7 * 7 }} {% raw %}",
    "$x^2$ and $`y`$",
    "",
    " ",
)


def arm(name: str, role: str, policy: str, htod: int, bypass_bytes: int, bypass: int, **over: Any) -> ArmView:
    tokens = 16
    values: dict[str, Reading] = {
        "hits": 10_864,
        "hit_bytes": 7_870_916_608 * tokens - htod * tokens,
        "page_ins": 3_008,
        "htod_bytes": htod * tokens,
        "retained_page_ins": 3_008 - bypass,
        "retained_bytes": htod * tokens - bypass_bytes * tokens,
        "bypassed_page_ins": bypass,
        "bypassed_page_in_bytes": bypass_bytes * tokens,
        "htod_bytes_per_token": htod,
        "link_bytes_per_token": htod,
        "byte_hit_rate": 1 - htod / 7_870_916_608,
        "count_hit_rate": 10_864 / 13_872,
        "bypassed_byte_share": bypass_bytes / htod if htod else Missing(missing="nothing was copied"),
        "bypassed_count_share": bypass / 3_008,
        "floor_bytes_per_token": FLOOR,
        "floor_distance_bytes": htod - FLOOR,
        "floor_ratio": htod / FLOOR,
        "segments": 1,
        "seams": 0,
        "seam_nodes": 0,
        "captures": 2,
        "replays": 44,
        "fallbacks": 0,
        "invalidations": 0,
        "graph_nodes": 412,
        "step_kernels": 412,
    }
    facts: dict[str, int | float | str] = {
        "weight_bytes": WEIGHTS,
        "budget_bytes": 7_139_550_530,
        "capacity_bytes": 7_139_550_530,
        "floor_bytes_per_token": FLOOR,
        "measured_tokens": tokens,
        "plan_steps": 412,
        "profile": "h200-measured",
    }
    fields: dict[str, Any] = {
        "arm": name,
        "role": role,
        "source": "checkout",
        "commit": None,
        "engine_digest": "9f3c" * 16,
        "config": {"policy": policy},
        "runs_expected": 2,
        "runs_complete": 2,
        "values": values,
        "facts": facts,
        "top_keys": (
            KeyBytes(key="lm_head.weight_Q4", nbytes=389_283_840, bypassed=tokens),
            KeyBytes(key="layers.0.mlp.gate_proj", nbytes=48_660_480, hits=3, bypassed=tokens),
        ),
        "crossings": (100 * tokens, 1_000_000_000 * tokens),
        "card": "sim-h200",
        "uuid": "SIM-00000000-0000-0000-0000-000000000001",
        "certificates": {"clear": 2},
        "stop_reasons": {"length": 6},
    }
    return ArmView(**(fields | over))


def arms() -> tuple[ArmView, ...]:
    return (
        arm("base", "base", "lru", LRU, 0, 0),
        arm("null", "null", "lru", LRU, 0, 0),
        arm("head", "head", "stable", STABLE, 1_048_412_160, 336),
    )


def metric(name: str, unit: str, base: Reading, head: Reading, klass: str, **over: Any) -> MetricRow:
    known = not isinstance(base, Missing) and not isinstance(head, Missing)
    delta: Reading = head - base if known else Missing(missing="no comparison")  # type: ignore[operator]
    fields: dict[str, Any] = {
        "metric": name,
        "unit": unit,
        "direction": "lower",
        "gating": True,
        "base": base,
        "head": head,
        "delta": delta,
        "class": klass,
        "run_ids": ("run_01", "run_02"),
    }
    return MetricRow(**(fields | over))


def identical(left: str = "base", right: str = "head", what: str = "pair") -> IdentityRow:
    return IdentityRow.model_validate(
        {
            "class": "IDENTICAL",
            "left": left,
            "right": right,
            "what": what,
            "compared": 24,
            "common_prefix": 24,
            "left_length": 24,
            "right_length": 24,
            "left_stop": "length",
            "right_stop": "length",
            "run_ids": ("run_01", "run_02"),
        }
    )


def violation(**over: Any) -> IdentityRow:
    fields: dict[str, Any] = {
        "class": "VIOLATION",
        "left": "base",
        "right": "head",
        "what": "pair",
        "compared": 24,
        "common_prefix": 19,
        "left_length": 24,
        "right_length": 24,
        "left_stop": "length",
        "right_stop": "length",
        "first_difference": 19,
        "left_id": 216,
        "right_id": 46283,
        "left_gap": 0.0781,
        "right_gap": 2.5,
        "generation": 1,
        "left_context": IDS[15:23],
        "right_context": (*IDS[15:19], 46283, 1, 1, 1),
        "run_ids": ("run_01", "run_03"),
    }
    return IdentityRow.model_validate(fields | over)


def exact_rows() -> tuple[MetricRow, ...]:
    return (
        metric("htod_bytes", "bytes", LRU * 16, STABLE * 16, "improved"),
        metric("htod_bytes_per_token", "bytes/token", LRU, STABLE, "improved"),
        metric("segments", "count", 1, 1, "same"),
        metric("page_ins", "count", 5_952, 3_008, "neutral", gating=False, direction="neutral"),
        metric("floor_ratio", "ratio", 3.3408, 1.9722, "improved", gating=False),
        metric("vmm_calls_steady", "count", 0, 0, "same"),
        metric(
            "ring_waits", "count", Missing(missing="no ring"), Missing(missing="no ring"), "not_recorded", gating=False
        ),
    )


def cell(**over: Any) -> CellVerdict:
    fields: dict[str, Any] = {
        "cell": CELL,
        "outcome": "IMPROVED",
        "exit_code": 0,
        "model": "smollm2",
        "prompt": "capital",
        "arms": arms(),
        "identity": (identical(), identical("base", "null", "null"), identical("head gen 1", "head gen 3", "self")),
        "witnesses": (
            WitnessRow(expr="page_ins > 0", arm="base", holds=True, values={"page_ins": 3_008}),
            WitnessRow(expr="page_ins > 0", arm="head", holds=True, values={"page_ins": 3_008}),
            WitnessRow(expr="captures >= 1", arm="head", holds=True, values={"captures": 2}),
        ),
        "invariants": tuple(
            InvariantRow(
                name=name,
                arm=side,
                holds=True,
                checked=6,
                worst=Equation(name=name, text=text, relation="==", lhs=13_872, rhs=13_872, holds=True),
            )
            for name, text in (("W1", "hits + page_ins == touches"), ("W2", "page_ins == retained + bypassed + staged"))
            for side in ("base", "head")
        ),
        "exact": exact_rows(),
        "time": (
            TimeRow.model_validate(
                {
                    "metric": "decode_ms_per_token",
                    "unit": "ms/token",
                    "base_median": 61.2,
                    "head_median": 58.9,
                    "ratio": 0.9624,
                    "low": 0.93,
                    "high": 0.99,
                    "null_ratio": 1.004,
                    "blocks": 1,
                    "smallest_detectable": 0.041,
                    "class": "SAME",
                }
            ),
        ),
    }
    return CellVerdict(**(fields | over))


def stamp(**over: Any) -> Stamp:
    fields: dict[str, Any] = {
        "sweep_id": "swp_01JB2M3N4P5Q6R7S8T9V0W1X2Y",
        "request": 1,
        "harness_digest": "ab" * 32,
        "harness_version": "0.1.0",
        "base_source": "checkout",
        "head_source": "checkout",
        "created_at": "2026-11-29T10:00:00Z",
        "cards": ("SIM-00000000-0000-0000-0000-000000000001",),
    }
    return Stamp(**(fields | over))


def verdict(**over: Any) -> Verdict:
    fields: dict[str, Any] = {
        "sweep": "smollm2-residency",
        "outcome": "IMPROVED",
        "exit_code": 0,
        "headline": "Same tokens; head streams 41.0 % fewer bytes a token than base.",
        "next_step": "Nothing blocks: merge when the review agrees.",
        "cells": (cell(),),
        "blind_spots": (
            "Prompts, lengths and batch sizes that the sweep does not name.",
            "Time on a real card: the card here is simulated.",
        ),
        "cells_expected": 1,
        "cells_judged": 1,
        "varies": ("policy",),
        "gate": {"identity": "block", "exact": "block", "time": "advise"},
        "input_digest": "cd" * 32,
        "stamp": stamp(),
    }
    return Verdict(**(fields | over))


def broken() -> Verdict:
    """Head's tokens differ from generation 2 on, an exact counter rose, a seam appeared, an attempt was set aside."""
    causes = (*([("Split", "KernelCaptureUnsupported")] * 20), *([("Add", "ClassifierDisqualified")] * 10))
    seams = tuple(
        SeamRow(
            step=12 * place + 7,
            node=f"/model/layers.{place}/{operator}",
            op=f"ai.onnx::{operator}",
            reason=reason,
            path="eager-device-seam",
            detail="reads its sizes on the host, then waits for its stream",
        )
        for place, (operator, reason) in enumerate(causes)
    )
    sides = (
        arm("base", "base", "stable", STABLE, 1_048_412_160, 336),
        arm("null", "null", "stable", STABLE, 1_048_412_160, 336),
        arm("head", "head", "stable", LRU, 1_048_412_160, 336, seams=seams, runs_complete=1),
    )
    sides[2].values.update({"segments": 31, "seams": 30, "seam_nodes": 30, "fallbacks": 3})
    one = cell(
        outcome="VIOLATION",
        exit_code=1,
        arms=sides,
        identity=(
            violation(),
            identical("base", "null", "null"),
            violation(left="head gen 1", right="head gen 2", what="self"),
        ),
        witnesses=(WitnessRow(expr="bypassed_page_ins > 0", arm="head", holds=False, values={"bypassed_page_ins": 0}),),
        exact=(
            metric("htod_bytes_per_token", "bytes/token", STABLE, LRU, "regressed"),
            metric("segments", "count", 1, 31, "regressed"),
            metric("min_logit_margin", "logit", 0.051, Missing(missing="varies: 0.001 to 0.051"), "varies"),
        ),
        notes=("head's time is of different work, since its tokens differ",),
    )
    findings = (
        Finding(
            outcome="VIOLATION",
            cell=CELL,
            arm="head",
            message="head gives id 46283 where base gives 216, at index 19 of generation 2",
            remedy="look at what changed between generations: assay explain shows both lists",
            exit_code=1,
            gate="identity",
            run_ids=("run_01", "run_03"),
        ),
        Finding(
            outcome="REGRESSED",
            cell=CELL,
            message="htod_bytes_per_token rose by 1,630,111,744 bytes",
            remedy="find what streams that did not",
            exit_code=1,
            gate="exact",
        ),
        Finding(outcome="TIME_WORSE", cell=CELL, message="decode is 4 % slower", remedy="", exit_code=0, gate="time"),
    )
    return verdict(
        outcome="VIOLATION",
        exit_code=1,
        headline="Head's tokens differ from base's from generation 2 on.",
        next_step="Fix the tokens first: every other row compares different work.",
        findings=findings,
        cells=(one,),
        set_aside=(
            SetAside(
                cell=CELL,
                arm="head",
                run_id="run_04",
                attempt_id="att_04",
                state="contaminated",
                reason="pid 4242 held 2.1 GB on the card from second 3 to second 9",
            ),
        ),
    )


def many(count: int, name: str = "cell {}") -> Verdict:
    """`count` cells, each third one regressed."""
    cells = tuple(
        cell(cell=name.format(place))
        if place % 3
        else cell(
            cell=name.format(place),
            outcome="REGRESSED",
            exit_code=1,
            exact=(metric("htod_bytes", "bytes", 1_000 + place, 2_000 + 3 * place, "regressed"),),
        )
        for place in range(count)
    )
    bad = tuple(row for row in cells if row.exit_code)
    return verdict(
        outcome="REGRESSED",
        exit_code=1,
        cells=cells,
        cells_expected=count,
        cells_judged=count,
        findings=tuple(
            Finding(
                outcome="REGRESSED", cell=row.cell, message="htod_bytes rose", remedy="look", exit_code=1, gate="exact"
            )
            for row in bad
        ),
    )


def hostile(name: str) -> Verdict:
    """`name` wherever a user's or an engine's word may stand."""
    sides = (
        arm("base", "base", name, LRU, 0, 0, arm=name, source=name, commit=name, card=name, uuid=name),
        arm(
            "head",
            "head",
            name,
            STABLE,
            1_048_412_160,
            336,
            source=name,
            top_keys=(KeyBytes(key=name, nbytes=10**8, bypassed=3),),
        ),
    )
    seam = SeamRow(step=1, node=name, op=name, reason=name, path=name, detail=name)
    values = {**sides[1].values, "segments": 2, "seams": 1, "seam_nodes": 1}
    cut = sides[1].model_copy(update={"seams": (seam,), "values": values})
    one = cell(
        cell=name,
        model=name,
        prompt=name,
        outcome="VIOLATION",
        exit_code=1,
        arms=(sides[0], cut),
        identity=(violation(left=name, right=name, note=name), identical(name, name, "self")),
        witnesses=(
            WitnessRow(expr=name, arm=name, holds=False, values={name: Missing(missing=name)}),
            WitnessRow(expr=name, arm=name, holds=True, values={name: 1}),
        ),
        invariants=(
            InvariantRow(name=name, arm=name, holds=False, checked=1, note=name),
            InvariantRow(
                name=name,
                arm=name,
                holds=True,
                checked=1,
                worst=Equation(name=name, text=name, relation="==", lhs=1, rhs=1, holds=True),
            ),
        ),
        exact=(
            metric(name, "count", 1, 2, "regressed", note=name),
            metric(name, "bytes", Missing(missing=name), 2, "new", note=name),
        ),
        time=(
            TimeRow.model_validate(
                {
                    "metric": name,
                    "unit": "ms",
                    "base_median": 1.0,
                    "head_median": 2.0,
                    "ratio": 2.0,
                    "low": 1.5,
                    "high": 2.5,
                    "null_ratio": Missing(missing=name),
                    "blocks": 1,
                    "smallest_detectable": Missing(missing=name),
                    "class": "WORSE",
                    "note": name,
                }
            ),
        ),
        notes=(name,),
    )
    return verdict(
        sweep=name,
        outcome="VIOLATION",
        exit_code=1,
        headline=name,
        next_step=name,
        cells=(one, cell(cell=f"{name} two")),
        cells_expected=3,
        cells_judged=2,
        findings=(
            Finding(
                outcome="VIOLATION",
                cell=name,
                arm=name,
                message=name,
                remedy=name,
                exit_code=1,
                gate="identity",
                run_ids=(name,),
            ),
        ),
        set_aside=(SetAside(cell=name, arm=name, run_id=name, attempt_id=name, state=name, reason=name),),
        blind_spots=(name,),
        varies=(name,),
        gate={name: name},
        stamp=stamp(
            sweep_id=name, base_source=name, head_source=name, created_at=name, cards=(name,), harness_digest=name
        ),
    )
