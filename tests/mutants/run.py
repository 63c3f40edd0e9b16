"""Leave out each call that orders, ends or refuses something, and see which check falls: `make mutants`.

    python -P -m tests.mutants.run [--only TEXT] [--out FOLDER] [--jobs N]

A mutant lives in a process of its own, forked from one that has loaded the libraries and nothing of the engine; there
its module is compiled from the changed tree, whoever imports it. Checks run in a fixed order, those that fall soonest
first, and before them the one that fell by the record of the last run, until one fails, the process ends, or its time
is up. What survives must stand in `equivalent.toml` with the reason why it changes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from tests.mutants.sites import KINDS, Mutant, mutants, mutated

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200
"""Processor time that the checks of one mutant may take: more than all of them do; a loop without an end takes it."""
MOST_EQUIVALENT = 0.05
_LIBRARIES = ("numpy", "onnx", "ml_dtypes", "hypothesis", "jsonschema", "psutil", "platformdirs")
_UNIT = "tests/unit/test_engine_"


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"{_UNIT}{name}.py" for name in names)


CHECKS: dict[str, tuple[str, ...]] = {
    "engine/device/cuda": _files("cuda_books", "cuda_missing"),
    "engine/device/hazards": _files("hazards", "hazards_decode", "hazards_command"),
    "engine/device/sched": _files("hazards", "order", "zero_copy", "hazards_decode"),
    "engine/device/": _files(
        "hazards", "branches", "spans", "sim", "order", "plan_only", "zero_copy", "hazards_decode"
    ),
    "engine/paging/experts": _files("expert_plans", "expert_paging"),
    "engine/paging/": _files("order", "zero_copy", "staging", "grants", "expert_paging", "faults", "paging"),
    "engine/kv": _files("order", "kv", "prefix", "faults"),
    "engine/": (
        *_files("order", "capture", "capture_rules", "prefix"),
        f"{_UNIT}batch.py::test_numbers_of_a_stopped_sequence_end_nothing",
        *_files("staging", "faults", "routing", "hazards_decode"),
    ),
}
"""Start of a path -> the test files that a mutant there meets, in order; the first start that fits counts."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a mutant: the check that failed first, or how its process ended; "" for a survivor."""

    name: str
    kind: str
    line: int
    killed_by: str


class _Changed(MetaPathFinder, Loader):
    """Gives one module its changed code."""

    def __init__(self, module: str, code: CodeType) -> None:
        self.module, self.code = module, code

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Only that one."""
        return ModuleSpec(name, self, origin=self.code.co_filename) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        """As an import does."""
        module.__file__ = self.code.co_filename
        exec(self.code, module.__dict__)  # noqa: S102


class _First:
    """A pytest plugin that keeps the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The test's own id."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot even be loaded."""
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid}: not loaded"


def checks_of(mutant: Mutant | None) -> Sequence[str]:
    """Test files that a mutant meets; the engine as it is meets all of them."""
    if mutant is None:
        return sorted({file for files in CHECKS.values() for file in files})
    return next(files for start, files in CHECKS.items() if mutant.path.startswith(start))


def last_fell(record: Path) -> dict[str, list[str]]:
    """Mutant -> the test that killed it by a record, where there is one."""
    rows = json.loads(record.read_text("utf-8"))["mutants"] if record.is_file() else []
    return {row["name"]: [row["killed_by"]] for row in rows if row["killed_by"].startswith("tests/")}


