"""A sweep judged before its end stays open; one that is done is closed, and says what can be done instead."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.model import ArmPlan, CellPlan, Manifest, RunSettings
from jobs.store import Store
from orchestrator.cli import call
from orchestrator.resume import open_by_id, open_by_manifest

HARNESS = "h" * 64


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


def opened(url: str) -> Store:
    return Store.open(url, lambda: datetime.now(UTC))


def submitted(url: str) -> tuple[str, Manifest]:
    base = ArmPlan(name="base", role="base", source="installed", tree_digest="t")
    arms = (base, base.model_copy(update={"name": "head", "role": "head"}))
    cell = CellPlan(
        cell="m/p",
        model="m",
        model_path="/m",
        model_digest="d",
        prompt="p",
        prompt_ids=(1,),
        settings=RunSettings(tokens=3, generations=1),
        arms=("base", "head"),
    )
    manifest = Manifest(name="early", arms=arms, cells=(cell,))
    store = opened(url)
    sweep_id = store.submit(manifest, HARNESS, "test")
    store.close()
    return sweep_id, manifest


def test_judging_a_sweep_with_runs_pending_keeps_the_verdict_and_leaves_it_open(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id, manifest = submitted(url)
    assert call(["judge", sweep_id, "--store", url]) == 3
    assert call(["judge", sweep_id, "--store", url]) == 3
    store = opened(url)
    assert store.sweep(sweep_id).state == "open"
    verdict = store.verdict(sweep_id)
    assert verdict is not None
    assert verdict.exit_code == 3
    assert open_by_id(store, sweep_id, HARNESS, "")[0] == sweep_id
    assert open_by_manifest(store, manifest, HARNESS, "") == sweep_id
    store.close()
    capsys.readouterr()
    assert call(["status", "--store", url]) == 0
    assert "exit 3" in capsys.readouterr().out


def test_a_sweep_whose_runs_are_all_settled_is_closed_by_its_verdict_and_not_resumed(url: str) -> None:
    sweep_id, manifest = submitted(url)
    assert call(["judge", sweep_id, "--store", url]) == 3
    store = opened(url)
    claim = store.claim_block(sweep_id, "w", 60)
    assert claim is not None
    for run in claim.pending:
        store.finish_run(run.run_id, "exhausted", "no attempt left", fence=claim.fence)
    store.release_block(claim.block_id, claim.fence)
    assert call(["judge", sweep_id, "--store", url]) != 0
    assert store.sweep(sweep_id).state == "judged"
    words = " --store a.db"
    for resume in (
        lambda: open_by_id(store, sweep_id, HARNESS, words),
        lambda: open_by_manifest(store, manifest, HARNESS, words),
    ):
        with pytest.raises(SpecError) as told:
            resume()
        assert f"sweep {sweep_id} is judged already: MISSING, exit 3; it has no run left to make" in str(told.value)
        assert f"assay report {sweep_id} --store a.db" in str(told.value)
        assert "run the sweep anew: assay run SWEEP without --resume" in str(told.value)
    store.close()


def test_the_same_verdict_given_again_for_good_closes_the_sweep(url: str) -> None:
    sweep_id, _ = submitted(url)
    assert call(["judge", sweep_id, "--store", url]) == 3
    store = opened(url)
    verdict = store.verdict(sweep_id)
    assert verdict is not None
    first = store.write_verdict(sweep_id, verdict, verdict.input_digest, closes=False)
    assert store.sweep(sweep_id).state == "open"
    assert store.write_verdict(sweep_id, verdict, verdict.input_digest) == first
    assert store.sweep(sweep_id).state == "judged"
    store.close()


@pytest.mark.parametrize("words", [("gate",), ("gate", "--json"), ("report",), ("explain", "m/p")])
def test_a_sweep_that_is_not_judged_is_no_answer_and_the_way_on_names_its_store(
    url: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Exit 2 would say that the question could not be understood."""
    sweep_id, _ = submitted(url)
    assert call([words[0], sweep_id, *words[1:], "--store", url]) == 3
    told = capsys.readouterr().err
    assert f"sweep {sweep_id} is not judged yet: 4 of 4 runs are pending" in told
    assert f"(go on with: assay run {sweep_id} --resume --store {url})" in told


def test_a_sweep_that_is_being_run_is_no_answer_either(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_id, _ = submitted(url)
    store = opened(url)
    claim = store.claim_block(sweep_id, "w", 60)
    assert claim is not None
    store.open_attempt(claim.pending[0].run_id, claim.fence, "w", "SIM-0")
    store.close()
    assert call(["judge", sweep_id, "--store", url]) == 3
    told = capsys.readouterr().err
    assert "is being run: 4 of 4 runs pending (wait for it; after a crash go on with: " in told
    assert f"assay run {sweep_id} --resume --store {url})" in told
