"""A worker on a simulated card: certified runs, contamination by script, the spool, and the card given back."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import timeline
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.native import NativeAdapter
from jobs.model import ArmPlan, CellPlan, RunRecord, RunSettings
from jobs.provenance import tree_digest
from orchestrator.cards import ProbeError
from orchestrator.choose import simulated_cards
from orchestrator.outcome import RunOutcome, Spool
from orchestrator.scripted import ScriptedProbe
from orchestrator.worker import GpuWorker, WorkerSettings, WorkOrder
from reports.pictures import card

FAKE = Path(__file__).parents[1] / "fakes" / "engine_main.py"
(CARD,) = simulated_cards("test", 1)


class Bench:
    """A worker with its folders; `script` plays on its card, `wish` is what the stand-in engine does."""

    def __init__(self, tmp_path: Path, script: list[dict[str, Any]]) -> None:
        package = tmp_path / "arm" / "engine"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        shutil.copyfile(FAKE, package / "__main__.py")
        self.tree = tmp_path / "arm"
        self.halt = threading.Event()
        self.settings = WorkerSettings(tmp_path / "spool", tmp_path / "scratch", tmp_path / "locks")
        self.spool = Spool(self.settings.spool)
        probe = ScriptedProbe([CARD.uuid], time.monotonic, script)
        adapters = {"native": NativeAdapter(models=lambda _folder: "d" * 64)}
        self.worker = GpuWorker("w0", CARD, self.settings, probe, {"PATH": "/usr/bin:/bin"}, self.halt.is_set, adapters)

    def run(self, **wish: Any) -> RunOutcome:
        arm = ArmPlan(
            name="head",
            role="head",
            source="path",
            tree_digest=tree_digest(self.tree),
            python_path=str(self.tree),
            env={"FAKE_ENGINE": json.dumps(wish)},
        )
        cell = CellPlan(
            cell="m/p",
            model="m",
            model_path="/m",
            model_digest="",
            prompt="p",
            prompt_ids=(1,),
            settings=RunSettings(tokens=3, generations=2),
            arms=("head",),
        )
        return self.worker.run(WorkOrder("swp_1", 7, RunOrder("run_1", "att_1", 1, cell, arm, CARD.uuid, 20.0)))


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(tmp_path, getattr(request, "param", []))
    made.worker.start()
    yield made
    made.worker.close()


def test_a_run_comes_back_certified_and_spooled_until_acknowledged(bench: Bench) -> None:
    outcome = bench.run(sleep_s=0.3)
    assert (outcome.end, outcome.fence, outcome.worker) == ("measured", 7, "w0")
    assert outcome.record is not None
    certificate = outcome.record.certificate
    assert certificate is not None
    assert (certificate.verdict, certificate.grade, certificate.uuid) == ("clear", "scripted", CARD.uuid)
    assert certificate.samples >= 3
    assert certificate.during["sm_clock_mhz"] == {"min": 1980, "max": 1980, "median": 1980}
    along = timeline.read(certificate.during)
    assert along is not None
    assert along.timed_ms is not None, "the generations that the child told of"
    assert 0 <= along.timed_ms[0] <= along.timed_ms[1] <= along.end_ms + 1_000
    assert certificate.after["host"]["cpu_s"] > 0
    assert bench.spool.left_over("swp_1") == (outcome,)
    bench.worker.acknowledge("swp_1", "att_1")
    assert bench.spool.left_over("swp_1") == ()
    assert not (bench.settings.spool / "swp_1").exists()
    assert list(bench.settings.scratch.iterdir()) == []


def test_an_outcome_is_kept_though_the_folder_goes_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's last outcome is acknowledged in between, at either of two moments."""
    spool, mkdir, gone = Spool(tmp_path), Path.mkdir, 0

    def vanishing(self: Path, *words: Any, **more: Any) -> None:
        nonlocal gone
        mkdir(self, *words, **more)
        gone += 1
        if gone < 4:
            self.rmdir()
        if gone == 2:
            raise FileExistsError(self)

    monkeypatch.setattr(Path, "mkdir", vanishing)
    outcome = RunOutcome(
        sweep_id="swp_1", run_id="run_1", attempt_id="att_1", fence=1, worker="w0", end="failed", reason="x"
    )
    spool.put(outcome)
    assert gone == 4 and spool.left_over("swp_1") == (outcome,)


