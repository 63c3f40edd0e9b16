"""The house rules that a file list and a regular expression can hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

MAX_LINES = 500
SOURCE = {".py", ".cu", ".cuh", ".j2", ".css", ".js"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
SHADOWING = {
    "types",
    "queue",
    "select",
    "statistics",
    "profile",
}  # of the standard library

# Written in parts, so that this file is not its own finding.
FOREIGN_WORDS = re.compile(
    "|".join(
        [
            r"(?<![\w.-])/" + "work/",
            r"(?<![\w.-])/" + "root/",
            r"\.lib" + r"rary/",
            "pypi" + r"\.org",
            "python" + r"hosted\.org",
            "registry" + r"\.npmjs",
            "deb" + r"\.debian\.org",
        ]
    )
)
SIBLING_FOLDER = re.compile(r"\.\./" + "shared")


def tracked(checkout: Path) -> list[PurePosixPath]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, check=True, capture_output=True, text=True).stdout
    paths = [PurePosixPath(name) for name in listed.split("\0") if name and (checkout / name).is_file()]
    assert paths, "git lists no file: this test reads the checkout's index"
    return paths


def is_vendored(path: PurePosixPath) -> bool:
    return "vendor" in path.parts


def too_long(root: Path, paths: list[PurePosixPath]) -> list[str]:
    sources = [path for path in paths if path.suffix in SOURCE and not is_vendored(path)]
    counted = [(path, len((root / path).read_bytes().splitlines())) for path in sources]
    return [f"{path}: {lines} lines" for path, lines in counted if lines > MAX_LINES]


def foreign_words(root: Path, paths: list[PurePosixPath]) -> list[str]:
    found = []
    for path in paths:
        if is_vendored(path):
            continue
        text = (root / path).read_bytes().decode("utf-8", errors="ignore")
        for number, line in enumerate(text.splitlines(), start=1):
            if FOREIGN_WORDS.search(line) or (path.parts[0] != "tests" and SIBLING_FOLDER.search(line)):
                found.append(f"{path}:{number}: {line.strip()[:100]}")
    return found


def test_source_files_stay_under_the_ceiling(checkout: Path) -> None:
    assert too_long(checkout, tracked(checkout)) == []


def test_the_ceiling_is_seen_when_crossed(tmp_path: Path) -> None:
    (tmp_path / "long.cu").write_text("\n" * (MAX_LINES + 1))
    (tmp_path / "full.cu").write_text("\n" * MAX_LINES)
    assert too_long(tmp_path, [PurePosixPath("long.cu"), PurePosixPath("full.cu")]) == ["long.cu: 501 lines"]


def test_no_module_has_a_vague_or_shadowing_name(checkout: Path) -> None:
    modules = [path for path in tracked(checkout) if path.suffix == ".py"]
    assert [path for path in modules if (VAGUE | SHADOWING) & {path.stem, *path.parts[:-1]}] == []


def test_tests_and_migrations_are_no_packages(checkout: Path) -> None:
    """An `__init__.py` there hides our own packages from pytest, or the alembic library from everyone."""
    markers = [
        path for path in tracked(checkout) if path.name == "__init__.py" and path.parts[0] in {"tests", "alembic"}
    ]
    assert markers == []
    assert not (checkout / "alembic" / "__init__.py").exists()


def test_test_files_have_names_of_their_own(checkout: Path) -> None:
    """Test folders are no packages, so two files of one name would collide."""
    names = [path.name for path in tracked(checkout) if path.parts[0] == "tests" and path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_tracked_files_name_no_foreign_place(checkout: Path) -> None:
    assert foreign_words(checkout, tracked(checkout)) == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("path = '/" + "work/x'", True),
        ("cache in /" + "root/.cache", True),
        ("index = https://" + "pypi" + ".org/simple", True),
        ("see ../" + "shared/notes", True),
        ("a network/" + "work/item", False),
        ("the library, by name", False),
    ],
)
def test_a_foreign_place_is_seen_when_written(tmp_path: Path, line: str, is_found: bool) -> None:
    (tmp_path / "note.md").write_text(f"first\n{line}\n")
    assert bool(foreign_words(tmp_path, [PurePosixPath("note.md")])) is is_found
