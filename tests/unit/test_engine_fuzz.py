"""Damaged models by the hundred: each run ends in success or in one of the engine's own errors, and reads nothing else.

A fault names the case; `python -P -m tests.unit.engine_fuzz CASE CASE+1 FOLDER...` runs it again.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine_child import environment
from tests.unit.engine_rig import build_tiny

SECONDS = 10.0
"""How long a case may take."""
START_SECONDS = 60.0
"""How long imports and one whole run may, on a machine that does other things."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> list[Path]:
    """The seeded model, and the exporter-written ones where they are there: copied, as hard links are made to them."""
    shared = checkout.parent / "shared" / "models"
    found = sorted(p for p in shared.iterdir() if p.is_dir()) if shared.is_dir() else []
    below = tmp_path_factory.mktemp("fuzz")
    copies = []
    for source in (build_tiny(below), *found):
        copy = below / "whole" / source.name
        copy.mkdir(parents=True)
        for name in ("model.onnx", "model.onnx.data", "genai_config.json"):
            (copy / name).write_bytes((source / name).read_bytes())
        copies.append(copy)
    return copies


def watched(first: int, last: int, folders: list[Path], scratch: Path) -> Iterator[dict[str, Any]]:
    """Outcomes of cases. A process that ends or hangs costs its case, and another one goes on behind it."""
    seed, case = first, {"seed": first, "what": "?"}
    while seed < last:
        before = seed
        command = [sys.executable, "-P", "-m", "tests.unit.engine_fuzz", str(seed), str(last), *map(str, folders)]
        with (scratch / "stderr").open("w+b") as err:
            setting = {**environment(), "TMPDIR": str(scratch)}
            with subprocess.Popen(command, env=setting, stdout=subprocess.PIPE, stderr=err) as child:
                for line in _lines(child):
                    if "seed" in line:
                        case, seed = line, line["seed"] + 1
                    else:
                        yield {**case, **line}
            err.seek(0)
            if child.returncode:
                said = err.read().decode(errors="replace")[-2000:]
                yield {**case, "code": None, "fault": f"ended with {child.returncode}, -9 after {SECONDS} s: {said}"}
                if seed == before:
                    return  # it does not even start


def _lines(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The child's lines until it ends; one that says nothing for too long is ended."""
    assert child.stdout is not None
    fd, rest, patience = child.stdout.fileno(), b"", START_SECONDS
    with selectors.DefaultSelector() as ready:
        ready.register(fd, selectors.EVENT_READ)
        while True:
            if not ready.select(patience):
                child.kill()
                return
            part, patience = os.read(fd, 1 << 16), SECONDS
            if not part:
                return
            *whole, rest = (rest + part).split(b"\n")
            yield from map(json.loads, whole)


def faults(first: int, last: int, folders: list[Path], scratch: Path) -> list[str]:
    """The cases that ended as none may, and an error for each that did not end at all."""
    outcomes = list(watched(first, last, folders, scratch))
    found = [f"case {o['seed']} ({o['what']}): {o['fault']}" for o in outcomes if o["fault"]]
    if found:
        return found
    assert [o["seed"] for o in outcomes] == list(range(first, last)), "each case once"
    ends = Counter(o["code"] for o in outcomes)
    assert ends[0] and ends[11] and ends[12], f"damage that shows nothing, or shows always, proves little: {ends}"
    return []


def test_200_damaged_models_end_in_the_engines_own_ways(folders: list[Path], tmp_path: Path) -> None:
    assert faults(0, 200, folders, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_2000_damaged_models_end_in_the_engines_own_ways(folders: list[Path], tmp_path: Path) -> None:
    assert faults(200, 2200, folders, tmp_path) == []


# -- what the watch itself would miss


def planted(tmp_path: Path, defect: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Faults of three cases where every run does something that none may."""
    script = f"""
import os, pathlib, signal, sys, time
import tests.unit.engine_fuzz as fuzz
true, runs = fuzz.execute, []
def run(request, lines, clock):
    runs.append(request)
    if len(runs) > 1:  # the first one warms up
        {defect}
    return true(request, lines, clock)
fuzz.execute = run
sys.exit(fuzz.main(sys.argv[1:]))
"""
    (tmp_path / "planted.py").write_text(script)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -P {tmp_path / "planted.py"} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 2.0)
    return faults(0, 3, folders, tmp_path)


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        ("raise KeyError('a traceback')", "KeyError: 'a traceback'"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
        ("time.sleep(60)", "ended with -9"),
        ("open('/etc/hostname').read()", "touched what is not its own: ['open /etc/hostname r']"),
        ("(pathlib.Path(request.model) / 'x').touch()", "touched what is not its own"),
        ("return 99", "exit code 99 is none of the engine's"),
        ("return 11", "an end without a word"),
    ],
)
def test_each_fault_is_seen(
    tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch, defect: str, says: str
) -> None:
    found = planted(tmp_path, defect, folders, monkeypatch)
    assert len(found) == 3 and all(says in fault for fault in found), found
