"""The KV cache in both layouts: bytes that follow from geometry, growth through buckets, and what a limit refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.__main__ import main
from engine.counters import COUNTERS, Tally
from engine.device.base import Granule
from engine.device.plan_only import PlanDevice
from engine.device.sim import SimDevice
from engine.errors import BadRequest, OutOfMemory, Refused
from engine.kv import KvCache
from engine.kv_layout import (
    LAYOUTS,
    Buckets,
    Placement,
    crossover_tokens,
    floor_bytes,
    forecast,
    growth_copies,
    growth_copy_bytes,
    layout_floors,
)
from engine.paging.ledger import Ledger, Pool
from engine.plan import KvGeometry
from tests.unit.engine_rig import build_tiny, run

MIB = 1 << 20
G = 2 * MIB
BIG = KvGeometry(48, 8, 128, "float16", 8 * 128 * 2)
"""Of qwen2.5-14b: 196,608 bytes a token."""
SMALL = KvGeometry(24, 2, 64, "float16", 2 * 64 * 2)
"""Of qwen2.5-0.5b: 12,288 bytes a token."""
FIVE = [1, 17, 42, 99, 7]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("kv"))


# -- what follows from geometry


def test_bytes_per_token() -> None:
    """Those of qwen2.5 14b, 0.5b, 1.5b and 7b, and of qwen3-0.6b."""
    more = [KvGeometry(layers, heads, 128, "float16", heads * 256) for layers, heads in ((28, 2), (28, 4), (28, 8))]
    assert [g.bytes_per_token for g in (BIG, SMALL, *more)] == [196_608, 12_288, 28_672, 57_344, 114_688]


def test_floors_of_one_position() -> None:
    """768 granules of fixed-stride heads, 1.5 GiB; 2 a layer where heads are packed or positions come first."""
    assert floor_bytes(BIG, "head-major", 8192, G) == 768 * G == 1536 * MIB
    assert floor_bytes(SMALL, "head-major", 16384, G) == 96 * G == 192 * MIB
    assert floor_bytes(BIG, "head-major", 256, G) == 96 * G == 192 * MIB
    for capacity in (256, 8192, 131072):
        assert floor_bytes(BIG, "seq-major", capacity, G) == 96 * G
        assert floor_bytes(SMALL, "seq-major", capacity, G) == 48 * G


def test_crossovers() -> None:
    assert [crossover_tokens(g, "head-major", G) for g in (BIG, SMALL)] == [8192, 16384]
    assert [crossover_tokens(g, "seq-major", G) for g in (BIG, SMALL)] == [1024, 8192]


@pytest.mark.parametrize(
    ("capacity", "committed"), [(1024, 402_653_184), (2048, 603_979_776), (4096, 1_006_632_960), (8192, 1_811_939_328)]
)
def test_committed_one_position_past_a_bucket(capacity: int, committed: int) -> None:
    """The reference's figures at these caps are those of seq-major just past them: one granule of each range more."""
    past = Placement(BIG, "seq-major", 2 * capacity)
    assert past.committed_bytes(capacity + 1, G) == committed
    for layout in LAYOUTS:
        assert Placement(BIG, layout, capacity).committed_bytes(capacity, G) == committed - 96 * G