def test_an_outcome_may_be_taken_as_soon_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, rename = Spool(tmp_path), Path.rename
    taken: list[tuple[RunOutcome, ...]] = []

    def meanwhile(self: Path, target: Path) -> None:
        rename(self, target)
        taken.append(spool.left_over("swp_1"))
        spool.acknowledge("swp_1", "att_1")

    monkeypatch.setattr(Path, "rename", meanwhile)
    outcome = RunOutcome(sweep_id="swp_1", run_id="run_1", attempt_id="att_1", fence=1, worker="w0", end="failed")
    spool.put(outcome)
    assert taken == [(outcome,)] and not (tmp_path / "swp_1").exists()


def test_a_file_in_the_place_of_a_sweeps_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "swp_1").touch()
    outcome = RunOutcome(sweep_id="swp_1", run_id="run_1", attempt_id="att_1", fence=1, worker="w0", end="failed")
    with pytest.raises(FileExistsError):
        Spool(tmp_path).put(outcome)


@pytest.mark.parametrize("bench", [[{"processes": [{"pid": 4_000_001, "used_bytes": 5}]}]], indirect=True)
def test_a_card_that_is_dirty_before_the_spawn_starts_no_child(bench: Bench, tmp_path: Path) -> None:
    assert not bench.worker.look().clear
    outcome = bench.run(mark=str(tmp_path / "mark"))
    assert outcome.end == "contaminated"
    assert "4000001" in outcome.reason
    assert outcome.record is None
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "bench",
    [[{"at_s": 0.4, "processes": [{"pid": 4_000_001, "used_bytes": 5}]}, {"at_s": 1.2, "processes": []}]],
    indirect=True,
)
def test_an_intruder_during_the_run_contaminates_it_and_its_record_is_kept_apart(bench: Bench) -> None:
    outcome = bench.run(sleep_s=0.9)
    assert outcome.end == "contaminated"
    assert outcome.record is not None
    certificate = outcome.record.certificate
    assert certificate is not None
    (interval,) = certificate.intervals
    assert interval.pid == 4_000_001
    assert 0.1 < interval.end_s - interval.start_s < 1.0


@pytest.mark.parametrize("bench", [[{"at_s": 0.3, "error": "GPU has fallen off the bus"}]], indirect=True)
def test_field_15_a_card_lost_during_the_run_is_unknown_and_the_run_does_not_count(bench: Bench) -> None:
    outcome = bench.run(sleep_s=0.4)
    assert outcome.end == "contaminated"
    assert "fallen off the bus" in outcome.reason


@pytest.mark.parametrize("bench", [[{"at_s": 0.2, "throttle_bits": 0x40}]], indirect=True)
def test_a_throttled_run_counts_and_its_certificate_warns(bench: Bench) -> None:
    outcome = bench.run(sleep_s=0.3)
    assert outcome.end == "measured"
    assert outcome.record is not None
    assert outcome.record.certificate is not None
    assert outcome.record.certificate.verdict == "throttled"
    along = timeline.read(outcome.record.certificate.during)
    assert along is not None and along.timed_ms is not None
    slowed = {bool(bits) for bits in along.series["throttle_bits"]}
    assert slowed == {False, True}, "it says when, not only that"
    drawn = card.build(outcome.record.certificate, along)
    events = {bar.label: bar.reading for _, bars in drawn.groups for bar in bars}
    assert "hardware thermal slowdown, slowed" in events
    assert "clocks slowed: hardware thermal slowdown" in events


