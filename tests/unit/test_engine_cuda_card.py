"""The real card: the plan, counters and ids of the simulator; and whatever way it runs, the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

from engine.batch import chunk_rows
from engine.config import POLICIES
from engine.counters import COUNTERS
from engine.device import cuda, cuda_graph
from engine.device.base import Device, Granule, Launch, Placed
from engine.device.cuda_driver import call
from engine.errors import BadRequest, DeviceFailure, OutOfMemory
from engine.graph import Graph
from engine.kernels.attention import SHORT
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.plan import TARGETS, Operand, Ref, Step
from tests.unit.engine_rig import FRANCE_GREEDY, FRANCE_IDS, TINY_PROMPT, Bench, Outcome, build_tiny, run, smollm2

pytestmark = pytest.mark.gpu

W = 111_617_280
STEPS = 8
CONFIGS: list[dict[str, Any]] = [
    {},
    {"target": "plain"},
    {"capture": False},
    {"kv_layout": "head-major"},
    *(
        {"weight_budget": "50%", "policy": policy, "capture": capture}
        for policy in POLICIES
        for capture in (True, False)
    ),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, as it stands in the cache or newly built."""
    cache = Path(os.environ.get("ASSAY_CACHE_DIR") or platformdirs.user_cache_path("assay"))
    built = cache / "models" / "smollm2-135m"
    return built if (built / "model.onnx").is_file() else smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def graph(model: Path) -> Graph:
    """The same, loaded once."""
    return load(model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("card"))


def new_device() -> Any:
    """The first visible card."""
    from engine.device.cuda import CudaDevice

    return CudaDevice()


@pytest.fixture
def device() -> Any:
    """A device of this test's own."""
    return new_device()


def capital(model: Path, device: str, **changes: Any) -> Outcome:
    """A run of "The capital of France is"."""
    return run(model, **{"prompt_ids": list(FRANCE_IDS), "ignore_eos": True, "device": device, **changes})


def of_plan(outcome: Outcome) -> dict[str, Any]:
    """The counters that must not depend on the device."""
    return {n: v for n, v in outcome.counters.items() if COUNTERS[n].scope == "plan"}


# -- whole runs


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())) or "resident")
def test_32_ids_and_the_simulators_counters(model: Path, config: dict[str, Any]) -> None:
    card = capital(model, "cuda", tokens=32, config=config)
    assert card.streams[0][0] == list(FRANCE_GREEDY)
    assert card.broken_equations() == []
    simulated = capital(model, "sim", tokens=32, config={"target": "fused", **config, "granule": 2 << 20})
    assert of_plan(card) == of_plan(simulated)
    for name in ("kernel_runs", "eager_launches", "graph_nodes", "step_kernels", "device_htod_bytes", "vmm_calls"):
        assert card.counters.get(name) == simulated.counters.get(name), name
    assert card.counters["alloc_calls_steady"] == 0
    assert np.allclose(card.streams[0][1], simulated.streams[0][1], atol=2e-3)


@pytest.mark.parametrize(
    "config", [{}, {"kv_layout": "head-major"}, {"weight_budget": "50%", "policy": "staging"}], ids=str
)
def test_an_end_id_throws_one_step_away_as_on_the_simulator(model: Path, config: dict[str, Any]) -> None:
    """SmolLM2 ends its answer itself, with the 30th id."""
    how: dict[str, Any] = {"tokens": 40, "ignore_eos": False, "generations": 3}
    card = capital(model, "cuda", config=config, **how)
    simulated = capital(model, "sim", config={"target": "fused", **config, "granule": 2 << 20}, **how)
    ids = list(FRANCE_GREEDY[: FRANCE_GREEDY.index(2) + 1])
    assert [g["ids"] for g in card.lines.of("generation")] == [ids] * 3
    assert {g["stop_reason"] for g in card.lines.of("generation")} == {"eos"}
    assert of_plan(card) == of_plan(simulated) and card.counters["discarded_steps"] == 3
    assert card.broken_equations() == []
    for name in ("kernel_runs", "eager_launches", "host_syncs", "device_htod_bytes"):
        assert card.counters.get(name) == simulated.counters.get(name), name


def test_tiny_gives_the_simulators_ids_and_ends_with_nothing_mapped(tiny: Path) -> None:
    fused = {"target": "fused"}
    card, simulated = (run(tiny, device=d, tokens=48, generations=2, config=fused) for d in ("cuda", "sim"))
    assert [ids for ids, _ in card.streams] == [ids for ids, _ in simulated.streams]
    assert card.streams[0] == card.streams[1]
    assert (card.facts["mapped_after_close_bytes"], card.facts["owned_after_close_bytes"]) == (0, 0)
    assert card.lines.of("hello")[0]["device"]["kind"] == "cuda"


