"""The set-up behind every make target: made once, reused, made anew when its inputs change or when it was cut short."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# A build backend of its own, so that the case needs no network.
BACKEND = """
import zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "toy-0-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("toy-0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: toy\\nVersion: 0\\n")
        wheel.writestr("toy-0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("toy-0.dist-info/RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def set_up(root: Path) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if name not in {"PYTHON", "PYTHONPATH"}}
    return subprocess.run(
        ["sh", ".ci/setup", ".venv"], cwd=root, env=outer, check=False, capture_output=True, text=True
    )


def test_the_environment_follows_its_inputs(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(checkout / ".ci" / "setup", tmp_path / ".ci" / "setup")
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    lock, stamp, mark = tmp_path / "requirements.lock", tmp_path / ".venv" / "stamp", tmp_path / ".venv" / "mark"
    lock.write_text("# nothing\n")
    mark.parent.mkdir()
    mark.touch()  # an environment without a stamp, of whatever origin

    made = set_up(tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    assert stamp.is_file() and not mark.exists(), "an environment without a stamp is made anew"

    mark.touch()
    assert set_up(tmp_path).stdout == ""
    assert mark.exists(), "equal inputs: reused"

    (tmp_path / "pyproject.toml").write_text(PROJECT + "# another entry point\n")
    before = stamp.read_text()
    assert set_up(tmp_path).returncode == 0
    assert mark.exists() and stamp.read_text() != before, "only the project changed: libraries are kept"

    lock.write_text("not a requirement\n")
    assert set_up(tmp_path).returncode != 0, "a lock that pip cannot read is refused"
    assert not mark.exists() and not stamp.exists(), "another lock: made anew, and no stamp before the end"


def test_no_python_is_said_plainly(tmp_path: Path, checkout: Path) -> None:
    command = ["sh", str(checkout / ".ci" / "setup"), str(tmp_path / ".venv")]
    done = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHON": "/nowhere/python"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr and "/nowhere/python" in done.stderr
