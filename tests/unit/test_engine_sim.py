"""The simulated device: its rules are enforced, and what lies on it, not what should, is what a kernel reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.device.base import Granule
from engine.device.sim import POISON, SimDevice, SimGraph
from engine.errors import DeviceFailure, NonFiniteLogits
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, run

G = 4096
GATE, DOWN = (f"model.layers.0.mlp.{n}_proj.MatMul.weight" for n in ("gate", "down"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("sim"))


@pytest.fixture
def device() -> SimDevice:
    """A card with granules of 4 KiB."""
    return SimDevice(granule_bytes=G)


# -- addresses and granules


def test_mapped_bytes_are_poison_until_they_are_filled(device: SimDevice) -> None:
    base = device.reserve(2 * G)
    device.map(base, device.create())
    assert device.copy_out(base, G) == bytes([POISON]) * G
    device.copy_in(base + 10, np.arange(5, dtype=np.uint8))
    assert device.copy_out(base + 9, 7) == bytes([POISON, 0, 1, 2, 3, 4, POISON])


def test_what_was_unmapped_is_gone_when_it_is_mapped_again(device: SimDevice) -> None:
    base = device.reserve(G)
    device.map(base, device.create())
    device.fill(base, G, 7)
    device.map(device.reserve(G), device.unmap(base))
    device.map(base, device.create())
    assert device.copy_out(base, G) == bytes([POISON]) * G


def unmapped(device: SimDevice) -> dict[str, Callable[[], object]]:
    """Ways to reach memory that is not there: two granules, the second without backing, then past the end."""
    base = device.reserve(2 * G)
    device.map(base, device.create())
    plain = device.alloc(100, "some buffer")
    return {
        "read of an unmapped granule": lambda: device.copy_out(base + G, 1),
        "read across into one": lambda: device.copy_out(base + G - 1, 2),
        "write across into one": lambda: device.copy_in(base + G - 1, np.zeros(2, np.uint8)),
        "fill of one": lambda: device.fill(base + G, 8, 0),
        "read past a reservation": lambda: device.copy_out(base + 2 * G, 1),
        "read before everything": lambda: device.copy_out(base - 1, 1),
        "read of no address": lambda: device.copy_out(0, 1),
        "read past plain memory": lambda: device.copy_out(plain + 99, 2),
        "read far away": lambda: device.copy_out(plain + (1 << 40), 1),
    }


@pytest.mark.parametrize("what", list(unmapped(SimDevice(granule_bytes=G))))
def test_memory_that_is_not_there_is_a_device_failure(device: SimDevice, what: str) -> None:
    with pytest.raises(DeviceFailure, match="0x"):
        unmapped(device)[what]()


def test_a_granule_is_mapped_once_and_a_place_holds_one(device: SimDevice) -> None:
    base, granule = device.reserve(2 * G), device.create()
    device.map(base, granule)
    with pytest.raises(DeviceFailure, match="in use"):
        device.map(base, device.create())
    with pytest.raises(DeviceFailure, match="in use"):
        device.map(base + G, granule)
    assert device.unmap(base) is granule
    device.map(base + G, granule)


def test_unmapping_nothing_and_mapping_off_the_grid(device: SimDevice) -> None:
    base = device.reserve(2 * G)
    with pytest.raises(DeviceFailure, match="nothing is mapped"):
        device.unmap(base)
    for address in (base + 1, base + 2 * G, device.alloc(G, "plain")):
        with pytest.raises(DeviceFailure):
            device.map(address, device.create())
        with pytest.raises(DeviceFailure):
            device.unmap(address)


def test_reservations_and_plain_memory_are_given_back_whole(device: SimDevice) -> None:
    base, plain = device.reserve(2 * G), device.alloc(10, "plain")
    granule = device.create()
    device.map(base + G, granule)
    with pytest.raises(DeviceFailure, match="still has mapped"):
        device.unreserve(base)
    for wrong in (base + G, plain, 0):
        with pytest.raises(DeviceFailure, match="no reservation"):
            device.unreserve(wrong)
    for wrong in (base, plain + 1):
        with pytest.raises(DeviceFailure, match="no plain memory"):
            device.free(wrong)
    device.unmap(base + G)
    device.unreserve(base)
    device.free(plain)
    for address in (base, plain):
        with pytest.raises(DeviceFailure, match="belongs to nothing"):
            device.copy_out(address, 1)
    with pytest.raises(DeviceFailure):
        device.unreserve(base)


def test_a_granule_given_back_is_given_back_once_and_never_mapped_again(device: SimDevice) -> None:
    base, granule = device.reserve(G), device.create()
    device.map(base, granule)
    with pytest.raises(DeviceFailure, match="mapped"):
        device.destroy(granule)
    device.unmap(base)
    device.destroy(granule)
    with pytest.raises(DeviceFailure):
        device.destroy(granule)
    with pytest.raises(DeviceFailure):
        device.map(base, granule)
    with pytest.raises(DeviceFailure):
        device.map(base, Granule(999))


def test_addresses_never_touch_and_are_not_reused(device: SimDevice) -> None:
    sizes = [1, G - 1, G, G + 1, 3 * G]
    starts = [device.reserve(n) for n in sizes] + [device.alloc(n, "x") for n in sizes]
    assert starts == sorted(starts)
    for (start, size), after in zip(zip(starts, sizes * 2, strict=True), starts[1:], strict=False):
        assert start % G == 0 and after >= start + size + 1, "an overrun by a byte falls into a gap"
    device.unreserve(starts[4])
    assert device.reserve(3 * G) > starts[-1]


def test_a_capture_opens_once_and_a_replay_needs_a_recording(device: SimDevice) -> None:
    with pytest.raises(DeviceFailure, match="no capture is open"):
        device.end_capture()
    device.begin_capture()
    with pytest.raises(DeviceFailure, match="open already"):
        device.begin_capture()
    with pytest.raises(DeviceFailure):
        device.replay(SimGraph(()))
    assert device.end_capture().nodes == 0

    class Other:
        nodes = 0

    with pytest.raises(DeviceFailure):
        device.replay(Other())


def test_calls_are_counted_where_they_happen(device: SimDevice) -> None:
    base = device.reserve(G)
    granule = device.create()
    device.map(base, granule)
    weight = np.zeros(100, np.uint8)
    device.host_range(1, weight)
    for source in (weight, weight.copy(), weight[:50], weight[1:]):
        device.copy_in(base, source)
    device.unmap(base)
    device.destroy(granule)
    device.alloc(5, "x")
    counted = device.tally.read()
    assert counted["vmm_calls"] == 1 + 2 + 1 + 1
    assert counted["device_htod_bytes"] == 100, "only copies of a key's own host bytes, all of them, are weight traffic"
    assert counted["alloc_calls"] == 1


# -- what lies there is what is read


class Loaded:
    """A resident model that has decoded a few tokens, so that every weight is decoded and kept."""

    def __init__(self, tiny: Path, capture: bool) -> None:
        self.bench = Bench(tiny, capture=capture)
        self.bench.prefill(TINY_PROMPT, 1)
        self.before = [self.bench.step().token for _ in range(3)]

    def bytes_of(self, name: str) -> bytes:
        """A key's bytes on the device."""
        return self.bench.device.copy_out(self.bench.key_address(name), self.size(name))

    def source(self, name: str) -> NDArray[np.uint8]:
        """A key's own host bytes: what is copied from here is that key, and counts as it."""
        return self.bench.plan.keys[self.bench.key(name)].weight.data

    def size(self, name: str) -> int:
        """A key's size."""
        return self.bench.plan.keys[self.bench.key(name)].nbytes

    def fresh(self, tiny: Path) -> tuple[list[int], list[bytes]]:
        """What an untouched model goes on with: ids and logits."""
        other = Loaded(tiny, True)
        return other.onward()

    def onward(self, steps: int = 6) -> tuple[list[int], list[bytes]]:
        """The next ids and the logits that they came from."""
        ids, logits = [], []
        for _ in range(steps):
            ids.append(self.bench.step().token)
            logits.append(self.bench.logits().tobytes())
        return ids, logits


