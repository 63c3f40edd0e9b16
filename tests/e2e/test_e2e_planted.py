"""Gates that have been seen red: planted heads, given as git refs, each found under its own name.

The defects are source patches in tests/e2e/planted, committed into a temporary clone: no fault switch in the product.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHECKOUT = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
SWEEP = """\
sweep: planted
models:
  tiny: {{build: tiny, seed: 7}}
prompts:
  short: {{ids: [1, 17, 42, 99]}}
arms:
  base: {{source: "git:base"}}
  head: {{source: "git:{head}"}}
matrix:
  model: [tiny]
  prompt: [short]
  weight_budget: ["50%"]
  granule: [4096]
  policy: [stable]
run: {{tokens: 8, generations: 3, ignore_eos: true}}
witnesses:
  - {{expr: "page_ins > 0"}}
"""


class Swept(NamedTuple):
    """A finished `assay run`, its verdict document and its comment."""

    done: subprocess.CompletedProcess[str]
    verdict: dict[str, Any]
    comment: str


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a repository of its own: tag `base`, and a branch with each planted defect."""
    clone = tmp_path_factory.mktemp("planted") / "clone"
    clone.mkdir()
    listed = _git(CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "engine").split("\0")
    for name in filter(None, listed):
        if (CHECKOUT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((CHECKOUT / name).read_bytes())
    _git(clone, "init", "-q", "-b", "base")
    _commit(clone, "the engine as it is")
    for patch in sorted(PLANTED.glob("*.patch")):
        _git(clone, "checkout", "-q", "-b", patch.stem, "base")
        _git(clone, "apply", str(patch))
        _commit(clone, patch.read_text().splitlines()[0])
    _git(clone, "checkout", "-q", "base")
    return clone


@pytest.fixture(scope="module")
def swept(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Swept]:
    """A sweep of the clone with a head, run when it is first asked for."""
    return functools.cache(lambda head: run_sweep(clone, tmp_path_factory.mktemp(head), head))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("head", "outcome", "code", "says"),
    [
        ("retained_slot_reused", "VIOLATION", 1, "generations 2, 3 differ, 1 is equal"),
        pytest.param("stops_early", "SHORT", 1, "3", marks=pytest.mark.slow),
        pytest.param("never_streams", "VACUOUS", 3, "page_ins > 0", marks=pytest.mark.slow),
        pytest.param("ignores_budget", "NOT_COMPARABLE", 3, "the run held itself to", marks=pytest.mark.slow),
        pytest.param("base", "PASS", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_planted_head_is_found_by_name(
    swept: Callable[[str], Swept], head: str, outcome: str, code: int, says: str
) -> None:
    """Each defect gives its own outcome and exit code, the report names what was seen; base against itself passes."""
    done, verdict, comment = swept(head)
    assert done.returncode == code, done.stdout + done.stderr
    assert verdict["outcome"] == outcome, json.dumps(verdict["findings"], indent=1)
    assert "Traceback" not in done.stderr
    if says:
        assert says in " ".join(f["message"] for f in verdict["findings"] if f["outcome"] == outcome)
        assert outcome in comment
    else:
        assert verdict["findings"] == []


@pytest.mark.timeout(300)
def test_each_arm_ran_the_engine_of_its_own_ref(clone: Path, swept: Callable[[str], Swept]) -> None:
    """The records of base and head name different engine trees, and none of them is the checkout under test."""
    verdict = swept("stops_early").verdict
    arms = {a["arm"]: a for a in verdict["cells"][0]["arms"]}
    digests = {arms["base"]["engine_digest"], arms["head"]["engine_digest"]}
    assert len(digests) == 2
    assert all(len(d) == 64 for d in digests)
    commits = {name: _git(clone, "rev-parse", ref).strip() for name, ref in (("base", "base"), ("head", "stops_early"))}
    assert {name: arms[name]["commit"] for name in commits} == commits


def run_sweep(clone: Path, tmp_path: Path, head: str) -> Swept:
    """`assay run` in the clone with that head."""
    sweep = clone / f"{head}.yaml"
    sweep.write_text(SWEEP.format(head=head))
    command = [str(Path(sys.executable).with_name("assay")), "run", str(sweep)]
    command += ["--store", f"sqlite:///{tmp_path}/store.db", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=280, check=False)
    verdict = tmp_path / "out" / "verdict.json"
    assert verdict.is_file(), done.stdout + done.stderr
    return Swept(done, json.loads(verdict.read_text()), (tmp_path / "out" / "comment.md").read_text())


def _commit(folder: Path, why: str) -> None:
    _git(folder, "add", "-A")
    _git(folder, "-c", "user.name=test", "-c", "user.email=test@example.invalid", "commit", "-qm", why)


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout
