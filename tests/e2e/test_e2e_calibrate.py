"""A calibration through the real path: spawned, stored, judged, and shown beside the times of a later sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_e2e_run import ROOT, assay

pytestmark = pytest.mark.slow


def test_noise_is_measured_on_a_simulated_card_and_shown_by_the_next_sweep(tmp_path: Path) -> None:
    sweep = str(ROOT / "sweeps" / "tiny.yaml")
    done = assay(tmp_path, "calibrate", sweep, "--blocks", "6", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["outcome"] == "PASS"
    by_metric = {row["metric"]: row for row in told["calibrations"]}
    assert by_metric["decode_ms_per_token"]["sigma"] > 0
    assert by_metric["modelled_ms_per_token"]["sigma"] == 0
    assert {row["blocks"] for row in by_metric.values()} == {6}
    after = assay(tmp_path, "run", sweep)
    assert after.returncode == 0, after.stdout + after.stderr
    comment = (tmp_path / ".assay" / "report" / "comment.md").read_text()
    assert "of 3 rows the noise is calibrated" in comment
    assert told["sweep"] in comment
