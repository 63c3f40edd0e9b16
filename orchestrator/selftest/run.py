"""Runs what is planted and clean twins of it, a sweep each, and compares each verdict with the one that is due."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.provenance import engine_files, own_root
from jobs.verdict import Outcome, Verdict
from orchestrator.scripted import State
from orchestrator.selftest.defects import CLEAN, DEFECTS, Defect, Model, Scenario
from orchestrator.selftest.models import make_mixture, make_tiny
from orchestrator.selftest.stage import Stage

PROMPT = (1, 17, 42, 99)
OTHER_PROMPT = (3, 5, 8)
TOKENS = 8
GRANULE = 4096
FOREIGN: tuple[State, ...] = ({"at_s": 0.6, "processes": [{"pid": 4_000_000, "used_bytes": 8 << 30}]},)
"""Somebody's program comes onto the card while the first run is on it, and stays."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One sweep of the self-test: what was due, and what came. `kind` is the class of defect, "clean" for none."""

    name: str
    kind: str
    due: Outcome
    due_code: int
    outcome: Outcome
    code: int
    said: str
    is_right: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that was tried."""

    tried: tuple[Tried, ...]

    @property
    def planted(self) -> tuple[Tried, ...]:
        """The sweeps with a defect."""
        return tuple(one for one in self.tried if one.kind != "clean")

    @property
    def clean(self) -> tuple[Tried, ...]:
        """The sweeps of an engine against itself."""
        return tuple(one for one in self.tried if one.kind == "clean")

    @property
    def missed(self) -> tuple[Tried, ...]:
        """Defects that did not get their verdict."""
        return tuple(one for one in self.planted if not one.is_right)

    @property
    def alarms(self) -> tuple[Tried, ...]:
        """Clean sweeps that were found fault with."""
        return tuple(one for one in self.clean if not one.is_right)

    @property
    def is_good(self) -> bool:
        """Whether every defect was found under its name, and nothing else was."""
        return not self.missed and not self.alarms

    def kinds(self) -> Iterator[tuple[str, int, int]]:
        """Each class of defect, with how many were found and planted."""
        for kind in dict.fromkeys(one.kind for one in self.planted):
            of_kind = [one for one in self.planted if one.kind == kind]
            yield kind, sum(one.is_right for one in of_kind), len(of_kind)


def chosen(only: Sequence[str]) -> tuple[tuple[Defect, ...], tuple[str, ...]]:
    """The defects and clean runs whose names hold one of these words; all without a word.

    Raises SpecError for a word that none holds.
    """
    for word in only:
        if not any(word in name for name in (*CLEAN, *(defect.name for defect in DEFECTS))):
            names = ", ".join((*(defect.name for defect in DEFECTS), *CLEAN))
            raise SpecError(f"nothing in the self-test is named {word!r}", f"known: {names}")

    def is_wanted(name: str) -> bool:
        return not only or any(word in name for word in only)

    return tuple(d for d in DEFECTS if is_wanted(d.name)), tuple(name for name in CLEAN if is_wanted(name))


@dataclass(slots=True)
class Bench:
    """Trees, models and the stage of one self-test."""

    stage: Stage
    engine: Path  # the folder that holds the engine to plant in

    @classmethod
    def on(cls, stage: Stage) -> Bench:
        """A bench with a copy of the engine that is installed."""
        return cls(stage, _copied(own_root(), stage.folder / "trees" / "base"))

    def plant(self, defect: Defect) -> Tried:
        """Run one defect."""
        head = _copied(self.engine, self._tree(defect.name))
        for patch in defect.patches:
            patch.apply(head / "engine")
        begin_s = time.monotonic()
        verdict = self._swept(defect.name, defect.scenario, head, defect)
        told = [f.message for f in verdict.findings if f.outcome == defect.outcome and defect.says in f.message]
        is_right = (verdict.outcome, verdict.exit_code) == (defect.outcome, defect.exit_code) and bool(told)
        said = told[0] if told else verdict.headline
        return _tried(defect.name, defect.kind, (defect.outcome, defect.exit_code), verdict, said, is_right, begin_s)

    def agree(self, name: str) -> Tried:
        """Run the engine against a copy of itself."""
        begin_s = time.monotonic()
        verdict = self._swept(name, CLEAN[name], _copied(self.engine, self._tree(name)))
        is_right = (verdict.outcome, verdict.exit_code, verdict.findings) == ("PASS", 0, ())
        return _tried(name, "clean", ("PASS", 0), verdict, verdict.headline, is_right, begin_s)

    def _swept(self, name: str, scenario: Scenario, head: Path, defect: Defect | None = None) -> Verdict:
        stimulus = defect.stimulus if defect else None
        sweep = self._sweep(scenario, head, two_cells=stimulus == "stopped driver")

        def meddle(manifest: Manifest) -> None:
            if stimulus == "stale build":
                place = next(arm.python_path for arm in manifest.arms if arm.name == "head")
                assert place is not None
                for file in engine_files(self.engine):
                    shutil.copyfile(file, Path(place) / file.relative_to(self.engine))

        done = self.stage.play(
            _slug(name),
            json.dumps(sweep),
            card=FOREIGN if stimulus == "foreign process" else (),
            meddle=meddle,
            cells=1 if stimulus == "stopped driver" else None,
        )
        for report in (done.comment, done.page, done.document):
            assert report.stat().st_size, report
        return done.verdict

    def _sweep(self, scenario: Scenario, head: Path, *, two_cells: bool) -> dict[str, Any]:
        prompts = {"one": {"ids": list(PROMPT)}, **({"two": {"ids": list(OTHER_PROMPT)}} if two_cells else {})}
        arms = {"base": {"source": f"path:{self.engine}"}, "head": {"source": f"path:{head}"}}
        axes = {name: [value] for name, value in {"granule": GRANULE, **scenario.config}.items()}
        return {
            "sweep": "selftest",
            "models": {scenario.model: {"path": str(self._model(scenario.model))}},
            "prompts": prompts,
            "arms": arms,
            "matrix": axes,
            "run": {"tokens": TOKENS, "generations": 2, "ignore_eos": True, "device": "sim"},
            "witnesses": [{"expr": scenario.witness}],
            "limits": {"attempts": 1, "contamination_reruns": 0, "queue_timeout_s": 3, "run_timeout_s": 120},
        }

    def _model(self, model: Model) -> Path:
        folder = self.stage.folder / "models" / model
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            (make_tiny if model == "tiny" else make_mixture)(folder)
        return folder

    def _tree(self, name: str) -> Path:
        return self.stage.folder / "trees" / _slug(name)


def selftest(
    bench: Bench, defects: Sequence[Defect], clean: Sequence[str], tell: Callable[[Tried], None] = lambda _one: None
) -> Report:
    """Try all of these; `tell` hears of each. Raises Stopped when the stage is."""
    tried: list[Tried] = []
    for one in chain(map(bench.plant, defects), map(bench.agree, clean)):
        tried.append(one)
        tell(one)
    return Report(tuple(tried))


def _tried(
    name: str, kind: str, due: tuple[Outcome, int], verdict: Verdict, said: str, is_right: bool, begin_s: float
) -> Tried:
    taken_s = time.monotonic() - begin_s
    return Tried(name, kind, *due, verdict.outcome, verdict.exit_code, said, is_right, taken_s)


def _copied(source: Path, target: Path) -> Path:
    """The engine below `source` once more, below `target`."""
    for file in engine_files(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return target


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-").replace(",", "")
