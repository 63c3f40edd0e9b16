"""requirements.lock is whole: every declared dependency is in it, by hash, and it names no place on any network."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LOCKED_EXTRAS = ("dev", "postgres")
PIN = re.compile(r"^([a-z0-9-]+)==\S+(?: ; .+)? \\$")


def normalised(requirement: str) -> str:
    name = re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: str) -> dict[str, int]:
    """Distribution -> how many hashes stand under its pins."""
    hashes: dict[str, int] = {}
    name = ""
    for line in lock.splitlines():
        if pin := PIN.match(line):
            name = pin[1]
            hashes.setdefault(name, 0)
        elif line.startswith("    --hash=sha256:"):
            hashes[name] += 1
        else:
            assert not line or line.lstrip().startswith("#"), f"not a pin, a hash or a comment: {line}"
    return hashes


def test_every_declared_dependency_is_locked(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = list(project["dependencies"])
    for extra in LOCKED_EXTRAS:
        declared += project["optional-dependencies"][extra]
    locked = pins((checkout / "requirements.lock").read_text(encoding="utf-8"))
    assert {normalised(requirement) for requirement in declared} - set(locked) == set(), "run `make lock`"


def test_every_pin_has_a_hash(checkout: Path) -> None:
    locked = pins((checkout / "requirements.lock").read_text(encoding="utf-8"))
    assert len(locked) > 20
    assert [name for name, count in locked.items() if not count] == []


def test_the_lock_names_no_place(checkout: Path) -> None:
    lock = (checkout / "requirements.lock").read_text(encoding="utf-8")
    assert [line for line in lock.splitlines() if "//" in line or " @ " in line or line.startswith("-")] == []
