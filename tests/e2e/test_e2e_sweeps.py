"""The shipped sweeps at the size for hosts: each runs through the whole product, and its verdict says what it should.

Plans of all sizes: tests/unit/test_jobs_spec_sizes.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def swept(folder: Path, name: str, exit_code: int = 0) -> dict[str, Any]:
    """The verdict of a sweep file as it stands."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    file = name if name.endswith(".yaml") else f"sweeps/{name}.yaml"
    words = ("run", file, "--json", "--store", f"{folder}/s.db", "--out", str(folder / "out"))
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *words],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert done.returncode == exit_code, done.stdout + done.stderr
    verdict: dict[str, Any] = json.loads(Path(json.loads(done.stdout)["verdict"]).read_text())
    assert all(row["holds"] for cell in verdict["cells"] for row in cell["witnesses"])
    assert all(row["holds"] for cell in verdict["cells"] for row in cell["invariants"])
    return verdict


def values(cell: dict[str, Any], name: str) -> dict[str, Any]:
    """A counter or metric by arm."""
    return {arm["arm"]: arm["values"][name] for arm in cell["arms"]}


def tokens(cell: dict[str, Any]) -> dict[str, str]:
    """How each arm's tokens stand to base's."""
    return {row["right"]: row["class"] for row in cell["identity"] if row["left"] == "base" != row["right"]}


def test_residency_finds_the_planted_defect_alone_and_what_closes_the_gap(tmp_path: Path) -> None:
    verdict = swept(tmp_path, "residency", exit_code=1)
    assert {(found["outcome"], found["arm"]) for found in verdict["findings"]} == {("VIOLATION", "planted")}
    assert len(verdict["findings"]) == len(verdict["cells"]) == 6
    assert all("1 is equal" in found["message"] for found in verdict["findings"]), "wrong from the second one on"
    for cell in verdict["cells"]:
        assert {arm: klass for arm, klass in tokens(cell).items() if arm != "planted"} == dict.fromkeys(
            ("lru", "size_first", "zero_copy", "head"), "IDENTICAL"
        )
        link, left_over = values(cell, "link_bytes_per_token"), values(cell, "over_floor_unfilled_bytes")
        ordered = [link["zero_copy"], max(link["head"], link["size_first"]), link["base"], link["lru"]]
        assert ordered == sorted(set(ordered))
        assert link["lru"] == values(cell, "requested_bytes_per_step")["lru"], "a scan through lru hits nothing"
        assert left_over["base"] > 10 * left_over["head"], "room that the head's matrix does not fit into"
        (base,) = [arm for arm in cell["arms"] if arm["arm"] == "base"]
        assert base["top_keys"][0]["key"] == "lm_head.MatMul.weight_Q4" and base["top_keys"][0]["bypassed"]
        captured = "capture=on" in cell["cell"]
        segments = values(cell, "segments")
        assert (
            (segments["base"] > 1 and segments["head"] == segments["zero_copy"] == 1)
            if captured
            else not any(segments.values())
        )
    cold, steady = (
        values(cell, "link_bytes_per_token")["base"]
        for cell in verdict["cells"]
        if "capture=on" in cell["cell"] and not cell["cell"].endswith("warmups=2")
    )
    assert cold > steady, "the first fill"


def test_capture_takes_the_seams_away_cause_by_cause(tmp_path: Path) -> None:
    verdict = swept(tmp_path, "capture")
    assert verdict["outcome"] == "IMPROVED" and not verdict["findings"]
    plain, fused = verdict["cells"]
    assert list(values(plain, "segments").values()) == [15, 13, 7, 1]
    assert list(values(fused, "segments").values()) == [9, 7, 7, 1]
    seams = {arm["arm"]: [seam["op"].partition("::")[2] for seam in arm["seams"]] for arm in plain["arms"]}
    assert {arm: set(ops) for arm, ops in seams.items()} == {
        "base": {"Split", "LpNormalization", "LinearAttention"},
        "split": {"LpNormalization", "LinearAttention"},
        "pointwise": {"LinearAttention"},
        "head": set(),
    }
    for cell in verdict["cells"]:
        assert tokens(cell) == dict.fromkeys(("split", "pointwise", "head"), "IDENTICAL")


