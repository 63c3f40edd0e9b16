"""Shipped sweeps at full size would prove something: planned alone on hollow models, witnesses and equations hold.

What a card adds is arithmetic and time; what streams, grows and is captured follows from the plan.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import zoo
from engine.config import parse_request
from engine.journal import Collected
from engine.run import execute
from jobs import expressions
from jobs.adapters.native import request_document
from jobs.model import ArmPlan, CellPlan, Manifest
from jobs.provenance import ModelSource, ResolvedModel
from jobs.spec import load, plan
from tests.unit.engine_rig import Outcome
from tests.unit.test_jobs_spec import FakeResolver
from tests.unit.test_jobs_spec_sizes import SHIPPED

pytestmark = pytest.mark.slow


class Hollow(FakeResolver):
    """Models as they are asked for, without their weights."""

    folder = Path()

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        assert source.build is not None
        out = self.folder / name
        facts = zoo.build(source.build, out, hollow=True, poured=True, skew=source.skew, cache_dir=self.folder)
        return ResolvedModel(out, facts.model_digest)


def planned(cell: CellPlan, arm: ArmPlan) -> Outcome:
    """One run without arithmetic, of the plan that a card has."""
    asked = request_document(cell, arm, None) | {"arithmetic": "none", "device": "sim"}
    asked["config"] = {"target": "fused", **asked["config"]}
    if "35b" in str(zoo.folder.read_zoo(Path(cell.model_path))["name"]):
        asked["routing"] = "seed:1"
    lines = Collected()
    now = iter(range(0, 1 << 62, 1000))
    return Outcome(execute(parse_request(asked), lines, lambda: next(now)), lines)


def some(manifest: Manifest, name: str) -> list[CellPlan]:
    """Cells that differ in what their witnesses are about."""
    chosen = {"residency": (1, 3), "addresses": (0, 3, 4)}.get(name, (0, -1))
    return [manifest.cells[index] for index in chosen]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_witnesses_hold_at_full_size(name: str, checkout: Path, tmp_path: Path) -> None:
    resolver = Hollow()
    resolver.folder = tmp_path
    manifest = plan(load(checkout / f"sweeps/{name}.yaml", "full"), resolver)
    for cell in some(manifest, name):
        for arm in manifest.arms:
            outcome = planned(cell, arm)
            assert outcome.code == 0, (cell.cell, arm.name, outcome.lines.lines[-1])
            assert outcome.broken_equations() == [], (cell.cell, arm.name)
            told = {**outcome.facts, **outcome.counters}
            due = [row.expr for row in cell.witnesses if not row.arms or arm.name in row.arms]
            for expr in (*due, *(row.expr for row in cell.invariants)):
                assert expressions.holds(expr, told), (cell.cell, arm.name, expr)
