"""The two sweeps that the project began with, in a size for a test: the same files with fewer layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def swept(folder: Path, name: str, *changes: tuple[str, str]) -> tuple[dict[str, object], str]:
    """The verdict and the comment of a sweep file of the repository with some of its words changed."""
    text = (ROOT / "sweeps" / f"{name}.yaml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "sweep.yaml").write_text(text)
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    words = ("run", str(folder / "sweep.yaml"), "--json", "--store", f"sqlite:///{folder}/s.db", "--out", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *words],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    return json.loads(Path(document["verdict"]).read_text()), Path(document["comment"]).read_text()


ONCE = ("gate: {", "blocks: {order: sequential}\ngate: {")
"""Each arm once: what is exact repeats."""


def row(comment: str, *words: str) -> list[str]:
    """The cells of the one table row that holds all these words."""
    [found] = [line for line in comment.splitlines() if line.startswith("|") and all(word in line for word in words)]
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.mark.slow
def test_seams_by_cause_before_any_rule_and_after_each(tmp_path: Path) -> None:
    """Four layers, three of them gated delta, where the file has 40 and 30."""
    verdict, comment = swept(tmp_path, "seed-capture", ("hollow: true}", "hollow: true, layers: 4}"), ONCE)
    assert verdict["outcome"] == "IMPROVED"
    assert row(comment, "Captured segments")[1:5] == ["8", "7", "4", "1"]
    assert row(comment, "split_qkv/Split")[2:6] == ["3", "0", "0", "0"]
    assert row(comment, "LinearAttention", "CaptureRecordingFailed")[2:6] == ["3", "3", "3", "0"]
    assert row(comment, "q_l2norm")[2:6] == row(comment, "k_l2norm")[2:6] == ["3", "3", "0", "0"]
    assert "Tokens not judged" in comment and "Nothing was computed" in comment and "ame tokens" not in comment


def test_the_distance_to_the_floor_by_cause_and_the_heaviest_keys_by_name(tmp_path: Path) -> None:
    """Two layers of 48, under a budget that their head passes through: a few times, and most of the bytes."""
    fewer = ("hollow: true}", "hollow: true, layers: 2}")
    advise = ("identity: off", "exact: advise, identity: off")  # of so few layers `staging` keeps more in than `stable`
    _, comment = swept(tmp_path, "seed-residency", fewer, ("[7139550618]", '["75%"]'), advise, ONCE)
    assert "ame tokens" not in comment
    assert "The most bytes are of `lm_head.MatMul.weight_Q4`" in comment
    table = comment.partition("**Heaviest streamed keys of base**")[2].partition("**Heaviest")[0]
    by_bytes, by_count = (float(cell.rstrip(" %")) for cell in row(table, "`lm_head.MatMul.weight_Q4`")[-2:])
    assert by_bytes > 5 * by_count > 0, "a share by count hides what a share by bytes shows"
    causes = row(comment, "**Distance to the floor**")
    figures = row(comment, "Distance to the floor, bytes per token")
    assert causes[1] == figures[1] and causes[-1] == figures[-2], (
        "causes add up to the figure, base first and head last"
    )
    beside = row(comment.partition("**Arms side by side**")[2], "**head**", "not compared")
    assert beside[-3:] == ["1", "0", "0"], "one segment, and no seam"


@pytest.mark.slow
def test_a_ring_beside_newcomers_is_one_table_with_the_same_tokens_one_segment_and_fewer_bytes(tmp_path: Path) -> None:
    """The sweep of SmolLM2 with the toy in its place, whose weights are small beside a granule of 2 MiB."""
    small = ("build: smollm2-135m", "build: tiny, seed: 7"), ("matrix:", "matrix:\n  granule: [4096]")
    verdict, comment = swept(tmp_path, "smollm2-staging", *small, ("[504, 3575, 282, 4649, 314]", "[1, 2, 3, 4]"))
    assert verdict["outcome"] == "IMPROVED" and "ame tokens" in comment
    table = comment.partition("**Arms side by side**")[2].strip().partition("\n\n")[0]
    base, null, head = (row(table, f"**{arm}** |") for arm in ("base", "null", "head"))
    assert base[2:] == null[2:] and int(base[-3]) > 1
    assert "identical" in null[1] and head[1] == null[1] and head[-3:] == ["1", "0", "0"]
    streamed = [cells[2].partition(" kB") for cells in (base, head)]
    assert float(streamed[0][0]) > float(streamed[1][0]) > 0 and streamed[0][1] == streamed[1][1] == " kB"
