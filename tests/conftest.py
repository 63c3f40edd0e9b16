"""What every test run shares: skips for want of a GPU or a browser, and the check that tests which must run did run.

`tests/must_run.txt` lists patterns of test ids. A listed test that is skipped fails the run; with `--must-run`, which
`make test` passes, a pattern that no executed test matches fails it too, so that a module skipped as a whole or a
renamed test cannot pass unseen. Both work under xdist: the controller sees every worker's reports. What is skipped for
want of a browser is counted and said; where there is one, as `.ci/run` sees to, listed tests of pages must run.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

NO_GPU = "skipped: no GPU"
TOO_FEW_GPUS = "skipped: fewer than "
NO_BROWSER = "skipped: no browser"
MUST_RUN_FILE = Path(__file__).with_name("must_run.txt")

# In a child, so that the test process itself never holds a driver context.
COUNT_GPUS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
print(count.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0)
"""


@dataclass(slots=True)
class Census:
    """What became of each test, as far as the two checks need it."""

    patterns: tuple[str, ...]
    executed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    accesses: int = 0
    """Uses of memory that were checked for their order, where tests count them."""
    told: Counter[str] = field(default_factory=Counter)
    """What tests say in words, and how many of them say it."""

    def add(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped[report.nodeid] = skip_reason(report)
        elif report.when == "call":
            self.executed.add(report.nodeid)
            self.accesses += sum(int(str(value)) for name, value in report.user_properties if name == "accesses")
            self.told.update(f"{name}: {value}" for name, value in report.user_properties if name.startswith("ids of "))

    def skipped_but_must_run(self) -> list[str]:
        skipped = sorted(self.skipped.keys() - self._without_browser())
        return [test for test in skipped if any(matches(test, pattern) for pattern in self.patterns)]

    def matched_nothing(self) -> list[str]:
        seen = self.executed | self._without_browser()
        return [pattern for pattern in self.patterns if not any(matches(test, pattern) for test in seen)]

    def _without_browser(self) -> set[str]:
        return {test for test, why in self.skipped.items() if why == NO_BROWSER}


CENSUS = pytest.StashKey[Census]()


def read_patterns(path: Path) -> tuple[str, ...]:
    """The patterns of a must-run file: one a line, `#` starts a comment."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return tuple(line for line in lines if line)


def matches(test_id: str, pattern: str) -> bool:
    """Whether a test id fits a pattern: a glob over the whole id, or a file, class or test without its parameters."""
    # fnmatch reads `[` as a character class, while ids carry parameters in brackets.
    glob = pattern.replace("[", "[[]")
    return any(fnmatchcase(test_id, form) for form in (glob, f"{glob}::*", f"{glob}[[]*"))


def skip_reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return getattr(report, "wasxfail", "") or str(report.longrepr)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--must-run",
        action="store_true",
        help="fail unless every pattern of tests/must_run.txt matches a test that was executed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CENSUS] = Census(read_patterns(MUST_RUN_FILE))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(MustRun(config), "must-run")
    elif not gpus():
        _take_own_temporary_folder(config)


def _take_own_temporary_folder(config: pytest.Config) -> None:
    """Let this worker's simulated cards be its own, so that tests side by side do not wait for each other's.

    They are locked in the host's temporary folder; real cards stay locked against all of the host. The name is short,
    for the sockets that Ray makes below it.
    """
    folder = tempfile.mkdtemp(prefix="t")
    Path(folder).chmod(0o711)  # a server that is another user's has its own folder below
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


class MustRun:
    """Counts in the process that sees every report, and turns the run red at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.census = config.stash[CENSUS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.census.add(report)

    def complaints(self) -> list[str]:
        skipped = self.census.skipped_but_must_run()
        found = [f"{test} must run, but: {self.census.skipped[test]}" for test in skipped]
        if self.config.getoption("--must-run"):
            found += [f"{pattern} must run, but no executed test matches" for pattern in self.census.matched_nothing()]
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.complaints() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        without_gpu = sum(why == NO_GPU or why.startswith(TOO_FEW_GPUS) for why in self.census.skipped.values())
        terminalreporter.write_line(f"GPU tests skipped for want of a GPU: {without_gpu}")
        without_browser = Counter(self.census.skipped.values())[NO_BROWSER]
        terminalreporter.write_line(f"tests of pages skipped for want of a browser: {without_browser}")
        if self.census.accesses:
            terminalreporter.write_line(f"accesses checked for their order: {self.census.accesses}")
        for said, tests in sorted(self.census.told.items()):
            terminalreporter.write_line(f"{said} ({tests} decodes)")
        for complaint in self.complaints():
            terminalreporter.write_line(f"MUST RUN: {complaint}", red=True)


@functools.cache
def gpus() -> int:
    """How many devices a CUDA driver reports; 0 without one."""
    counted = subprocess.run([sys.executable, "-c", COUNT_GPUS], check=False, capture_output=True, text=True)
    return int(counted.stdout) if counted.returncode == 0 else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Before any fixture, so that one of wider scope cannot reach for a GPU first.
    wanted = max(((*mark.args, 1)[0] for mark in item.iter_markers("gpu")), default=0)
    if wanted and gpus() < wanted:
        pytest.skip(f"{TOO_FEW_GPUS}{wanted} GPUs" if gpus() else NO_GPU)
    if item.get_closest_marker("browser") and shutil.which("chromium") is None:
        pytest.skip(NO_BROWSER)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent
