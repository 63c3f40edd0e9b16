"""The harness of docs/adapters.md as it stands there, run against an engine in a repository by the sweep file there."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from engine.zoo.tiny import build_tiny
from jobs.provenance import own_root
from orchestrator.conclude import Concluded
from orchestrator.selftest.stage import Stage

ENGINE = """\
#!/bin/sh
ids=
for id in $2; do ids="$ids,$((id * $(wc -c < "$1") % 97))"; done
seq -s, 1 "$3" | sed "s/^[^,]*,[^,]*,[^,]*,[^,]*/${ids#,}/"
"""


@pytest.fixture
def repository(checkout: Path, tmp_path: Path) -> Path:
    """Somebody's engine with the harness and the sweep file of the page, committed."""
    page = (checkout / "docs/adapters.md").read_text()
    here = tmp_path / "theirs"
    here.mkdir()
    [harness] = re.findall(r"```text\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    assert len(harness.splitlines()) <= 10
    for name, text in (("bench.sh", harness), ("my-engine", ENGINE)):
        (here / name).write_text(text)
        (here / name).chmod(0o755)
    (here / "model.gguf").write_bytes(b"GGUF" * 100)
    (here / "my-engine.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "init.defaultBranch=main")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "one")):
        subprocess.run(["git", *who, *words], cwd=here, check=True)
    return here


def swept(repository: Path, tmp_path: Path) -> Concluded:
    return Stage(tmp_path / "stage", {"PATH": os.environ["PATH"]}).play("theirs", repository / "my-engine.yaml")


def test_a_shell_harness_of_ten_lines_is_compared(repository: Path, tmp_path: Path) -> None:
    verdict = swept(repository, tmp_path).verdict
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0), [f.message for f in verdict.findings]
    assert [row.klass for row in verdict.cells[0].identity if row.what == "pair"] == ["IDENTICAL"]
    assert verdict.cells[0].arms[0].stop_reasons == {"length": 6}


MIXED = """\
sweep: two-engines
models: {{tiny: {{path: tiny}}}}
prompts: {{p: {{ids: [1, 17, 42, 99]}}}}
arms:
  base: {{source: "path:{ours}"}}
  head: {{source: "path:theirs", adapter: command, command: "./bench.sh", counters: []}}
varies: [program]
run: {{tokens: 8, generations: 2, warmups: 1, ignore_eos: true}}
gate: {{exact: off}}
"""


@pytest.mark.parametrize(("shift", "outcome", "code"), [(0, "PASS", 0), (1, "VIOLATION", 1)])
def test_an_engine_of_theirs_stands_beside_ours(
    repository: Path, tmp_path: Path, shift: int, outcome: str, code: int
) -> None:
    """On the same model: it gives what the model is known to give, or another id at one place."""
    folder = build_tiny(7, tmp_path / "tiny").folder
    known = json.loads((folder / "zoo.json").read_text())["facts"]["greedy_ids"]
    ids = [*known[:7], known[7] + shift]
    (repository / "my-engine").write_text(f"#!/bin/sh\necho {','.join(map(str, ids))}\n")
    (tmp_path / "mixed.yaml").write_text(MIXED.format(ours=own_root()))
    verdict = Stage(tmp_path / "stage", os.environ).play("mixed", tmp_path / "mixed.yaml").verdict
    assert (verdict.outcome, verdict.exit_code) == (outcome, code), [f.message for f in verdict.findings]


def test_a_harness_in_cpp_is_built_and_compared(checkout: Path, repository: Path, tmp_path: Path) -> None:
    [harness] = re.findall(r"```cpp\n(.*?)```", (checkout / "docs/adapters.md").read_text(), re.DOTALL)
    assert len(harness.splitlines()) <= 10
    (repository / "bench.cc").write_text(harness)
    stub = '#include <cstdlib>\n#include <string>\ninline std::string ids_of() { return "7,8,9,10,11,12,13,14"; }\n'
    (repository / "my_engine.h").write_text(stub)
    sweep = repository / "my-engine.yaml"
    build = "build: {command: c++ -O2 -o bench bench.cc, outputs: [bench]}, command: ./bench"
    text = sweep.read_text().replace("command: ./bench.sh", build).replace("git:HEAD", "path:.")
    sweep.write_text(text)
    verdict = swept(repository, tmp_path).verdict
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0), [f.message for f in verdict.findings]
    assert verdict.cells[0].arms[0].stop_reasons == {"length": 6}


def test_a_changed_engine_is_found_by_its_tokens(repository: Path, tmp_path: Path) -> None:
    (repository / "my-engine").write_text(ENGINE.replace("% 97", "% 89"))
    done = swept(repository, tmp_path)
    assert (done.verdict.outcome, done.verdict.exit_code) == ("UNADJUDICATED", 1), "it says no gaps, and was not forced"
    assert "UNADJUDICATED" in done.comment.read_text()