# -- the same bits


def trace(bench: Bench, steps: int = STEPS) -> list[tuple[Any, bytes]]:
    """What comes after the prompt, with all logits, step by step."""
    first = bench.prefill(FRANCE_IDS)
    return [(first, b""), *((bench.step(), bench.logits().tobytes()) for _ in range(steps))]


@pytest.mark.parametrize("target", TARGETS)
def test_residency_capture_and_layout_change_no_bit(graph: Graph, target: str) -> None:
    def bench(**how: Any) -> Bench:
        return Bench(graph, device=new_device(), rows=(len(FRANCE_IDS),), target=target, **how)

    expected = trace(bench(capture=False))
    assert len({bits for _, bits in expected}) == STEPS + 1
    ways: list[dict[str, Any]] = [{}, {"layout": "head-major"}, *({"budget": W // 2, "policy": p} for p in POLICIES)]
    for how in ways:
        made = bench(**how)
        assert trace(made) == expected, how
        made.close()


@pytest.mark.parametrize("target", TARGETS)
def test_chunks_of_a_prompt_change_no_bit(graph: Graph, target: str) -> None:
    expected = trace(Bench(graph, device=new_device(), rows=(5,), target=target))
    made = Bench(graph, device=new_device(), rows=(2, 1), target=target)
    made.decoder.reset()
    made.decoder.prefill([FRANCE_IDS], 2)
    assert [made.step() for _ in range(STEPS)] == [emitted for emitted, _ in expected[1:]]
    assert made.logits().tobytes() == expected[-1][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_gives_each_sequence_its_own_bits(graph: Graph, layout: str) -> None:
    prompts = [FRANCE_IDS, (504,), tuple(range(100, 137))]
    rows = sorted({len(p) for p in prompts})
    together = Bench(graph, device=new_device(), rows=rows, layout=layout, sequences=3, target="fused")
    together.decoder.reset()
    found = [together.decoder.prefill(prompts, 512), *(together.decoder.step() for _ in range(STEPS))]
    logits = [together.decoder.logits(1, s).tobytes() for s in range(3)]
    for s, prompt in enumerate(prompts):
        alone = Bench(graph, device=new_device(), rows=rows, layout=layout, target="fused")
        assert [alone.prefill(prompt), *(alone.step() for _ in range(STEPS))] == [step[s] for step in found]
        assert alone.logits().tobytes() == logits[s]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_grows_changes_no_bit(graph: Graph, layout: str) -> None:
    small = Bench(graph, device=new_device(), rows=(5,), layout=layout, least=8, positions=64, target="fused")
    large = Bench(graph, device=new_device(), rows=(5,), layout=layout, least=64, positions=64, target="fused")
    assert trace(small, 24) == trace(large, 24)
    counted = small.tally.read()
    assert counted["kv_growths"] == 2
    assert counted.get("invalidations", 0) == (2 if layout == "head-major" else 0)


@pytest.mark.parametrize("length", [SHORT - 4, SHORT + 400])
def test_a_context_in_parts_is_the_same_bits_however_it_runs(graph: Graph, length: int) -> None:
    """Decoding goes from a whole context to one in parts, and on in parts."""
    prompt = tuple(range(1000, 1000 + length))

    def found(chunk: int = 512, others: tuple[tuple[int, ...], ...] = (), **how: Any) -> list[Any]:
        prompts = (prompt, *others)
        how |= {"rows": sorted(chunk_rows(prompts, chunk)), "sequences": len(prompts), "capacity": 2048}
        made = Bench(graph, device=new_device(), target="fused", **how)
        made.decoder.reset()
        first = made.decoder.prefill(prompts, chunk)[0]
        steps = [(made.decoder.step()[0], made.decoder.logits(1).tobytes()) for _ in range(2 * STEPS)]
        made.close()
        return [first, *steps]

    expected = found(capture=False)
    ways: list[dict[str, Any]] = [{}, {"layout": "head-major"}, {"chunk": 100}, {"others": ((504,), prompt[:600])}]
    for how in [*ways, {"budget": W // 2, "policy": "stable"}, {"layout": "head-major", "others": (prompt,)}]:
        assert found(**how) == expected, how


# -- graphs


def test_the_graph_holds_the_plans_kernels_in_one_chain(tiny: Path, device: Any) -> None:
    bench = Bench(tiny, device=device, rows=(len(TINY_PROMPT),))
    bench.prefill(TINY_PROMPT)
    bench.step()
    bench.step()
    [recorded] = bench.decoder._recorded or []
    census = recorded.census  # type: ignore[union-attr]
    steps = bench.plan.steps
    assert census.types == {"kernel": len(steps)} and census.edges == len(steps) - 1
    assert sum(census.kernels.values()) == len(steps)
    assert set(census.kernels) == {f"assay_{s.kernel}" for s in steps}


def test_a_fresh_granule_under_a_key_is_what_an_old_graph_reads(tiny: Path, device: Any) -> None:
    bench = Bench(tiny, device=device, rows=(len(TINY_PROMPT),))
    bench.prefill(TINY_PROMPT)
    ids = [bench.step().token for _ in range(3)]
    first = bench.pager._base
    old = device.unmap(first)
    fresh = device.create()
    device.map(first, fresh)
    device.fill(first, device.granule_bytes, 0)
    for key in bench.plan.keys:
        if bench.key_address(key.name) < first + device.granule_bytes:
            device.copy_in(bench.key_address(key.name), key.weight.data)
    device.destroy(old)
    again = Bench(tiny, device=new_device(), rows=(len(TINY_PROMPT),))
    again.prefill(TINY_PROMPT)
    expected = [again.step().token for _ in range(8)]
    assert ids + [bench.step().token for _ in range(5)] == expected


def test_recording_many_times_leaks_nothing(tiny: Path, device: Any) -> None:
    bench = Bench(tiny, device=device, rows=(len(TINY_PROMPT),), capture=False)
    bench.prefill(TINY_PROMPT)
    bench.step()
    launches = [launch for name, launch in bench.decoder._launches.items() if name[0] == 1]
    assert len(launches) == len(bench.plan.steps)

    def taken_by(recordings: int) -> int:
        before = call(device._driver.cuMemGetInfo)[0]
        for _ in range(recordings):
            device.begin_capture()
            for launch in launches:
                device.launch(launch)
            device.replay(device.end_capture())
            device.copy_out(bench.decoder.memory.control, 8)
        return int(before - call(device._driver.cuMemGetInfo)[0])

    taken_by(20)
    taken = next((t for t in map(taken_by, [500] * 10) if t <= 0), None)
    assert taken is not None, "others may take memory of the card meanwhile, but not in step with every 500"


def test_many_tokens_under_a_budget_are_the_resident_ones_and_take_no_memory(model: Path) -> None:
    resident, half = (
        capital(model, "cuda", prompt_ids=[504], tokens=600, config=config)
        for config in ({}, {"weight_budget": "50%", "policy": "lru", "kv_min_bucket": 16, "kv_capacity": 1024})
    )
    assert resident.streams == half.streams
    assert half.broken_equations() == []
    assert half.counters["alloc_calls_steady"] == 0 and half.counters["kv_growths"] == 6
    assert half.facts["owned_after_close_bytes"] == 0


# -- rules and faults


def test_a_driver_call_that_fails_ends_the_run_by_its_name_and_the_next_run_is_well(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures at calls all over a run: while it loads, maps, copies, launches, records, replays and waits."""
    names: list[str] = []
    fail_at = -1

    def watched(function: Any, *arguments: Any) -> Any:
        names.append(function.__name__)
        if len(names) - 1 == fail_at:
            raise DeviceFailure(f"{function.__name__} failed: INJECTED")
        return call(function, *arguments)

    for module in (cuda, cuda_graph):
        monkeypatch.setattr(module, "call", watched)
    expected = run(tiny, device="cuda", tokens=6)
    whole = list(names)
    wanted = {whole.index(name) for name in set(whole)} | set(range(0, len(whole), len(whole) // 25))
    assert {"cuMemMap", "cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphLaunch"} <= set(whole)
    for fail_at in sorted(wanted):
        names.clear()
        broken = run(tiny, device="cuda", tokens=6)
        assert broken.code == 16, whole[fail_at]
        assert broken.error["message"] == f"{whole[fail_at]} failed: INJECTED"
    fail_at = -1
    assert run(tiny, device="cuda", tokens=6).streams == expected.streams


def gather(device: Device, index: int) -> bytes:
    """One element of four by index, on the card."""
    refs = {"a": ("float32", (4,)), "b": ("int64", (1,)), "y": ("float32", (1,))}
    operands = tuple(
        Operand(n, Ref("buffer", 0, dtype, shape, n), "w" if n == "y" else "r") for n, (dtype, shape) in refs.items()
    )
    step = Step(0, "/pick", "ai.onnx::Gather", "gather", operands, {"axis": 0})
    device.prepare([step])
    places = [device.alloc(64, o.name) for o in operands]
    device.copy_in(places[0], np.arange(4, dtype=np.float32) + 10)
    device.copy_in(places[1], np.array([index]))
    device.fill(places[2], 4, 0xFF)
    device.launch(Launch(step, tuple(Placed(o, at, 64) for o, at in zip(operands, places, strict=True))))
    return device.copy_out(places[2], 4)


@pytest.mark.parametrize("index", [4, -5, 1 << 40])
def test_an_index_beyond_the_elements_names_its_step_and_the_next_launch_is_well(device: Any, index: int) -> None:
    says = rf"/pick \(ai.onnx::Gather\): index {index} is out of bounds for 4 elements"
    with pytest.raises(DeviceFailure, match=says):
        gather(device, index)
    assert np.frombuffer(gather(device, -1), np.float32) == 13


def test_granules_are_mapped_once_and_given_back_unmapped(device: Any) -> None:
    base, granule = device.reserve(2 * device.granule_bytes), device.create()
    device.map(base, granule)
    assert device.mapped_bytes == device.granule_bytes
    with pytest.raises(DeviceFailure, match="in use"):
        device.map(base + device.granule_bytes, granule)
    with pytest.raises(DeviceFailure, match="while mapped"):
        device.destroy(granule)
    with pytest.raises(DeviceFailure, match="still has mapped"):
        device.unreserve(base)
    device.fill(base, device.granule_bytes, 7)
    assert device.copy_out(base, 3) == bytes([7, 7, 7])
    assert device.unmap(base) is granule
    with pytest.raises(DeviceFailure, match="nothing is mapped"):
        device.unmap(base)
    device.destroy(granule)
    with pytest.raises(DeviceFailure, match="none of this device's"):
        device.destroy(Granule(99))
    device.unreserve(base)
    assert device.tally.read()["vmm_calls"] == 5, "create, map, set access, unmap, release"


def test_more_memory_than_the_card_has_is_out_of_memory(device: Any) -> None:
    with pytest.raises(OutOfMemory, match="cuMemAlloc"):
        device.alloc(1 << 44, "too much")
    assert device.copy_out(device.alloc(4, "little"), 4) is not None


def test_a_granule_that_is_no_multiple_is_refused() -> None:
    from engine.device.cuda import CudaDevice

    with pytest.raises(BadRequest, match="no multiple"):
        CudaDevice(granule_bytes=4096)
    with pytest.raises(BadRequest, match="not visible"):
        CudaDevice(uuid="GPU-00000000-0000-0000-0000-000000000000")


def test_weights_are_copied_from_registered_files_and_counted(graph: Graph, device: Any) -> None:
    bench = Bench(graph, device=device)
    counted = device.tally.read()
    assert counted["device_htod_bytes"] == bench.plan.weight_bytes == W
    assert device._host.registered_bytes > W, "the file is registered in place, not copied"


def test_staged_pieces_run_beside_and_in_a_recording(device: Any) -> None:
    weight = np.arange(1 << 20, dtype=np.uint8)
    device.host_range(0, weight)
    slot, half = device.alloc(weight.nbytes, "slot"), weight.nbytes // 2
    device.fill(slot, weight.nbytes, 255)
    device.wait("copy", device.mark("compute"))
    device.stage(slot, weight[:half])
    device.wait("compute", device.mark("copy"))
    assert device.copy_out(slot, weight.nbytes) == weight[:half].tobytes() + b"\xff" * half
    device.begin_capture()
    device.wait("copy", device.mark("compute"))
    device.stage(slot + half, weight[half:])
    device.wait("compute", device.mark("copy"))
    graph = device.end_capture()
    assert (graph.nodes, graph.census.types) == (1, {"memcpy": 1})
    for _ in range(2):
        device.fill(slot + half, half, 255)
        device.replay(graph)
        assert device.copy_out(slot, weight.nbytes) == weight.tobytes()
    event = device.mark("copy")
    device.sync(event)
    assert device.tally.read()["device_htod_bytes"] == 3 * half
    device.free(slot)


def test_a_capture_that_may_not_be_leaves_none_open(device: Any) -> None:
    weight = np.zeros(4096, np.uint8)
    device.host_range(0, weight)
    slot = device.alloc(4096, "slot")
    device.begin_capture()
    with pytest.raises(DeviceFailure, match="has not entered"):
        device.stage(slot, weight)
    device.begin_capture()
    device.wait("copy", device.mark("compute"))
    device.stage(slot, weight)
    with pytest.raises(DeviceFailure, match="not joined"):
        device.end_capture()
    device.begin_capture()
    assert device.end_capture().nodes == 0
    device.stage(slot, weight)
    device.free(slot)
