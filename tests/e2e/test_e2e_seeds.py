"""The two sweeps that the project began with, in a size for a test: the same files with fewer layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def row(comment: str, *words: str) -> list[str]:
    """The cells of the one table row that holds all these words."""
    [found] = [line for line in comment.splitlines() if line.startswith("|") and all(word in line for word in words)]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_seams_by_cause_before_any_rule_and_after_each(tmp_path: Path) -> None:
    """Four layers, three of them gated delta, where the file has 40 and 30."""
    verdict, comment = swept(tmp_path, "seed-capture", ("hollow: true}", "hollow: true, layers: 4}"))
    assert verdict["outcome"] == "IMPROVED"
    assert row(comment, "Captured segments")[1:5] == ["8", "7", "4", "1"]
    assert row(comment, "split_qkv/Split")[-4:] == ["3", "0", "0", "0"]
    assert row(comment, "LinearAttention", "CaptureRecordingFailed")[-4:] == ["3", "3", "3", "0"]
    assert row(comment, "q_l2norm")[-4:] == row(comment, "k_l2norm")[-4:] == ["3", "3", "0", "0"]
    assert "Tokens not judged" in comment and "Nothing was computed" in comment and "ame tokens" not in comment
