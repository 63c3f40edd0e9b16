"""What stands in the working folder must not be imported in place of what is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_packages_in_the_working_folder_are_left_alone(tmp_path: Path) -> None:
    """Four packages of our names stand there, each of which would end whoever imports it."""
    for name in ("engine", "jobs", "reports", "orchestrator"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the stray {name} was imported')\n")
    command = [str(Path(sys.executable).with_name("assay")), "run", str(CHECKOUT / "sweeps" / "tiny.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=160, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stray" not in done.stdout + done.stderr
