"""A store with a verdict in it, made without running anything."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.model import ArmPlan, CellPlan, Manifest, RunSettings
from jobs.store import Store
from orchestrator.conclude import judge_sweep


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with one judged sweep, whose runs never ran; the sweep's id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / ".assay").mkdir()
    store = Store.open(f"sqlite:///{tmp_path}/.assay/store.db", lambda: datetime.now(UTC))
    arms = tuple(ArmPlan(name=role, role=role, source="checkout") for role in ("base", "head"))
    cell = CellPlan(
        cell="toy/p", model="toy", model_path="/models/toy", model_digest="d", prompt="p", prompt_ids=(1,),
        settings=RunSettings(tokens=4), arms=("base", "head"),
    )  # fmt: skip
    sweep_id = store.submit(Manifest(name="sweep", arms=arms, cells=(cell,)), "h", "1")
    judge_sweep(store, sweep_id)
    store.close()
    return sweep_id
