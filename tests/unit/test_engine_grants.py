"""Growth grants: weights give way to the KV cache under a limit on both, whole or not at all, and no token feels it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import engine
from engine.commands.hazards import decode
from engine.config import POLICIES, parse_request
from engine.counters import COUNTERS
from engine.decode import Decoder
from engine.device.hazards import Hazards
from engine.device.schedule import Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure, Refused
from engine.kv import KvCache
from engine.kv_layout import LAYOUTS, Buckets
from engine.onnx_load import load
from engine.paging.grants import Grants
from engine.run import plans_for
from engine.show import show
from jobs.metrics import derive
from tests.unit.engine_rig import TINY_PROMPT, Bench, Outcome, build_tiny, request, run
from tests.unit.engine_scheduled import Undrained, scheduled

G = 4096
ASKED: dict[str, Any] = {"tokens": 60, "ignore_eos": True, "generations": 2}
GROWING: dict[str, Any] = {"granule": G, "kv_min_bucket": 8}
"""Positions 4 to 63: buckets of 8, 16, 32 and 64."""
LINES = Draft202012Validator(json.loads((Path(engine.__file__).parent / "schemas" / "lines.json").read_text()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model: 227,840 bytes of weights, 1,024 bytes of cache a position."""
    return build_tiny(tmp_path_factory.mktemp("grants"))


@pytest.fixture(scope="module")
def free(tiny: Path) -> list[tuple[list[int], list[float]]]:
    """What a run gives that never had to give way."""
    return run(tiny, **ASKED, config=GROWING).streams


def least_limit(tiny: Path, **config: Any) -> int:
    """The smallest limit that a run is not refused under."""
    error = run(tiny, **ASKED, config={**GROWING, **config, "vram_limit": 1}).error
    return int(error["remedy"].split()[3])


def limited(tiny: Path, more: int, **config: Any) -> Outcome:
    """A run under so much more than its least limit."""
    limit = least_limit(tiny, **config) + more
    return run(tiny, **ASKED, config={**GROWING, **config, "vram_limit": limit})


# -- runs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_give_way_and_ids_and_gaps_are_those_of_a_run_that_never_had_to(
    tiny: Path, free: Any, policy: str, layout: str
) -> None:
    """From streaming at first, at the very least limit and above it."""
    for more, capture in ((0, True), (60_000, False)):
        outcome = limited(tiny, more, policy=policy, kv_layout=layout, capture=capture)
        assert outcome.streams == free
        assert outcome.broken_equations() == []
        assert {e["name"] for e in outcome.result["equations"]} >= {"G1", "G2", "K1", "K2", "W11", "W12", "A8o", "L0"}
        grants, f, c = outcome.lines.of("grant"), outcome.facts, outcome.counters
        assert len(grants) == c["growth_grants"] >= 2 and c["grant_refusals"] == c["grant_rollbacks"] == 0
        assert sum(g["given_bytes"] for g in grants) == c["granted_bytes"] > 0
        assert grants[-1]["capacity_bytes"] == f["capacity_left_bytes"] == f["capacity_bytes"] - c["granted_bytes"]
        assert c["weight_capacity_bytes"] == f["capacity_left_bytes"] >= c["mapped_physical_bytes"]
        assert c["physical_owned_bytes"] <= f["limit_bytes"] and c["oversubscribed_bytes"] == 0
        for line in outcome.lines.lines:
            LINES.validate(line)


@pytest.mark.parametrize("policy", ["stable", "stable_slot", "staging", "zero_copy"])
def test_weights_that_all_fit_at_first_stream_by_their_policy_once_the_cache_has_grown(
    tiny: Path, free: Any, policy: str
) -> None:
    weights = 56 * G
    outcome = limited(tiny, weights - (0 if policy == "zero_copy" else 11 * G) - 9 * G, policy=policy)
    assert outcome.facts["capacity_bytes"] >= outcome.facts["weight_bytes"] > outcome.facts["capacity_left_bytes"]
    assert outcome.streams == free and outcome.broken_equations() == []
    first, second = (
        {n: sum(part.get(n, 0) for part in g["counters"].values()) for n in ("page_ins", "zero_copy_reads")}
        for g in outcome.lines.of("generation")
    )
    assert 0 < sum(first.values()) < sum(second.values()), "all were in until the first growth"
    assert outcome.counters["segments"] == (1 if policy in ("staging", "zero_copy") else outcome.counters["segments"])