def poison(loaded: Loaded, name: str) -> None:
    loaded.bench.device.fill(loaded.bench.key_address(name), loaded.size(name), POISON)


def poison_one_byte(loaded: Loaded, name: str) -> None:
    address = loaded.bench.key_address(name) + loaded.size(name) // 2
    old = loaded.bench.device.copy_out(address, 1)[0]
    loaded.bench.device.fill(address, 1, old ^ 0xFF)


def half_filled(loaded: Loaded, name: str) -> None:
    """The first half is filled anew, rightly; the second half never came."""
    device, address, half = loaded.bench.device, loaded.bench.key_address(name), loaded.size(name) // 2
    device.fill(address, 2 * half, POISON)
    device.copy_in(address, loaded.source(name)[:half])


def other_layers_bytes(loaded: Loaded, name: str) -> None:
    """Layer 1's bytes at layer 0's place, as a slot that was not refilled would hold."""
    foreign = loaded.source(name.replace("layers.0", "layers.1"))
    loaded.bench.device.copy_in(loaded.bench.key_address(name), foreign)


def other_layers_bytes_without_a_name(loaded: Loaded, name: str) -> None:
    foreign = np.frombuffer(loaded.bytes_of(name.replace("layers.0", "layers.1")), np.uint8)
    loaded.bench.device.copy_in(loaded.bench.key_address(name), foreign)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(
    "spoil", [poison, poison_one_byte, half_filled, other_layers_bytes, other_layers_bytes_without_a_name]
)
@pytest.mark.parametrize("part", ["_Q4", "_scales"])
@pytest.mark.parametrize("matrix", ["attn.qkv_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_spoilt_bytes_behind_a_decoded_weight_are_felt(
    tiny: Path, matrix: str, part: str, spoil: Callable[[Loaded, str], None], capture: bool
) -> None:
    """Different logits at once, or an end for numbers that are not finite; never the tokens of an untouched run."""
    loaded = Loaded(tiny, capture)
    _, untouched = loaded.fresh(tiny)
    spoil(loaded, f"model.layers.0.{matrix}.MatMul.weight{part}")
    try:
        _, logits = loaded.onward()
    except NonFiniteLogits:
        return
    assert logits[0] != untouched[0]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(
    "name", ["model.layers.0.input_layernorm.weight", "model.layers.2.final_norm_layernorm.weight"]
)
def test_poison_behind_a_weight_that_is_not_decoded_ends_the_run(tiny: Path, name: str, capture: bool) -> None:
    loaded = Loaded(tiny, capture)
    poison(loaded, name)
    with pytest.raises(NonFiniteLogits):
        loaded.onward()


@pytest.mark.parametrize("capture", [True, False])
def test_poison_in_any_one_layer_changes_the_ids(tiny: Path, capture: bool) -> None:
    """Codes alone, so that nothing is infinite: the stream itself must show it."""
    ids, _ = Loaded(tiny, capture).onward(24)
    for matrix in ("attn.qkv_proj", "attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        for layer in (0, 1):
            loaded = Loaded(tiny, capture)
            poison(loaded, f"model.layers.{layer}.{matrix}.MatMul.weight_Q4")
            assert loaded.onward(24)[0] != ids, (layer, matrix)


@pytest.mark.parametrize("capture", [True, False])
def test_a_whole_record_of_another_shape_is_read_in_this_shape(tiny: Path, capture: bool) -> None:
    """Gate and down have bytes of one size: gate's codes and scales at down's place, each whole and under their own
    name, are decoded in down's shape and not taken for what was decoded at the gate."""
    loaded = Loaded(tiny, capture)
    _, untouched = loaded.fresh(tiny)
    device, bench = loaded.bench.device, loaded.bench
    for part in ("_Q4", "_scales"):
        device.copy_in(bench.key_address(DOWN + part), loaded.source(GATE + part))
    _, logits = loaded.onward()
    assert logits[0] != untouched[0]
    plain = Loaded(tiny, capture)
    for part in ("_Q4", "_scales"):
        plain.bench.device.copy_in(
            plain.bench.key_address(DOWN + part), np.frombuffer(plain.bytes_of(GATE + part), np.uint8)
        )
    assert plain.onward()[1] == logits, "the same bytes without a name give the same numbers"


@pytest.mark.parametrize("capture", [True, False])
def test_the_right_bytes_put_back_heal(tiny: Path, capture: bool) -> None:
    loaded = Loaded(tiny, capture)
    untouched = loaded.fresh(tiny)
    for name in (GATE + "_Q4", GATE + "_scales"):
        poison(loaded, name)
        loaded.bench.device.copy_in(loaded.bench.key_address(name), loaded.source(name))
    assert loaded.onward() == untouched


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("what", ["weights", "cache"])
def test_a_granule_lost_under_a_run_is_a_device_failure(tiny: Path, what: str, capture: bool) -> None:
    """Unmapped behind the engine's back, under a graph that was recorded before as well."""
    loaded = Loaded(tiny, capture)
    bench = loaded.bench
    address = bench.key_address(GATE + "_Q4") // G * G if what == "weights" else bench.kv.address(1, "value")
    bench.device.unmap(address)
    with pytest.raises(DeviceFailure, match="unmapped"):
        loaded.onward()


@pytest.mark.parametrize("capture", [True, False])
def test_a_granule_swapped_under_a_run_shows(tiny: Path, capture: bool) -> None:
    """Another physical granule at the same address holds nothing yet, and a graph recorded before reads just that."""
    loaded = Loaded(tiny, capture)
    address = loaded.bench.key_address(GATE + "_scales") // G * G
    loaded.bench.device.unmap(address)
    loaded.bench.device.map(address, loaded.bench.device.create())
    with pytest.raises(NonFiniteLogits):
        loaded.onward()


def test_positions_that_were_never_written_are_never_read(tiny: Path) -> None:
    """A cache poisoned beyond its length changes nothing; one poisoned inside ends the run."""
    loaded = Loaded(tiny, True)
    _, untouched = loaded.fresh(tiny)
    bench, row = loaded.bench, loaded.bench.plan.kv.token_bytes
    length = bench.length()
    for layer in (0, 1):
        for part in ("key", "value"):
            bench.device.fill(bench.kv.address(layer, part) + length * row, G - length * row, POISON)
    assert loaded.onward()[1] == untouched
    bench.device.fill(bench.kv.address(0, "value") + row, row, POISON)
    with pytest.raises(NonFiniteLogits):
        loaded.onward()


@pytest.mark.parametrize("policy", ["lru", "stable", "stable_slot"])
def test_wrong_bytes_under_the_right_key_are_not_taken_for_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A pager that copies from spoiled memory: what was decoded before must not stand in for what is there now."""
    config = {"weight_budget": "50%", "granule": G, "policy": policy}
    right = run(tiny, config=config, generations=2).streams[0]
    copies = [0]

    class Spoiling(SimDevice):
        """After the first generation, every weight copy comes from elsewhere and holds other codes."""

        def copy_in(self, address: int, source: Any) -> None:
            weight = (source.ctypes.data, source.nbytes) in self._ranges
            copies[0] += weight
            if weight and copies[0] > 300 and source.nbytes > 4096:
                source = np.full(source.nbytes, 0x33, np.uint8)
            super().copy_in(address, source)

    monkeypatch.setattr("engine.run.SimDevice", Spoiling)
    outcome = run(tiny, config=config, generations=3)
    assert copies[0] > 300
    assert outcome.code == 15 or outcome.streams[-1] != right