def test_growth_copies_what_is_cached_and_nothing_else() -> None:
    """The reference's 100,667,392 and 688,576, term by term: keys and values, and the mask that it keeps beside."""
    of = {(g.layout, g.from_tokens): g for g in growth_copies(BIG, 4096, masked=True)}
    head, seq = of["head-major", 512], of["seq-major", 512]
    assert (head.to_tokens, head.kv_bytes, head.mask_bytes, head.sum_bytes) == (1024, 100_663_296, 4096, 100_667_392)
    assert (seq.to_tokens, seq.kv_bytes, seq.mask_bytes, seq.sum_bytes) == (1024, 0, 0, 0)
    assert [g.from_tokens for g in of.values()] == [256, 512, 1024, 2048] * 2
    bare = {(g.layout, g.from_tokens): g for g in growth_copies(BIG, 4096, masked=False)}["head-major", 512]
    assert (bare.mask_bytes, bare.sum_bytes) == (0, 100_663_296), "a model that takes no mask"
    assert [(g.from_tokens, g.to_tokens) for g in growth_copies(BIG, 700, masked=True)] == [(256, 512), (512, 700)] * 2
    assert growth_copies(BIG, 200, masked=True) == ()
    three = forecast(SMALL, "head-major", Buckets(64, 8), range(5, 53), G)
    assert (three.growths, three.copied_positions) == (3, 8 + 16 + 32)
    assert growth_copy_bytes(SMALL, three.copied_positions) == 688_576 - 56 * 8
    assert forecast(SMALL, "seq-major", Buckets(64, 8), range(5, 53), G).copied_positions == 0


def test_layouts_beside_each_other() -> None:
    seq, head = layout_floors(BIG, 32768, G)
    assert (seq.layout, seq.floor_bytes, seq.fixed_floor_bytes, seq.growth_copy_bytes) == (
        "seq-major",
        96 * G,
        96 * G,
        0,
    )
    assert (head.layout, head.floor_bytes, head.fixed_floor_bytes) == ("head-major", 96 * G, 768 * G)
    assert seq.context_bytes == head.context_bytes == 32768 * 196_608
    assert head.growth_copy_bytes == 196_608 * (256 + 512 + 1024 + 2048 + 4096 + 8192 + 16384)
    odd = layout_floors(BIG, 1000, G)[1]
    assert odd.growth_copy_bytes == 196_608 * (256 + 512) and odd.context_bytes == 96 * G


@pytest.mark.parametrize(
    ("tokens", "capacity"), [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1000), (1000, 1000)]
)
def test_buckets_are_powers_of_two_up_to_the_most(tokens: int, capacity: int) -> None:
    assert Buckets(1000).of(tokens) == capacity
    assert Buckets(100).of(min(tokens, 100)) == 100