def test_room_that_was_lent_is_used_and_a_roomy_limit_gives_nothing_away(tiny: Path) -> None:
    """Before its last bucket a run streams less than under the budget that it ends with; with room for all, nothing."""
    lent = limited(tiny, 0, policy="staging")
    left = lent.facts["capacity_left_bytes"]
    bare = run(tiny, **ASKED, config={**GROWING, "policy": "staging", "weight_budget": left})
    assert lent.counters["htod_bytes"] < bare.counters["htod_bytes"]
    roomy = limited(tiny, 400_000, policy="staging")
    assert roomy.counters["growth_grants"] == 0 == roomy.counters["page_ins"] and roomy.lines.of("grant") == []


def test_what_was_given_is_not_lent_again(tiny: Path) -> None:
    """The second generation grows through the same buckets and finds room."""
    for layout in LAYOUTS:
        outcome = limited(tiny, 0, policy="staging", kv_layout=layout)
        first, second = outcome.lines.of("generation")
        assert sum(part.get("growth_grants", 0) for part in second["counters"].values()) == 0
        assert sum(part.get("growth_grants", 0) for part in first["counters"].values()) >= 2


def test_a_floor_is_taken_from_what_weights_had_when_measuring_began(tiny: Path) -> None:
    warmed = run(
        tiny,
        **{**ASKED, "generations": 1, "warmups": 1},
        config={**GROWING, "policy": "staging", "vram_limit": least_limit(tiny)},
    )
    cold = limited(tiny, 0, policy="staging")
    for outcome, name in ((warmed, "capacity_left_bytes"), (cold, "capacity_bytes")):
        f = outcome.facts
        assert f["measured_capacity_bytes"] == f[name]
        assert f["floor_bytes_per_token"] == f["weight_bytes"] - f[name]
        assert derive(outcome.counters, f, ())["floor_bytes_per_token"] == f["floor_bytes_per_token"]
        assert outcome.counters["htod_bytes"] / f["measured_tokens"] >= f["floor_bytes_per_token"]


# -- graphs


@pytest.mark.parametrize(
    ("policy", "holds"), [("lru", True), ("stable", True), ("staging", False), ("zero_copy", False)]
)
def test_a_graph_holds_where_it_reads_no_weight_and_is_thrown_away_with_its_reason_where_it_does(
    tiny: Path, policy: str, holds: bool
) -> None:
    c = limited(tiny, 0, policy=policy).counters
    grants = c["growth_grants"] - 1  # the first comes before anything is recorded
    assert c["kv_move_invalidations"] == 0
    if holds:
        assert (c["invalidations"], c["captures"]) == (0, 1) and c["grant_keeps"] >= grants
    else:
        assert c["grant_keeps"] == 0 and c["invalidations"] == c["grant_invalidations"] >= grants
        assert c["captures"] == c["invalidations"] + 1
        assert c["segments"] == 1


def test_a_fixed_set_is_planned_anew_which_is_announced_and_counted(tiny: Path) -> None:
    outcome = limited(tiny, 0, policy="staging")
    c, grants = outcome.counters, outcome.lines.of("grant")
    assert all(g["replanned"] for g in grants)
    assert sum(g["evicted_keys"] for g in grants) == c["evictions"] == outcome.facts["replanned_keys"] > 0
    assert sum(g["evicted_bytes"] for g in grants) == c["evicted_bytes"]
    first = outcome.lines.of("generation")[0]["counters"]
    reloaded = sum(part.get("loaded_bytes", 0) for phase, part in first.items() if phase != "load")
    assert 0 < reloaded < c["evicted_bytes"], "each set is loaded whole, and smaller than the one before"
    text = show(outcome.lines.lines, lambda _: None)
    assert text.count("\ngrant: what=") == len(grants) and f"growth_grants={len(grants)} " in text


