"""The engine as a child process, started as a parent does: request file, result fd, control fd held open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

import engine

ROOT = Path(engine.__file__).parents[1]
LINES = Draft202012Validator(json.loads((Path(engine.__file__).parent / "schemas" / "lines.json").read_text()))


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that has ended: its code, its lines, and what it printed."""

    code: int
    lines: list[dict[str, Any]]
    out: str
    err: str

    def last(self) -> dict[str, Any]:
        """The line that ends the stream."""
        assert sum(line["type"] in ("result", "error") for line in self.lines) == 1
        return self.lines[-1]


def environment() -> dict[str, str]:
    """What a parent lets through, and the tree that `engine` comes from."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {**kept, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def parent(folder: Path, document: object, *, text: str | None = None) -> Ended:
    """The command as a parent starts it: request file, result fd, control fd held open."""
    path = folder / "request.json"
    path.write_text(json.dumps(document) if text is None else text)
    read, write = os.pipe()
    control, hold = os.pipe()
    command = [sys.executable, "-P", "-m", "engine", "run", "--request", str(path)]
    command += ["--result-fd", str(write), "--control-fd", str(control)]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), pass_fds=(write, control), stdout=-1, stderr=-1, text=True
    ) as child:
        os.close(write)
        os.close(control)
        with os.fdopen(read) as stream:
            lines = [json.loads(line) for line in stream]
        out, err = child.communicate(timeout=120)
        os.close(hold)
    assert "Traceback" not in out + err, err
    for line in lines:
        assert not [e.message for e in LINES.iter_errors(line)], line["type"]
    return Ended(child.returncode, lines, out, err)
