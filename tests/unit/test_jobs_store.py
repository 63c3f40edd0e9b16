"""Submitting, finding, logging and judging: what a sweep is in the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

import pytest

from jobs.errors import Conflict, SpecError, StoreError
from jobs.model import ArmPlan, CellPlan, Manifest, RunSettings, Stamp
from jobs.store import Store
from jobs.verdict import Finding, Verdict

pytest_plugins = ("tests.unit.jobs_store_cases",)

START = datetime(2026, 11, 30, 5, 0, tzinfo=UTC)


@dataclass
class Clock:
    now: datetime = START

    def __call__(self) -> datetime:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(store_url: str, clock: Clock) -> Iterator[Store]:
    opened = Store.open(store_url, clock)
    yield opened
    opened.close()


def manifest(name: str = "sweep", cells: int = 1, blocks: int = 1) -> Manifest:
    arms = tuple(ArmPlan(name=role, role=role, source="checkout") for role in ("base", "null", "head"))
    plans = tuple(
        CellPlan(
            cell=f"toy/p{number}",
            model="toy",
            model_path="/models/toy",
            model_digest="d",
            prompt=f"p{number}",
            prompt_ids=(1, number),
            settings=RunSettings(tokens=4),
            arms=("base", "null", "head"),
            blocks=blocks,
        )
        for number in range(cells)
    )
    return Manifest(name=name, arms=arms, cells=plans)


def verdict(sweep_id: str, outcome: str = "PASS", findings: tuple[Finding, ...] = ()) -> Verdict:
    return Verdict(
        sweep="sweep",
        outcome=outcome,
        exit_code=1 if findings else 0,
        headline="h",
        next_step="n",
        findings=findings,
        cells_expected=1,
        cells_judged=1,
        input_digest="i",
        stamp=Stamp(sweep_id=sweep_id, harness_digest="h", harness_version="v"),
    )


# ---- submission --------------------------------------------------------------------------------------------------


def test_a_submission_lays_out_every_run(store: Store) -> None:
    sweep_id = store.submit(manifest(cells=3, blocks=2), "harness", "0.1")
    assert store.pending(sweep_id).pending == 3 * 2 * 6
    assert store.pending(sweep_id).runs == 36
    document = store.judge_input(sweep_id)
    assert [cell.plan.cell for cell in document.cells] == ["toy/p0", "toy/p1", "toy/p2"]
    runs = document.cells[1].runs
    turned = [["base", "null", "head", "head", "null", "base"], ["null", "head", "base", "base", "head", "null"]]
    assert [run.arm for run in runs] == [arm for block in turned for arm in block]
    assert [(run.block, run.position) for run in runs] == [(block, place) for block in (0, 1) for place in range(6)]
    assert all((run.state, run.record, run.attempts) == ("pending", None, ()) for run in runs)


def test_the_manifest_comes_back_as_it_was(store: Store) -> None:
    one = manifest(cells=2)
    sweep_id = store.submit(one, "harness", "0.1", request=7)
    document = store.judge_input(sweep_id)
    assert store.manifest(sweep_id) == document.manifest == one
    assert document.manifest_digest == one.digest()
    assert (document.stamp.request, document.stamp.harness_digest, document.stamp.base_source) == (
        7, "harness", "checkout",
    )  # fmt: skip
    assert document.stamp.created_at == "2026-11-30T05:00:00+00:00"
    assert document.digest() == store.judge_input(sweep_id).digest()


def test_a_resend_is_the_same_sweep(store: Store, clock: Clock) -> None:
    first = store.submit(manifest(), "harness", "0.1", key="ci-17")
    clock.pass_s(60)
    assert store.submit(manifest(), "harness", "0.1", key="ci-17") == first
    assert len(store.sweeps()) == 1
    assert store.pending(first).runs == 6


def test_another_key_is_another_sweep(store: Store) -> None:
    assert store.submit(manifest(), "harness", "0.1", key="a") != store.submit(manifest(), "harness", "0.1", key="b")
    without = store.submit(manifest(), "harness", "0.1")
    assert store.submit(manifest(), "harness", "0.1") == without
    assert len(store.sweeps()) == 3


def test_a_differing_resend_is_loud(store: Store) -> None:
    store.submit(manifest(), "harness", "0.1", key="ci-17")
    with pytest.raises(Conflict, match="with another manifest") as refused:
        store.submit(manifest("other"), "harness", "0.1", key="ci-17")
    assert refused.value.exit_code == 2, "whoever submits has to choose: no fault of store or host"
    with pytest.raises(Conflict, match="with another version of the harness"):
        store.submit(manifest(), "harness 2", "0.2", key="ci-17")
    assert len(store.sweeps()) == 1


def test_the_newest_open_sweep_is_found_again(store: Store, clock: Clock) -> None:
    one = manifest()
    assert store.find_open(one.digest(), "harness") is None
    old = store.submit(one, "harness", "0.1", key="a")
    clock.pass_s(1)
    new = store.submit(one, "harness", "0.1", key="b")
    assert store.find_open(one.digest(), "harness") == new
    store.write_verdict(new, verdict(new), "i")
    assert store.find_open(one.digest(), "harness") == old
    assert store.find_open(one.digest(), "another harness") is None


# ---- ids and lists -----------------------------------------------------------------------------------------------


def test_every_kind_of_id_answers_to_its_beginning(store: Store) -> None:
    sweep_id = store.submit(manifest(), "harness", "0.1")
    claim = store.claim_block(sweep_id, "w", 60)
    assert claim is not None
    attempt = store.open_attempt(claim.runs[0].run_id, claim.fence, "w", "SIM-0")
    for full in (sweep_id, claim.block_id, claim.runs[0].run_id, attempt.attempt_id):
        assert store.resolve_id(full) == full
        assert store.resolve_id(full.upper()) == full
        assert store.resolve_id(full[4:]) == full
    assert store.resolve_id(sweep_id[:9]) == sweep_id
    assert store.resolve_id(sweep_id[4:9], "swp") == sweep_id
    assert store.sweep(sweep_id[:8]).id == sweep_id


@pytest.mark.parametrize("prefix", ["", "swp_9", "zzz", "xyz_01", "%", "swp_%", "_", "'; DROP TABLE sweep; --"])
def test_an_id_that_is_nobody_s_is_said(store: Store, prefix: str) -> None:
    store.submit(manifest(), "harness", "0.1")
    with pytest.raises(SpecError, match="no id begins with") as caught:
        store.resolve_id(prefix)
    assert caught.value.exit_code == 2


def test_an_id_of_another_kind_is_named_with_those_that_may_be_meant(store: Store) -> None:
    sweep_id = store.submit(manifest(), "harness", "0.1")
    claim = store.claim_block(sweep_id, "w", 60)
    assert claim is not None
    runs = [f"{one.run_id} ({one.arm})" for one in sorted(claim.runs, key=lambda one: one.run_id)]
    for told in (sweep_id, sweep_id[:9], sweep_id.upper()):
        with pytest.raises(SpecError, match=f"^{sweep_id} is a sweep, and a run is asked for") as caught:
            store.resolve_id(told, "run")
        assert caught.value.remedy == f"its runs: {', '.join(runs)}"
    for one, name in ((claim.runs[0].run_id, "run"), (claim.block_id, "block")):
        with pytest.raises(SpecError, match=f"^{one} is a {name}, and a sweep is asked for") as caught:
            store.resolve_id(one, "swp")
        assert caught.value.remedy == f"its sweep: {sweep_id}"


def test_an_ambiguous_beginning_lists_the_candidates(store: Store, clock: Clock) -> None:
    ids = []
    for key in "ab":
        ids.append(store.submit(manifest(), "harness", "0.1", key=key))
        clock.pass_s(0.001)
    with pytest.raises(SpecError, match=f"several ids: {ids[0]}, {ids[1]}"):
        store.resolve_id("swp_0")


def test_sweeps_are_listed_newest_first_and_bounded(store: Store, clock: Clock) -> None:
    made = []
    for number in range(4):
        made.append(store.submit(manifest(f"s{number}"), "harness", "0.1"))
        clock.pass_s(1)
    assert [row.id for row in store.sweeps(limit=3)] == made[:0:-1]
    assert [row.name for row in store.sweeps()] == ["s3", "s2", "s1", "s0"]


def test_field_71_times_come_back_in_utc_and_in_order(store: Store, clock: Clock) -> None:
    """Written at -08:00 and +10:00, over a change of clocks: SQLite drops zones, the order must not suffer."""
    given = [
        datetime(2026, 10, 25, 2, 30, tzinfo=timezone(timedelta(hours=2))),
        datetime(2026, 10, 25, 2, 15, tzinfo=timezone(timedelta(hours=1))),  # 45 minutes later
        datetime(2026, 10, 24, 18, 0, tzinfo=timezone(timedelta(hours=-8))),
        datetime(2026, 10, 25, 13, 0, tzinfo=timezone(timedelta(hours=10))),
    ]
    for number, moment in enumerate(given):
        clock.now = moment
        store.submit(manifest(f"s{number}"), "harness", "0.1")
    rows = store.sweeps()
    assert [row.name for row in rows] == ["s3", "s2", "s1", "s0"]
    assert [row.created_at for row in rows] == given[::-1]
    assert all(row.created_at.utcoffset() == timedelta(0) for row in rows)


def test_a_naive_time_does_not_enter(store: Store, clock: Clock) -> None:
    clock.now = datetime(2026, 11, 30)  # noqa: DTZ001 - the point of the test
    with pytest.raises(AssertionError, match="naive"):
        store.submit(manifest(), "harness", "0.1")


# ---- events ------------------------------------------------------------------------------------------------------


def test_what_happened_is_told_in_order(store: Store) -> None:
    sweep_id = store.submit(manifest(), "harness", "0.1")
    store.log_event(sweep_id, "waiting", "card GPU-1 is in use by pid 7", subject="blk_x", worker="w")
    store.log_event(sweep_id, "note", "NUL \0 and half a pair \ud800")
    told = store.events(sweep_id)
    assert [event.kind for event in told] == ["submitted", "waiting", "note"]
    assert (told[1].subject, told[1].worker, told[1].at) == ("blk_x", "w", START)
    assert told[2].message == "NUL \ufffd and half a pair \ufffd"
    assert [event.kind for event in store.events(sweep_id, after=told[0].seq, limit=1)] == ["waiting"]


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_a_verdict_is_kept_and_ends_the_sweep(store: Store, clock: Clock) -> None:
    sweep_id = store.submit(manifest(), "harness", "0.1")
    assert store.verdict(sweep_id) is None
    found = Finding(outcome="VIOLATION", cell="toy/p0", message="differs at 3", exit_code=1, gate="identity")
    clock.pass_s(5)
    written = verdict(sweep_id, "VIOLATION", (found,))
    first = store.write_verdict(sweep_id, written, "i")
    assert store.verdict(sweep_id) == written
    row = store.sweep(sweep_id)
    assert (row.state, row.judged_at) == ("judged", START + timedelta(seconds=5))
    assert store.write_verdict(sweep_id, written, "i") == first
    assert [event.message for event in store.events(sweep_id) if event.kind == "verdict"] == ["VIOLATION, exit 1"]


def test_a_later_verdict_stands_beside_the_earlier_one(store: Store) -> None:
    sweep_id = store.submit(manifest(), "harness", "0.1")
    first = store.write_verdict(sweep_id, verdict(sweep_id), "i")
    later = verdict(sweep_id, "IMPROVED")
    second = store.write_verdict(sweep_id, later, "j")
    assert first != second
    assert store.verdict(sweep_id) == later
    assert store.resolve_id(first) == first


def test_a_verdict_on_another_sweep_is_refused(store: Store) -> None:
    sweep_id = store.submit(manifest(), "harness", "0.1")
    with pytest.raises(StoreError, match="speaks of swp_other"):
        store.write_verdict(sweep_id, verdict("swp_other"), "i")
    with pytest.raises(SpecError, match="no sweep"):
        store.write_verdict("swp_other", verdict("swp_other"), "i")