def test_plan_only_books_the_same_grants(tiny: Path) -> None:
    config = {**GROWING, "policy": "stable_slot", "vram_limit": least_limit(tiny, policy="stable_slot") + 60_000}
    full, bare = (run(tiny, **ASKED, config=config, arithmetic=how) for how in ("full", "none"))
    kept = [{n: v for n, v in o.counters.items() if COUNTERS[n].scope in ("plan", "device")} for o in (full, bare)]
    assert kept[0] == kept[1] and full.facts == bare.facts
    assert full.lines.of("grant") == bare.lines.of("grant") != []


def test_a_batch_grows_into_what_weights_give(tiny: Path) -> None:
    words = {**ASKED, "further_prompts": [[5, 6, 7, 8, 9, 10], [3]], "tokens": 30}
    whole = run(tiny, **words, config=GROWING)
    least = int(run(tiny, **words, config={**GROWING, "vram_limit": 1}).error["remedy"].split()[3])
    for policy in ("stable", "staging"):
        outcome = run(tiny, **words, config={**GROWING, "vram_limit": least, "policy": policy})
        lines, same = outcome.lines.of("generation"), whole.lines.of("generation")
        assert [g["further"] for g in lines] == [g["further"] for g in same] and outcome.streams == whole.streams
        assert outcome.counters["growth_grants"] > 0 and outcome.broken_equations() == []


# -- all of it or none


def bench_of(
    tiny: Path, limit: int | None, policy: str = "lru", device: Any = None, budget: int | None = None
) -> Bench:
    """A bench whose cache may ask weights for room."""
    bench = Bench(tiny, rows=(4,), least=8, limit=limit, policy=policy, device=device, positions=64, budget=budget)
    bench.kv.grants = Grants(bench.ledger, bench.tally, bench.pager)
    return bench


def state(bench: Bench) -> tuple[Any, ...]:
    """All that a refused growth must leave as it was."""
    own = bench.device.mapped_bytes, bench.ledger.owned_bytes, bench.ledger.mapped_bytes("kv")
    return (
        *own,
        bench.pager.capacity_bytes,
        bench.pager.epoch,
        bench.kv.capacity,
        bench.tally.read().get("evictions", 0),
    )


