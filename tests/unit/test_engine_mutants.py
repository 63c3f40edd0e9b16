"""The generator of mutants finds and removes what it should, its list of equivalents is true, a sample is killed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.run import CHECKS, MOST_EQUIVALENT, checks_of, equivalents
from tests.mutants.sites import KINDS, Mutant, mutants, mutated, of_source
from tests.unit.engine_child import environment

SOURCE = """
class Ring:
    def __init__(self):
        self._warm = False

    def fill(self, slot):
        self.check_room(slot)
        if self.full:
            raise Refused("no room")
        self.pool.give(self.device.unmap(slot))
        self.device.wait("copy", self.device.mark("compute"))
        call(self.driver.cuStreamWaitEvent, slot)
        self._warm = True
        return ", ".join(Release(slot).names)
"""
SAMPLE = """
import sys
from tests.mutants.run import ROOT, check
from tests.mutants.sites import mutants

named = {mutant.name: mutant for mutant in mutants(ROOT)}
endings = check([named[name] for name in sys.argv[3:]], 1, files=sys.argv[1:3])
sys.exit(any(not ending.killed_by.startswith("tests/unit/") for ending in endings.values()))
"""


def left(mutant: Mutant) -> str:
    """The made-up source without that piece."""
    return ast.unparse(mutated(SOURCE, mutant))


def test_each_call_that_counts_is_a_mutant_and_nothing_else_is() -> None:
    found = [(mutant.kind, mutant.what) for mutant in of_source(SOURCE, "ring.py")]
    assert sorted(found) == [
        ("generation", "_warm"),
        ("record", "mark"),
        ("release", "give"),
        ("release", "unmap"),
        ("veto", "check_room"),
        ("veto", "raise Refused"),
        ("wait", "cuStreamWaitEvent"),
        ("wait", "wait"),
    ]
    assert {mutant.place for mutant in of_source(SOURCE, "ring.py")} == {"Ring.fill"}


def test_a_statement_becomes_nothing_and_a_value_becomes_none() -> None:
    by_name = {mutant.what: left(mutant) for mutant in of_source(SOURCE, "ring.py")}
    assert "check_room" not in by_name["check_room"] and "raise" not in by_name["raise Refused"]
    assert "self.pool.give(None)" in by_name["unmap"] and "unmap" not in by_name["give"]
    assert "self.device.wait('copy', None)" in by_name["mark"]
    assert all(text != ast.unparse(ast.parse(SOURCE)) for text in by_name.values())


def test_the_engine_has_mutants_of_every_kind_each_with_its_own_name_and_checks(checkout: Path) -> None:
    found = mutants(checkout)
    assert {mutant.kind for mutant in found} == set(KINDS)
    assert len({mutant.name for mutant in found}) == len(found) > 200
    assert all((checkout / file.partition("::")[0]).is_file() for files in CHECKS.values() for file in files)
    assert all(checks_of(mutant) for mutant in found)


def test_equivalents_are_mutants_few_and_argued(checkout: Path) -> None:
    names = {mutant.name for mutant in mutants(checkout)}
    excused = equivalents()
    assert set(excused) <= names, "an entry of equivalent.toml that is no mutant any more goes"
    assert len(excused) <= MOST_EQUIVALENT * len(names)
    assert all(len(why.split()) > 8 and why.endswith(".") for why in excused.values())


def test_the_record_of_the_last_whole_run_knows_every_mutant_and_none_lives(checkout: Path) -> None:
    """New code of these kinds asks for a new run: `make mutants`."""
    told = json.loads((checkout / "docs/results/mutants.json").read_text("utf-8"))
    assert {row["name"] for row in told["mutants"]} == {mutant.name for mutant in mutants(checkout)}
    assert told["alive"] == 0 and told["killed"] + told["equivalent"] == told["total"] == len(told["mutants"])
    assert told["equivalent"] <= MOST_EQUIVALENT * told["total"]


@pytest.mark.timeout(300)
def test_a_sample_is_killed(checkout: Path) -> None:
    """One of each kind that a short file kills, in a process that has not loaded the engine."""
    picked = [
        "engine/device/recording.py:Recording.close:raise DeviceFailure",
        "engine/device/schedule.py:Schedule.go:drain",
        "engine/device/scheduled.py:ScheduledDevice.free:drain",
        "engine/device/scheduled.py:ScheduledDevice._mark:mark",
        "engine/device/book.py:BookedDevice.copy_in:_check_closed",
    ]
    files = [f"tests/unit/test_engine_{name}.py" for name in ("hazards", "branches")]
    command = [sys.executable, "-P", "-c", SAMPLE, *files, *picked]
    done = subprocess.run(
        command, cwd=checkout, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
