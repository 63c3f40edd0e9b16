"""The import contracts of pyproject.toml are kept, complete, and seen to break when they are broken."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("engine", "jobs", "reports", "orchestrator")


def import_linter_settings(checkout: Path) -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(settings["tool"]["importlinter"])


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)


def libraries_imported(checkout: Path) -> dict[str, set[str]]:
    """Top-level name of each third-party import -> the files that have it."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for file in sorted((checkout / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                for name in imported_names(node):
                    found.setdefault(name.partition(".")[0], set()).add(str(file.relative_to(checkout)))
    ours = {*PACKAGES, *sys.stdlib_module_names}
    return {name: files for name, files in found.items() if name not in ours}


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def test_every_contract_is_kept(checkout: Path) -> None:
    done = lint_imports(checkout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_library_is_named_by_a_contract(checkout: Path) -> None:
    contracts = import_linter_settings(checkout)["contracts"]
    named = {library for contract in contracts for library in contract.get("forbidden_modules", ())}
    unnamed = {name: files for name, files in libraries_imported(checkout).items() if name not in named}
    assert unnamed == {}, "pyproject.toml must say which modules may use these libraries"


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("engine/run.py", "import jobs", "imports go one way"),
        ("jobs/judge.py", "import orchestrator", "imports go one way"),
        ("engine/run.py", "import pydantic", "pydantic stands where text enters"),
        ("orchestrator/clear.py", "import pynvml", "NVML is read in one module"),
        ("jobs/judge.py", "def late():\n    import sqlalchemy", "SQL is spoken by the store alone"),
        ("orchestrator/nvml.py", "import pynvml", None),
        ("orchestrator/cli.py", "import typer, reports, jobs, engine", None),
    ],
)
def test_a_broken_contract_is_seen(tmp_path: Path, checkout: Path, module: str, line: str, broken: str | None) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_bytes((checkout / "pyproject.toml").read_bytes())
    (tmp_path / module).write_text(f"{line}\n")
    done = lint_imports(tmp_path)
    if broken is None:
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert done.returncode == 1
        assert [row for row in done.stdout.splitlines() if broken in row and "BROKEN" in row], done.stdout
        assert "1 broken" in done.stdout
