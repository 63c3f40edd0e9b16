"""A head that breaks ties the other way, from sweep file to exit code: the oracle is asked through Ray, and once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine_tied import FIRST, TIES_UPWARDS, TOKENS, TWIN, build_tied, tree

SWEEP = f"""\
sweep: tied
models:
  tied: {{path: ./tied/tiny}}
prompts:
  short: {{ids: [1, 17, 42, 99]}}
arms:
  base: {{source: "path:./base"}}
  head: {{source: "path:./head"}}
matrix:
  model: [tied]
  prompt: [short]
  weight_budget: ["50%"]
  granule: [4096]
identity: {{near_ties: allow}}
run: {{device: sim, tokens: {TOKENS}, generations: 2, ignore_eos: true}}
"""


def assay(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "orchestrator.cli", *words, "--store", "s.sqlite"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow  # test_orchestrator_questions has the same in one process
@pytest.mark.timeout(300)
def test_a_tie_that_the_contract_allows_passes_by_its_name(tmp_path: Path) -> None:
    """And a second judgement, which starts no engine, rests on the stored answer."""
    (tmp_path / "tied").mkdir()
    _, ids = build_tied(tmp_path / "tied")
    tree(tmp_path / "base")
    tree(tmp_path / "head", TIES_UPWARDS)
    (tmp_path / "s.yaml").write_text(SWEEP)
    done = assay(tmp_path, "run", "s.yaml", "--out", "out", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"asks: the oracle about index {FIRST} of base's ids" in done.stderr
    verdict: dict[str, Any] = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["exit_code"]) == ("NEAR_TIE", 0)
    row = next(row for row in verdict["cells"][0]["identity"] if row["what"] == "pair")
    assert (row["first_difference"], row["left_id"], row["right_id"]) == (FIRST, ids[FIRST], TWIN)
    assert "NEAR_TIE" in (tmp_path / "out" / "comment.md").read_text()
    again = assay(tmp_path, "judge", "swp_", "--json")
    assert (again.returncode, json.loads(again.stdout)["outcome"]) == (0, "NEAR_TIE")
