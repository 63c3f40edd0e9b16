"""Exports that stand beside results: each comes into an empty store, and its page names the sweep and its verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.store import Store
from tests.unit.store_sweeps import Clock

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EXPORTS = sorted(RESULTS.glob("*/*.assay"))


def test_there_are_some() -> None:
    assert len(EXPORTS) >= 2


@pytest.mark.parametrize("folder", sorted({file.parent for file in EXPORTS}), ids=lambda folder: folder.name)
def test_what_a_page_of_results_cites_is_in_its_exports(folder: Path, tmp_path: Path) -> None:
    """All of a folder into one store, those first that others rest on."""
    told = (RESULTS / f"{folder.name}-product.md").read_text(encoding="utf-8")
    cited = dict(re.findall(r"^\| `([\w-]+)` \| `swp_\w+` \| (\w+)", told, re.MULTILINE))
    assert sorted(cited) == sorted(file.stem for file in folder.glob("*.assay"))
    named = set(re.findall(r"swp_\w+", told))
    with Store.open(f"sqlite:///{tmp_path / 'one.sqlite'}", Clock()) as store:
        imported, absent = {}, set()
        for file in folder.glob("*.assay"):
            made = store.import_sweep(file)
            imported[made.sweep_id] = file.stem
            absent |= set(made.absent)
        assert not absent - set(imported), "exports rest on sweeps that are not beside them"
        assert set(imported) == named
        for sweep_id, name in imported.items():
            verdict = store.verdict(sweep_id)
            assert verdict is not None and verdict.outcome == cited[name]
            assert f"| `{name}` | `{sweep_id}` | {verdict.outcome} |" in told
