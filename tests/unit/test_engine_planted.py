"""The planted defects of the whole-sweep tests: each is a patch that this tree still takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tests" / "e2e" / "planted").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_planted_defect_still_applies(patch: Path, tmp_path: Path) -> None:
    """Found here in a moment, and not by a sweep that cannot be planted."""
    text = patch.read_text()
    for name in {line[6:] for line in text.splitlines() if line.startswith("--- a/")}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = ["git", "apply", str(patch)]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "GIT_DIR": str(tmp_path / "none")},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
