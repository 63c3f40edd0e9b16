"""What the wheel ships: the four packages, the migrations and sweeps under `jobs`, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

PACKAGES = {"engine", "jobs", "reports", "orchestrator"}
DATA = {".cu", ".cuh", ".j2", ".json", ".css", ".js"}


def build(kind: str, checkout: Path, out: Path) -> zipfile.Path:
    """Build with hatchling's own hooks, as pip does without isolation, and open the one wheel that comes of it."""
    script = f"import hatchling.build as b, sys; b.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-P", "-c", script, str(out)]
    done = subprocess.run(command, cwd=checkout, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.Path(wheel)


@pytest.fixture(scope="module")
def shipped(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return set(build("wheel", checkout, tmp_path_factory.mktemp("wheel")).root.namelist())


def tracked(checkout: Path, *folders: str) -> set[str]:
    command = ["git", "ls-files", "-z", "--", *folders]
    listed = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and (checkout / name).is_file()}


def test_only_the_four_packages_are_at_the_top(shipped: set[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in shipped}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_every_tracked_file_of_the_packages_is_shipped(checkout: Path, shipped: set[str]) -> None:
    assert tracked(checkout, *PACKAGES) - shipped == set()
    assert {PurePosixPath(name).suffix for name in shipped} >= {
        PurePosixPath(name).suffix for name in tracked(checkout, *PACKAGES) if PurePosixPath(name).suffix in DATA
    }


def test_migrations_and_sweeps_are_shipped_under_jobs(checkout: Path, shipped: set[str]) -> None:
    assert {"jobs/migrations/env.py", "jobs/migrations/script.py.mako"} <= shipped
    moved = {"alembic": "jobs/migrations", "sweeps": "jobs/sweeps"}
    for folder, place in moved.items():
        there = {place + name.removeprefix(folder) for name in tracked(checkout, folder)}
        assert there, f"{folder}/ holds no tracked file"
        assert there - shipped == set()
    assert any(name.startswith("jobs/migrations/versions/") and name.endswith(".py") for name in shipped)


def test_nothing_is_shipped_that_could_harm(shipped: set[str]) -> None:
    """A shipped `alembic/` would overwrite the library's files, and uninstalling would delete them."""
    parts = {part for name in shipped for part in PurePosixPath(name).parts}
    assert parts & {"alembic", "tests", "__pycache__", ".venv"} == set()
    assert not any(name.endswith((".pyc", ".gguf", ".data")) for name in shipped)


def test_the_command_and_the_licence_are_in_the_metadata(checkout: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(str(build("wheel", checkout, tmp_path).root.filename))
    metadata = {PurePosixPath(name).name: wheel.read(name).decode() for name in wheel.namelist() if "dist-info" in name}
    assert "assay = orchestrator.cli:main" in metadata["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in metadata["METADATA"]
    assert metadata["LICENSE"] == (checkout / "LICENSE").read_text(encoding="utf-8")


def test_an_editable_install_copies_nothing(checkout: Path, tmp_path: Path) -> None:
    """Files copied into site-packages would be a second `jobs` beside the checkout's."""
    names = build("editable", checkout, tmp_path).root.namelist()
    assert [name for name in names if ".dist-info/" not in name] == ["_gpu_assay.pth"]