def first_failure(files: Iterable[str]) -> str:
    """The first test that fails, file after file; "" where all pass."""
    import hypothesis

    hypothesis.settings.register_profile("mutants", derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    for file in files:
        first = _First()
        quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not accept"]
        code = pytest.main([*quiet, str(ROOT / file)], plugins=[first])
        if code == pytest.ExitCode.USAGE_ERROR and "::" in file:
            continue  # a test of the last record that is no more
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return first.failed or f"{file}: pytest ended with {int(code)}"
    return ""


def _child(mutant: Mutant | None, files: Sequence[str], into: Path) -> None:
    """Check one mutant, or None, which is the engine as it is, and write down what failed."""
    if mutant is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if mutant is not None:
        path = ROOT / mutant.path
        code = compile(mutated(path.read_text("utf-8"), mutant), str(path), "exec")
        sys.meta_path.insert(0, _Changed(mutant.module, code))
    into.write_text(first_failure(files))


def check(
    wanted: Sequence[Mutant | None], jobs: int, *, files: Sequence[str] = (), fell: Mapping[str, Sequence[str]] = {}
) -> dict[str, Ending]:
    """Every mutant in a process of its own, so many at a time; by name, the engine itself under "".

    It meets `files`, or those for its path, behind what `fell` has for it.
    """
    assert not any(name.partition(".")[0] == "engine" for name in sys.modules), "a mutant's module must be its own"
    for library in _LIBRARIES:
        importlib.import_module(library)
    queue, running, endings = list(reversed(wanted)), dict[int, Mutant | None](), dict[str, Ending]()
    with tempfile.TemporaryDirectory() as scratch:
        while queue or running:
            while queue and len(running) < jobs:
                mutant = queue.pop()
                pid = os.fork()
                if not pid:
                    met = [*fell.get(mutant.name if mutant else "", ()), *(files or checks_of(mutant))]
                    try:
                        _child(mutant, met, Path(scratch) / str(os.getpid()))
                    finally:
                        os._exit(0)
                running[pid] = mutant
            pid, status = os.wait()
            mutant = running.pop(pid)
            told = Path(scratch) / str(pid)
            killed_by = told.read_text() if told.is_file() else _ended(status)
            name, kind, line = (mutant.name, mutant.kind, mutant.line) if mutant else ("", "", 0)
            endings[name] = Ending(name, kind, line, killed_by)
            print(f"{name or 'as it is'}: {killed_by or 'SURVIVES'}", flush=True)
    return endings


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"deadline of {SECONDS} s of processor time"
    return f"process ended with status {status}"


def earlier(record: Path) -> dict[str, Ending]:
    """What the last run found of each mutant that there still is: a run of some leaves the others as they were."""
    there = {mutant.name for mutant in mutants(ROOT)}
    rows = json.loads(record.read_text("utf-8"))["mutants"] if record.is_file() else []
    return {r["name"]: Ending(r["name"], r["kind"], r["line"], r["killed_by"]) for r in rows if r["name"] in there}


def equivalents() -> dict[str, str]:
    """Mutant -> why it changes nothing."""
    told: dict[str, str] = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text("utf-8"))
    return told


def summary(endings: dict[str, Ending], excused: dict[str, str]) -> dict[str, Any]:
    """Counts by kind, and each mutant with what killed it or why it need not be."""
    rows = [{**asdict(e), "equivalent": excused.get(e.name, "") if not e.killed_by else ""} for e in endings.values()]
    by_kind = {}
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        counted = Counter("killed" if r["killed_by"] else "equivalent" if r["equivalent"] else "alive" for r in of_kind)
        by_kind[kind] = {"total": len(of_kind), **{n: counted[n] for n in ("killed", "equivalent", "alive")}}
    total = {n: sum(row[n] for row in by_kind.values()) for n in ("total", "killed", "equivalent", "alive")}
    return {**total, "by_kind": by_kind, "mutants": rows}


def table(told: dict[str, Any]) -> str:
    """The summary as a page."""
    lines = [f"# Mutants: {told['killed']} of {told['total']} killed, {told['equivalent']} equivalent", ""]
    lines += ["Written by `make mutants`. A mutant is a call taken out of paging, device, cache or capture code.", ""]
    lines += ["| kind | total | killed | equivalent | alive |", "|---|---|---|---|---|"]
    lines += [
        f"| {kind} | {row['total']} | {row['killed']} | {row['equivalent']} | {row['alive']} |"
        for kind, row in told["by_kind"].items()
    ]
    lines += ["", "| mutant | killed by |", "|---|---|"]
    lines += [
        f"| `{row['name'].removeprefix('engine/')}` | {_ending(row)} |".replace("tests/unit/test_engine_", "")
        for row in told["mutants"]
    ]
    return "\n".join(lines) + "\n"


def _ending(row: dict[str, Any]) -> str:
    if row["killed_by"]:
        return f"`{row['killed_by']}`".replace("|", "\\|")
    return f"equivalent: {row['equivalent']}" if row["equivalent"] else "**alive**"


def main() -> int:
    """Check all, print the count, and write both records where asked; 1 where one lives that nobody argued for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name has this text")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for mutants.json and mutants.md")
    arguments = parser.parse_args()
    wanted = [mutant for mutant in mutants(ROOT) if arguments.only in mutant.name]
    as_it_is = check([None], 1)[""]
    if as_it_is.killed_by:
        print(f"the engine as it is fails {as_it_is.killed_by}: nothing can be said of mutants")
        return 1
    record = ROOT / "docs" / "results" / "mutants.json"
    endings = check(wanted, arguments.jobs, fell=last_fell(record))
    told = summary({**earlier(record), **endings} if arguments.only else endings, equivalents())
    for row in told["mutants"]:
        if not row["killed_by"] and not row["equivalent"]:
            print(f"ALIVE {row['name']} (line {row['line']})")
    print(f"killed {told['killed']} of {told['total']}, equivalent {told['equivalent']}, alive {told['alive']}")
    if arguments.out is not None:
        (arguments.out / "mutants.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        (arguments.out / "mutants.md").write_text(table(told), encoding="utf-8")
    return int(told["alive"] > 0 or told["equivalent"] > MOST_EQUIVALENT * told["total"])


if __name__ == "__main__":
    sys.exit(main())