@pytest.mark.parametrize("policy", ["lru", "stable_slot", "staging", "zero_copy"])
def test_a_growth_without_room_is_refused_with_both_numbers_and_changes_nothing(tiny: Path, policy: str) -> None:
    """Weights at their least have nothing to give; the remedy's number is enough, and a byte less is not."""
    least = bench_of(tiny, None, policy).pager.least_bytes
    kv = 16 * G  # the first bucket of 8 takes 4 granules, 17 positions take 8
    bench = bench_of(tiny, least + kv // 4, policy, budget=least)
    bench.prefill(TINY_PROMPT)
    for _ in range(4):
        bench.step()
    before, logits = state(bench), bench.logits().tobytes()
    with pytest.raises(
        Refused, match=rf"needs {4 * G} bytes more for 17 positions .*0 bytes are left .* give 0"
    ) as caught:
        bench.kv.ensure([17], kept=[8])
    assert state(bench) == before and bench.logits().tobytes() == logits
    assert bench.tally.read()["grant_refusals"] == 1 and "growth_grants" not in bench.tally.read()
    more = int(caught.value.remedy.split()[-2])
    bench.ledger.limit_bytes = least + kv // 4 + more - 1
    with pytest.raises(Refused):
        bench.kv.ensure([17], kept=[8])
    bench.ledger.limit_bytes = least + kv // 4 + more
    assert bench.kv.ensure([17], kept=[8]) == "kept"
    bench.step()
    bench.close()
    assert bench.ledger.owned_bytes == 0


VERBS = ("create", "map", "copy_in", "map_host", "copy_within")


class Once(SimDevice):
    """Counts calls by verb while it is armed, and fails the `at`-th one of `verb`."""

    def __init__(self, verb: str = "", at: int = 0) -> None:
        super().__init__(granule_bytes=G)
        self.armed, self.calls = False, dict.fromkeys(VERBS, 0)
        for name in VERBS:
            setattr(self, name, partial(self._call, name, getattr(self, name), at if name == verb else 0))

    def _call(self, name: str, real: Callable[..., Any], at: int, *arguments: Any) -> Any:
        self.calls[name] += self.armed
        if self.armed and self.calls[name] == at:
            raise DeviceFailure("failed once")
        return real(*arguments)


def before_growth(tiny: Path, device: Once, policy: str, layout: str) -> Bench:
    """Eight positions in, streaming, and the next bucket needs room that weights have."""
    limits: dict[str, Any] = {"limit": 60 * G, "budget": 50 * G}
    bench = Bench(tiny, rows=(4,), least=8, policy=policy, device=device, positions=64, layout=layout, **limits)
    bench.kv.grants = Grants(bench.ledger, bench.tally, bench.pager)
    bench.prefill(TINY_PROMPT)
    for _ in range(4):
        bench.step()
    device.armed = True
    return bench


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_growth_that_fails_midway_gives_the_room_back_and_the_next_one_works(
    tiny: Path, policy: str, layout: str
) -> None:
    """Every verb that a growth calls, at its first call, in the middle and at the last; ids as ever after."""
    counted = Once()
    whole = before_growth(tiny, counted, policy, layout)
    whole.decoder._make_room([40])
    counted.armed = False
    ids = [whole.step() for _ in range(10)]
    assert whole.tally.read()["growth_grants"] >= 1 and counted.calls["map"] > 3
    for verb, calls in counted.calls.items():
        for at in sorted({1, calls // 2, calls} - {0}) if calls else ():
            check_rollback(tiny, Once(verb, at), policy, layout, ids)


def check_rollback(tiny: Path, device: Once, policy: str, layout: str, ids: Any) -> None:
    """Fail once within a growth, and go on."""
    bench = before_growth(tiny, device, policy, layout)
    kv, capacity = bench.ledger.mapped_bytes("kv"), bench.pager.capacity_bytes
    try:
        bench.decoder._make_room([40])
    except DeviceFailure:
        assert (bench.ledger.mapped_bytes("kv"), bench.pager.capacity_bytes) == (kv, capacity)
        mapped = bench.ledger.mapped_bytes("weights") + kv
        assert mapped == device.mapped_bytes and mapped + bench.pool.free_bytes == bench.ledger.owned_bytes <= 60 * G
        assert bench.tally.read()["grant_rollbacks"] == 1 and "growth_grants" not in bench.tally.read()
    device.armed = False
    assert [bench.step() for _ in range(10)] == ids, (layout, device.calls)
    bench.close()
    assert bench.ledger.owned_bytes == device.mapped_bytes == bench.tally.read().get("ref_underflows", 0) == 0
    assert not device._regions, "addresses and mapped host memory are given back too"


def test_what_is_not_mapped_yet_is_set_aside_for_weights_all_the_same(tiny: Path) -> None:
    """A policy that fills its budget as it goes has room for all of it: the cache may not take it unasked."""
    bench = bench_of(tiny, 32 * G, budget=28 * G)
    assert bench.ledger.mapped_bytes("weights") == 0 and bench.ledger.room_bytes == 4 * G
    bench.prefill(TINY_PROMPT)
    for _ in range(30):
        bench.step()
    read = bench.tally.read()
    assert read["oversubscribed_bytes"] == 0 and read["growth_grants"] >= 1
    assert read["peak_committed_bytes"] <= 32 * G


# -- the checker


@pytest.mark.parametrize("policy", ["stable", "stable_slot", "staging", "zero_copy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_schedule_of_a_decode_that_gives_way_is_ordered(tiny: Path, policy: str, layout: str) -> None:
    limit = least_limit(tiny, policy=policy, kv_layout=layout) + 30_000
    config = {**GROWING, "policy": policy, "kv_layout": layout, "vram_limit": limit}
    wanted = parse_request(request(tiny, **{**ASKED, "tokens": 24, "config": config}))
    graph = load(tiny)
    plans = plans_for(graph, wanted.prompts, wanted.config.prefill_chunk)
    plain = decode(wanted, graph, plans, SimDevice(granule_bytes=G), None)
    for order in ("early", "late", "random"):
        hazards = Hazards()
        device = ScheduledDevice(SimDevice(granule_bytes=G), Schedule(order), hazards)
        outcome = decode(wanted, graph, plans, device, hazards)
        assert (outcome.failure, [str(h) for h in hazards.found]) == ("", [])
        assert outcome.tokens == plain.tokens and hazards.accesses > 1000
        assert device.tally.read()["vmm_calls"] > 0


@pytest.mark.parametrize("kind", [ScheduledDevice, Undrained])
def test_granules_taken_from_under_a_reader_are_found(tiny: Path, kind: type[ScheduledDevice]) -> None:
    """Between passes nothing reads weights; with a launch under way, it is the wait before each unmap that counts."""
    device = scheduled("late", kind=kind)
    bench = bench_of(tiny, 32 * G, "staging", device, 28 * G)
    bench.prefill(TINY_PROMPT)
    bench.step()
    stay = bench.pager._set.places
    device.launch(next(n for n in bench.decoder._launches.values() if any(k in stay for k in n.step.keys)))
    bench.kv.ensure([33], kept=[5])
    found = {h.kind for h in device.hazards.found}
    assert found == ({"memory taken away under use"} if kind is Undrained else set())


def test_a_graph_that_outlives_a_grant_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted defect: nobody looks whether weights moved."""
    make_room = Decoder._make_room

    def blind(self: Decoder, positions: Any) -> None:
        ensured = KvCache.ensure(self._kv, positions, kept=self._lengths)
        assert ensured
        self._epoch = self._pager.epoch
        make_room(self, positions)

    monkeypatch.setattr(Decoder, "_make_room", blind)
    config = {**GROWING, "policy": "staging", "vram_limit": least_limit(tiny, policy="staging")}
    outcome = run(tiny, **ASKED, config=config)
    assert outcome.code == 16


def test_buckets_say_what_a_growth_asks_for_at_once(tiny: Path) -> None:
    """One grant a bucket and not one a granule: what the filled bucket takes is asked for when it is entered."""
    outcome = limited(tiny, 0, policy="lru")
    wheres = [g["what"] for g in outcome.lines.of("grant")]
    buckets = [int(what.split()[-1]) for what in wheres]
    assert len(set(buckets)) == len(buckets) and set(buckets) <= {Buckets(64, 8).of(n) for n in (9, 17, 33)}


def test_no_more_is_asked_for_than_the_cache_will_ever_need(tiny: Path) -> None:
    """43 positions in a bucket of 64: what only a filled bucket would take stays with the weights."""
    words = {**ASKED, "tokens": 40}
    least = int(run(tiny, **words, config={**GROWING, "vram_limit": 1}).error["remedy"].split()[3])
    f = run(tiny, **words, config={**GROWING, "policy": "lru", "vram_limit": least + 60_000}).facts
    assert f["kv_capacity"] * f["kv_bytes_per_token"] > f["kv_foreseen_peak_bytes"]
    assert 0 <= f["limit_bytes"] - f["kv_foreseen_peak_bytes"] - f["capacity_left_bytes"] < G