def test_addresses_hold_under_a_graph(tmp_path: Path) -> None:
    verdict = swept(tmp_path, "addresses")
    assert (verdict["outcome"], len(verdict["cells"])) == ("PASS", 6)
    for cell in verdict["cells"]:
        assert tokens(cell) == {"head": "IDENTICAL"}
        moves = "kv_layout=head-major" in cell["cell"]
        assert bool(values(cell, "vmm_calls_steady")["head"]) is ("policy=stable/" in cell["cell"])
        assert bool(values(cell, "kv_move_invalidations")["head"]) is moves
        assert bool(values(cell, "growth_keeps")["head"]) is not moves


def test_a_batch_streams_each_weight_once_for_all(tmp_path: Path) -> None:
    verdict = swept(tmp_path, "kv-batch")
    assert verdict["outcome"] == "PASS"
    streamed = {cell["cell"].partition("/policy")[0]: values(cell, "htod_bytes_per_token") for cell in verdict["cells"]}
    for prompt in ("short", "long"):
        alone = streamed[f"dense/{prompt}/batch=1"]["base"]
        for batch in (2, 4, 8):
            passes = 15 + 2  # prompts of two lengths go in one after the other
            assert streamed[f"dense/{prompt}/batch={batch}"] == {
                "base": alone * passes / (16 * batch),
                "head": alone * passes / (16 * batch),
            }
    assert all(values(cell, "kv_growth_dtod_bytes")["base"] == 0 for cell in verdict["cells"])


def test_the_ladder_is_one_graph_at_each_size(tmp_path: Path) -> None:
    verdict = swept(tmp_path, "ladder")
    assert (verdict["outcome"], len(verdict["cells"])) == ("PASS", 3)
    launches = [values(cell, "eager_launches")["base"] for cell in verdict["cells"]]
    assert launches == sorted(set(launches)), "more layers, more launches"


def test_experts_cost_less_where_routers_are_skewed(tmp_path: Path) -> None:
    verdict = swept(tmp_path, "experts")
    assert verdict["outcome"] == "PASS"
    read = {cell["cell"].partition("/granule")[0]: values(cell, "link_bytes_per_token") for cell in verdict["cells"]}
    for budget in ("50%", "75%"):
        even, skewed = (read[f"{model}/four/weight_budget={budget}"] for model in ("even", "skewed"))
        for arm in ("stable", "lru", "size_first"):
            assert skewed[arm] < even[arm] < even["base"], "experts one by one, the fewer the more uneven"


PLANT = """\
  planted:
    like: base
    build:
      outputs: [engine/kernels/nbits.py]
      command: |
        cd engine/kernels
        sed -i 's/^    shaped \\*= scales.*$/&\\n    shaped[-1] *= np.float32(1.0001)/' nbits.py
        grep -q 1.0001 nbits.py
"""


def test_kernels_are_equal_to_themselves_and_a_changed_one_is_not(tmp_path: Path) -> None:
    """A scale that is off by a ten-thousandth in the last row: other bytes of products, and of products alone."""
    assert swept(tmp_path, "kernels")["outcome"] == "PASS"
    text = (ROOT / "sweeps/kernels.yaml").read_text().partition("sizes:")[0]
    text = text.replace("path: kernels", f"path: {ROOT}/sweeps/kernels").replace("  head: {", f"{PLANT}  head: {{")
    text = text.replace("{count: 2}", "{order: once}")
    (tmp_path / "planted.yaml").write_text(text)
    verdict = swept(tmp_path, str(tmp_path / "planted.yaml"), exit_code=1)
    assert {found["arm"] for found in verdict["findings"]} == {"planted"}
    assert {found["cell"] for found in verdict["findings"]} == {
        f"{of}/seed" for of in ("product-f32", "product-f16", "gated-f32")
    }