@settings(deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    heads=st.integers(1, 5),
    size=st.sampled_from([1, 3, 16]),
    capacity=st.integers(1, 40),
    granule=st.sampled_from([16, 100, 4096]),
    data=st.data(),
)
def test_granules_are_those_that_hold_a_cached_element(
    layout: str, heads: int, size: int, capacity: int, granule: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, capacity))
    placement = Placement(KvGeometry(1, heads, size, "float16", heads * size * 2), layout, capacity)
    position, head, element = placement.strides
    starts = [p * position + h * head for p in range(tokens) for h in range(heads)]
    bytes_of = [start + i for start in starts for i in range(size * element)]
    assert len(set(bytes_of)) == tokens * heads * size * 2, "elements overlap"
    assert max(bytes_of) < placement.nbytes
    assert sorted(placement.granules(tokens, granule)) == sorted({b // granule for b in bytes_of})
    covered = {b for start, end in placement.windows(0, tokens) for b in range(start, end)}
    assert covered == set(bytes_of)


# -- the cache itself


class Rig:
    """A cache on a device without bytes."""

    def __init__(
        self,
        layout: str,
        buckets: Buckets,
        limit: int | None = None,
        granule: int = 4096,
        geometry: KvGeometry = SMALL,
    ) -> None:
        self.device = PlanDevice(granule_bytes=granule)
        self.tally = Tally()
        self.ledger = Ledger(granule, limit, self.tally)
        self.pool = Pool(self.device, self.ledger)
        self.kv = KvCache(self.device, geometry, layout, buckets, self.ledger, self.pool, self.tally)

    def state(self) -> tuple[Any, ...]:
        """All that a refused growth must leave as it was."""
        kv = self.kv
        addresses = [kv.address(layer, what) for layer in range(SMALL.layers) for what in ("key", "value")]
        return kv.capacity, kv.placement, addresses, self.device.mapped_bytes, self.ledger.mapped_bytes("kv")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granule", [4096, 65536])
def test_a_cache_does_what_was_foreseen(layout: str, granule: int) -> None:
    rig = Rig(layout, Buckets(100, 8), granule=granule)
    lengths = [5, *range(6, 101)]
    before = 0
    for tokens in lengths:
        rig.kv.ensure([tokens], kept=[before])
        before = tokens
    foreseen = forecast(SMALL, layout, rig.kv.buckets, lengths, granule)
    read = rig.tally.read()
    assert read["kv_committed_bytes"] == foreseen.committed_bytes == rig.device.mapped_bytes
    assert read["peak_kv_committed_bytes"] == foreseen.peak_bytes
    assert read["kv_growths"] == foreseen.growths == 4
    copied = 12_288 * foreseen.copied_positions
    assert (read.get("kv_growth_dtod_bytes", 0), rig.device.tally.read().get("device_dtod_bytes", 0)) == (
        copied,
        copied,
    )
    assert foreseen.copied_positions == (8 + 16 + 32 + 64 if layout == "head-major" else 0)
    rig.kv.close()
    rig.pool.close()
    assert (rig.device.mapped_bytes, rig.ledger.mapped_bytes("kv"), rig.ledger.owned_bytes) == (0, 0, 0)


def test_a_14b_cache_grows_from_512_to_1024_and_on() -> None:
    head, seq = (Rig(layout, Buckets(16384), granule=G, geometry=BIG) for layout in ("head-major", "seq-major"))
    for rig in (head, seq):
        rig.kv.ensure([512], kept=[0])
        rig.kv.ensure([513], kept=[512])
        assert rig.kv.capacity == 1024
    assert head.device.tally.read()["device_dtod_bytes"] == 196_608 * 512 == 100_663_296
    assert "device_dtod_bytes" not in seq.device.tally.read()
    kept = 513
    for tokens, committed in ((1025, 402_653_184), (2049, 603_979_776), (4097, 1_006_632_960), (8193, 1_811_939_328)):
        seq.kv.ensure([tokens], [kept])
        kept = tokens
        assert seq.tally.read()["kv_committed_bytes"] == seq.device.mapped_bytes == committed


def test_a_growth_beyond_the_limit_is_refused_whole_and_with_both_numbers() -> None:
    """Head-major needs old and new side by side; the limit has room for either alone."""
    limit = forecast(SMALL, "head-major", Buckets(64, 32), [64], 4096).committed_bytes
    rig = Rig("head-major", Buckets(64, 32), limit)
    rig.kv.ensure([32], kept=[0])
    before = rig.state()
    needed = Placement(SMALL, "head-major", 64).committed_bytes(33, 4096)
    with pytest.raises(Refused, match=f"needs {needed} bytes more .* {limit - before[-1]} bytes are left"):
        rig.kv.ensure([33], kept=[32])
    assert rig.state() == before
    assert rig.tally.read()["oversubscribed_bytes"] == 0
    seq = Rig("seq-major", Buckets(64, 32), limit)
    seq.kv.ensure([32], kept=[0])
    assert seq.kv.ensure([33], kept=[32]) == "kept", "the same limit bears a growth that copies nothing"


def test_positions_beyond_the_capacity_are_refused() -> None:
    rig = Rig("seq-major", Buckets(16, 8))
    with pytest.raises(Refused, match="addresses for 16 positions, 17 are needed"):
        rig.kv.ensure([17], kept=[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("after", [0, 1, 17, 47])
def test_a_device_that_runs_out_midway_leaves_the_cache_as_it_was(
    layout: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(layout, Buckets(64, 16))
    rig.kv.ensure([16], kept=[0])
    before, owned = rig.state(), rig.ledger.owned_bytes
    left = after

    def create() -> Granule:
        nonlocal left
        if left == 0:
            raise OutOfMemory("no memory")
        left -= 1
        return PlanDevice.create(rig.device)

    monkeypatch.setattr(rig.device, "create", create)
    with pytest.raises(OutOfMemory):
        rig.kv.ensure([17], kept=[16])
    assert rig.state() == before
    assert rig.ledger.owned_bytes - owned == rig.pool.free_bytes == after * 4096, "what was made lies in the pool"
    monkeypatch.undo()
    rig.kv.ensure([17], kept=[16])
    assert rig.device.mapped_bytes == rig.kv.placement.committed_bytes(17, 4096)


def test_a_new_sequence_starts_in_its_own_bucket() -> None:
    for layout in LAYOUTS:
        rig = Rig(layout, Buckets(64, 8))
        rig.kv.ensure([40], kept=[0])
        mapped = rig.ledger.mapped_bytes("kv")
        assert rig.kv.ensure([5], kept=[5]) == "none" and rig.kv.capacity == 64, "a sequence never shrinks"
        rig.kv.restart()
        rig.kv.ensure([5], kept=[0])
        assert rig.kv.capacity == 8
        assert rig.tally.read()["kv_growths"] == 0
        assert rig.tally.read()["peak_kv_committed_bytes"] == mapped, "what is not kept never stood beside what came"


# -- runs


def graph(counters: dict[str, Any]) -> tuple[int, ...]:
    """Warm steps, captures, replays, invalidations, keeps."""
    return tuple(counters[n] for n in ("warm_steps", "captures", "replays", "invalidations", "growth_keeps"))


def test_three_growths_within_48_tokens_after_a_prompt_of_5(tiny: Path) -> None:
    """Buckets of 8, 16, 32, 64. Other strides are another signature, so each is run eagerly once and recorded once.

    The reference counts 4 invalidations and 1 beside its keeps: its reset at the end throws the graph away, ours keeps.
    """
    run_of = {
        layout: run(tiny, prompt_ids=FIVE, tokens=48, ignore_eos=True, config={"kv_layout": layout, "kv_min_bucket": 8})
        for layout in LAYOUTS
    }
    head, seq = run_of["head-major"], run_of["seq-major"]
    assert graph(head.counters) == (4, 4, 39, 3, 0)
    assert graph(seq.counters) == (1, 1, 45, 0, 3)
    assert head.counters["kv_growth_dtod_bytes"] == 56 * head.facts["kv_bytes_per_token"]
    assert seq.counters["kv_growth_dtod_bytes"] == 0
    assert head.counters["kv_growths"] == seq.counters["kv_growths"] == 3
    assert head.streams == seq.streams == run(tiny, prompt_ids=FIVE, tokens=48, ignore_eos=True).streams
    for outcome in (head, seq):
        assert outcome.broken_equations() == []
        assert outcome.facts["kv_capacity"] == 64


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granule", [4096, 65536])
def test_every_generation_grows_alike(tiny: Path, layout: str, granule: int) -> None:
    config = {"kv_layout": layout, "kv_min_bucket": 8, "granule": granule, "capture": granule == 4096}
    outcome = run(tiny, config=config, tokens=20, generations=3, warmups=1, ignore_eos=True)
    assert outcome.broken_equations() == []
    lines = outcome.lines.of("generation")
    grown = [sum(part.get("kv_growths", 0) for part in line["counters"].values()) for line in lines]
    assert grown == [2] * 4
    assert len({tuple(line["ids"]) for line in lines}) == 1


def test_chunks_of_a_prompt_cause_no_growth(tiny: Path) -> None:
    config = {"kv_layout": "head-major", "kv_min_bucket": 2, "prefill_chunk": 2}
    outcome = run(tiny, prompt_ids=FIVE, tokens=2, config=config)
    assert outcome.counters["kv_growths"] == 0 and outcome.broken_equations() == []


def test_a_limit_that_a_growth_would_pass_refuses_the_run_beforehand(tiny: Path) -> None:
    """The peak of a head-major copy is known from prompt and tokens: the limit is checked before anything runs."""
    config: dict[str, Any] = {"granule": 4096, "kv_min_bucket": 64}
    asked = {"tokens": 70, "ignore_eos": True}
    limits: dict[str, int] = {}
    for layout in LAYOUTS:
        refused = run(tiny, **asked, config={**config, "kv_layout": layout, "vram_limit": 1})
        limits[layout] = int(refused.error["remedy"].split()[3])
        assert refused.code == 13
        exact = run(tiny, **asked, config={**config, "kv_layout": layout, "vram_limit": limits[layout]})
        assert exact.broken_equations() == [] and exact.counters["oversubscribed_bytes"] == 0
        below = run(tiny, **asked, config={**config, "kv_layout": layout, "vram_limit": limits[layout] - 1})
        assert below.code == 13 and below.lines.of("generation") == []
    assert limits["head-major"] > limits["seq-major"]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_growth_in_a_plan_only_run_is_booked_as_in_a_full_one(tiny: Path, layout: str, capture: bool) -> None:
    config = {"kv_layout": layout, "kv_min_bucket": 4, "granule": 4096, "capture": capture, "weight_budget": "60%"}
    full, bare = (
        run(tiny, tokens=20, generations=2, ignore_eos=True, arithmetic=how, config=config) for how in ("full", "none")
    )
    booked = [
        {name: value for name, value in o.counters.items() if COUNTERS[name].scope in ("plan", "device")}
        for o in (full, bare)
    ]
    assert booked[0] == booked[1] and full.facts == bare.facts
    assert full.result["equations"] == bare.result["equations"] and full.broken_equations() == []
    assert full.counters["kv_growths"] == 2 * 3


def test_a_growth_that_copies_nothing_is_found_out(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDevice, "copy_within", lambda *_: None)
    outcome = run(tiny, tokens=20, ignore_eos=True, config={"kv_layout": "head-major", "kv_min_bucket": 8})
    assert outcome.code == 15 and outcome.error["ids"], "fresh granules are poison"


def test_a_graph_that_outlives_a_move_is_found_out(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes have addresses baked in that nothing is mapped at any more."""
    ensure = KvCache.ensure
    monkeypatch.setattr(KvCache, "ensure", lambda *a, **k: "kept" if ensure(*a, **k) == "moved" else "none")
    outcome = run(tiny, tokens=20, ignore_eos=True, config={"kv_layout": "head-major", "kv_min_bucket": 8})
    assert outcome.code == 16


def test_the_command_line_names_layout_bucket_and_reuse(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt-ids", "1 17 42 99", "--kv-layout", "head-major", "--kv-min-bucket", "4", "--kv-capacity", "64"]
    said = [
        "run",
        "--model",
        str(tiny),
        *words,
        "--tokens",
        "20",
        "--warmups",
        "1",
        "--ignore-eos",
        "--prefix-reuse",
        "on",
    ]
    assert main(said) == 0
    told = capsys.readouterr().out
    for line in (
        *("config: kv_layout=head-major source=request", "config: kv_min_bucket=4 source=request"),
        *("config: prefix_reuse=True source=request", "invalidations=0 growth_keeps=0", "kv: kv_layout=head-major"),
        *("kv_capacity=32", "kv_growths=0", "kv_growth_dtod_bytes=0", "prefix_hit_tokens=3"),
    ):
        assert line in told, line
    assert "BROKEN" not in told


def test_logits_are_the_same_in_both_layouts(tiny: Path, tmp_path: Path) -> None:
    made = []
    for layout in LAYOUTS:
        out = tmp_path / f"{layout}.npz"
        words = ["--prompt-ids", "1 17 42 99", "--forced-ids", "5 6 7 8 9", "--kv-min-bucket", "4", "--out", str(out)]
        assert main(["logits", "--model", str(tiny), "--kv-layout", layout, *words]) == 0
        made.append(np.load(out)["logits"].tobytes())
    assert made[0] == made[1]


def test_an_unknown_layout_is_refused_with_the_nearest(tiny: Path) -> None:
    with pytest.raises(BadRequest, match=r"unknown kv_layout 'headmajor'.*did you mean 'head-major'\?"):
        run(tiny, config={"kv_layout": "headmajor"})