def test_a_failing_child_on_a_clear_card_is_failed_with_its_record(bench: Bench) -> None:
    outcome = bench.run(error={"code": 14, "kind": "out_of_memory", "message": "no room"})
    assert (outcome.end, outcome.retry) == ("failed", True)
    assert outcome.record is not None
    assert outcome.record.exit_code == 14


def test_secrets_that_a_child_tells_reach_neither_store_nor_reason(bench: Bench) -> None:
    said = "no card for HF_TOKEN=hunter2secret at postgresql://me:hunter2secret@db/assay"
    outcome = bench.run(error={"code": 16, "kind": "device", "message": said}, log=said)
    assert outcome.record is not None
    assert outcome.reason.startswith("device: no card for HF_TOKEN=[redacted]")
    assert "HF_TOKEN=[redacted]" in outcome.record.log_tail
    assert "hunter2secret" not in outcome.canonical()


def test_a_stop_cancels_the_run(bench: Bench) -> None:
    threading.Timer(0.5, bench.halt.set).start()
    begin_s = time.monotonic()
    assert bench.run(sleep_s=60).end == "cancelled"
    assert time.monotonic() - begin_s < 5


def test_a_card_belongs_to_one_worker_at_a_time(bench: Bench, tmp_path: Path) -> None:
    second = GpuWorker("w1", CARD, bench.settings, bench.worker.probe, {}, lambda: True)
    with pytest.raises(ProbeError, match="is held by process"):
        second.start()
    bench.worker.close()
    second.start()
    second.close()
    bench.worker.start()


def test_a_broken_spool_file_is_left_and_the_others_are_read(bench: Bench) -> None:
    outcome = bench.run()
    (bench.settings.spool / "swp_1" / "att_0.json").write_text('{"half": ')
    assert bench.spool.left_over("swp_1") == (outcome,)
    assert (bench.settings.spool / "swp_1" / "att_0.json").exists()


class Overflowing:
    """An adapter whose record holds what no JSON can, as a metric computed from good counters may."""

    def __init__(self, record: RunRecord, **changes: Any) -> None:
        self.record = record.model_copy(update=changes)

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        return RunResult("measured", self.record, leftovers=(4_000_001,))


def test_field_67_a_metric_that_overflowed_is_missing_and_flagged_in_the_record(bench: Bench) -> None:
    record = bench.run().record
    assert record is not None
    assert record.flags == ()
    bench.worker.adapters = {"native": Overflowing(record, metrics={"a": float("inf"), "b": 1.5})}
    outcome = bench.run()
    assert outcome.end == "measured"
    assert outcome.record is not None
    assert outcome.record.flags == ("metrics.a: inf",)
    assert outcome.record.metrics["b"] == 1.5
    assert bench.spool.left_over("swp_1") == (outcome,)
    assert outcome.record.certificate is not None
    assert outcome.record.certificate.after["ended"] == [4_000_001]


def test_a_record_that_cannot_be_kept_is_a_failed_run_and_the_worker_goes_on(bench: Bench) -> None:
    record = bench.run().record
    assert record is not None
    bench.worker.adapters = {"native": Overflowing(record, peak_rss_bytes=2**70)}
    outcome = bench.run()
    assert (outcome.end, outcome.retry, outcome.record) == ("failed", False, None)
    assert outcome.reason.startswith("protocol: ")
    assert bench.spool.left_over("swp_1") == (outcome,)


@pytest.mark.parametrize("bench", [[{"throttle_bits": 0x40}]], indirect=True)
def test_field_19_a_card_slowed_before_the_spawn_is_contaminated_with_the_reason(bench: Bench) -> None:
    outcome = bench.run()
    assert (outcome.end, outcome.record) == ("contaminated", None)
    assert "throttled" in outcome.reason
    assert "hardware thermal slowdown" in outcome.reason
