"""A folder to stand in, and synthetic sweeps put into its store and judged: a plugin for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.model import JudgeInput
from orchestrator.conclude import judge_sweep
from tests.unit.stored_documents import Put, opened, put


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with caches of its own and room for the default store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = tmp_path / "here"
    (place / ".assay").mkdir(parents=True)
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def stored(here: Path) -> Put:
    """Puts a document into the default store and judges it; the sweep's id."""

    def made(doc: JudgeInput) -> str:
        with opened(here) as store:
            sweep_id = put(store, doc)
            judge_sweep(store, sweep_id)
            return sweep_id

    return made
