"""One decoder layer from the plan to a replayed CUDA graph, with one weight streamed inside the graph.

A probe of the plan's form, kept so that it can be run again; its kernels are plain and right, not fast. It proves that
the data of `engine.bind.lower` alone binds every launch, that each step agrees with the NumPy reference, that eager,
captured, and captured-and-streamed passes give the same bits, that a graph holds the nodes, bytes and edges predicted
from the plan and its copies, and that a fresh granule mapped under a key's addresses is what a graph recorded before
then reads. Times are of one card, one process. Takes any served float32 model folder with float zero points; streams
`down_proj` of its first layer, and `lm_head`.

    python -m benchmarks.layer_spike --model models/one-layer --out layer-spike.json      (needs a GPU and cuda-python)
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from benchmarks.layer_spike_card import CONTROL_OFFSETS, Arena, Bound, Card, CudaError, Memory, ask
from benchmarks.layer_spike_graph import Copy, Record, Recorded, capture, census, predicted, run
from engine import kernels
from engine.bind import lower
from engine.config import RunRequest
from engine.graph import DTYPES, Graph
from engine.kv_layout import Buckets
from engine.onnx_load import load
from engine.plan import Plan
from engine.run import execute

PROMPT = (504, 3575, 282, 4649, 314)
FORCED = (7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34)
TOKENS = 50


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """|got - want| / |want| where `want` is no NaN; infinite where one of the two alone is NaN, as poison is."""
    unset = np.isnan(want.astype(np.float64))
    if (np.isnan(got.astype(np.float64)) != unset).any():
        return math.inf
    a, b = got.astype(np.float64)[~unset], want.astype(np.float64)[~unset]
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


class Passes:
    """A prompt fed once, and passes from there: each starts from the same state with everything else poisoned."""

    def __init__(self, card: Card, memory: Memory, plans: Mapping[int, Plan]) -> None:
        self.card, self.memory, self.plan = card, memory, plans[1]
        self.launches = memory.bind(plans[1])
        self.errors: dict[str, float] = {}
        self._start(PROMPT)
        self._check(memory.bind(plans[len(PROMPT)]))
        self._control = card.read(memory.control, CONTROL_OFFSETS["ids"] + 8)
        by_chunk = self._state(plans[len(PROMPT)], len(PROMPT))
        self.prompt_token = token_of(by_chunk)
        self._start(PROMPT)
        for token in PROMPT:
            self.feed(token)
            run(card, self.launches)
        self.chunk_invariant = self._state(self.plan, len(PROMPT)) == by_chunk
        self.rewind()
        self._check(self.launches)

    def _start(self, ids: Sequence[int]) -> None:
        m = self.memory
        self.card.fill(m.workspace, m.workspace_bytes)
        self.card.write(m.control, np.zeros(1, np.int64))
        self.card.write(m.control + CONTROL_OFFSETS["ids"], np.array(ids, np.int64))

    def feed(self, token: int) -> None:
        """The token that goes in next, in place of the one chosen on the device."""
        self.card.write(self.memory.control + CONTROL_OFFSETS["ids"], np.array([token], np.int64))

    def rewind(self) -> None:
        """Back to the end of the prompt; workspace and later cache positions are poison."""
        m, used = self.memory, self.plan.kv.token_bytes * len(PROMPT)
        self.card.fill(m.workspace, m.workspace_bytes)
        self.card.write(m.control, self._control)
        for arena in (a for pair in m.kv for a in pair):
            self.card.fill(arena.base + used, self.plan.kv.token_bytes * m.capacity - used)

    def _state(self, plan: Plan, positions: int) -> list[bytes]:
        """Logits, token, gap and every cached position, as bytes."""
        m, n = self.memory, plan.kv.token_bytes * positions
        kept = [self.card.read(m.address(plan, plan.logits, {}), math.prod(plan.logits.shape) * 4)]
        kept += [self.card.read(m.control, CONTROL_OFFSETS["ids"] + 8)]
        return [x.tobytes() for x in kept + [self.card.read(a.base, n) for pair in m.kv for a in pair]]

    def _check(self, launches: Sequence[Bound]) -> None:
        """Run each step on the card and, from the same inputs, by the NumPy reference; keep the largest error."""
        for b in launches:
            kernel = kernels.get(b.step.kernel)
            arrays = {p.operand.name: self.memory.view(p) for p in b.placed if p.operand.ref.kind != "host"}
            host = self.memory.host
            for p in (p for p in b.placed if p.operand.ref.kind == "host"):
                arrays[p.operand.name] = host[p.operand.ref.name][1].view(DTYPES[p.operand.ref.dtype]).reshape(p.shape)
            if kernel.decode is not None:
                arrays["decoded"] = kernel.decode(arrays, b.step.params)
            kernel.run(arrays, b.step.params)
            run(self.card, [b])
            for p in (p for p in b.placed if p.operand.access != "r"):
                name = f"{b.step.kernel}.{p.operand.name}"
                error = relative_error(self.memory.view(p), arrays[p.operand.name])
                self.errors[name] = max(self.errors.get(name, 0.0), error)

    def trace(self, step: Callable[[], None], forced: Sequence[int]) -> list[list[bytes]]:
        """TOKENS passes and their states; ids come from `forced`, or where it is empty from the pass before."""
        self.rewind()
        states = []
        for i in range(TOKENS):
            if forced:
                self.feed(forced[i % len(forced)])
            step()
            states.append(self._state(self.plan, len(PROMPT) + i + 1))
        return states

    def eager_trace(self, forced: Sequence[int] = FORCED) -> list[list[bytes]]:
        """A trace of passes launched step by step."""
        return self.trace(lambda: run(self.card, self.launches), forced)

    def replayed(self, recorded: Recorded) -> Callable[[], None]:
        """A pass that replays a recording."""
        return lambda: ask(driver.cuGraphLaunch(recorded[1], self.card.compute))


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a pass: its launches, its copies, and the record that streams (None: all resident)."""

    name: str
    plan: Plan
    launches: Sequence[Bound]
    copies: Sequence[Copy]
    record: Record | None


def variants(memory: Memory, plan: Plan, records: Mapping[str, Record]) -> Iterator[Variant]:
    """All resident; down_proj streamed early in one copy, in one copy a key, and late; lm_head early, whole and cut."""
    yield Variant("resident", plan, memory.bind(plan), (), None)
    for name, parts, late in (("down_proj", 0, 0), ("down_proj", 1, 0), ("down_proj", 0, 1), ("lm_head", 0, 0)):
        record = records[name]
        how = "late, one copy" if late else "early, one copy a key" if parts else "early, one copy"
        copies = record.copies(bool(parts), record.step.index - 1 if late else -1)
        yield Variant(f"{name} {how}", plan, memory.bind(plan, record.moved), copies, record)
    record, bands = records["lm_head"], 8
    banded, copies = record.bands(plan, bands)
    yield Variant(f"lm_head early, {bands} bands, resident", banded, memory.bind(banded), (), None)
    yield Variant(f"lm_head early, {bands} bands", banded, memory.bind(banded, record.moved), copies, record)


@contextmanager
def streaming(memory: Memory, record: Record | None) -> Iterator[None]:
    """A streamed record has no bytes but those of its copies: its slot and its place in the arena are poison."""
    if record is not None:
        memory.card.fill(record.slot, record.nbytes)
        for k in record.keys:
            memory.card.fill(memory.arena.base + memory.offsets[k], memory.plan.keys[k].nbytes)
    yield
    if record is not None:
        memory.load(record.keys)


def timed(passes: Passes, work: Callable[[], Any], replays: int = TOKENS, repeats: int = 15) -> dict[str, float]:
    """Microseconds a pass, `replays` back to back from the same state: device by events, host in the calls alone."""
    card, start, end = passes.card, passes.card.event(timed=True), passes.card.event(timed=True)
    device, host = [], []
    for _ in range(repeats):
        passes.rewind()
        ask(driver.cuEventRecord(start, card.compute))
        for _ in range(replays):
            before = time.perf_counter_ns()
            work()
            host.append((time.perf_counter_ns() - before) / 1e3)
        ask(driver.cuEventRecord(end, card.compute))
        card.sync()
        device.append(ask(driver.cuEventElapsedTime(start, end)) * 1e3 / replays)
    return {"device_us": median(device), "least": min(device), "most": max(device), "host_us": median(host)}


def measure(passes: Passes, variant: Variant, resident: Sequence[Sequence[list[bytes]]]) -> dict[str, Any]:
    """Record a variant, hold it against the eager passes' states, count its nodes and time it."""
    card, memory = passes.card, passes.memory
    recorded = capture(card, variant.launches, variant.copies)
    found, wanted = census(recorded), predicted(variant.plan, variant.copies)
    record: dict[str, Any] = {"graph": {k: v for k, v in found.items() if k != "copies"}}
    record["copy_nodes_bytes"] = [n for _, n in found["copies"]]
    record["graph_as_predicted"] = found == wanted
    with streaming(memory, variant.record):
        step = passes.replayed(recorded)
        record["same_bits_forced"] = passes.trace(step, FORCED) == resident[0]
        record["same_bits_free"] = passes.trace(step, ()) == resident[1]
        record |= timed(passes, step)
        record["one_replay_us"] = timed(passes, step, replays=1, repeats=100)["device_us"]
        if variant.record is not None:
            alone = capture(card, (), [Copy(c.source, c.target, c.nbytes, -1, 0) for c in variant.copies])
            record["copies_alone_us"] = timed(passes, passes.replayed(alone))["device_us"]
            memory.card.fill(variant.record.slot, variant.record.nbytes)
            dropped = passes.trace(passes.replayed(capture(card, variant.launches, ())), ())
            record["nan_without_the_copy"] = math.isnan(gap_of(dropped[0]))
    return record


def gap_of(state: list[bytes]) -> float:
    return float(np.frombuffer(state[1], np.float32, 1, CONTROL_OFFSETS["gap"])[0])


def token_of(state: list[bytes]) -> int:
    return int(np.frombuffer(state[1], np.int64, 1, CONTROL_OFFSETS["ids"])[0])


def step_us(passes: Passes, chain: int = 20) -> dict[str, float]:
    """Device microseconds of each step, as one of a chain of itself in a graph: launch gap included."""
    out = {}
    for b in passes.launches:
        recorded = capture(passes.card, [b] * chain, ())
        us = timed(passes, passes.replayed(recorded), replays=5, repeats=9)["device_us"] / chain
        out[f"{b.step.index} {b.step.kernel}"] = us
    return out


def link(passes: Passes, nbytes: int = 256 << 20) -> float:
    """Pinned host to device in one large copy, bytes per second."""
    card = passes.card
    source, _ = card.pinned(nbytes)
    target = card.alloc(nbytes)
    work = lambda: ask(driver.cuMemcpyHtoDAsync(target, source, nbytes, card.compute))  # noqa: E731
    return nbytes / timed(passes, work, replays=4, repeats=5)["device_us"] * 1e6


def copy_nodes(passes: Passes, record: Record, piece: int = 65536) -> dict[int, dict[str, float]]:
    """What copy nodes cost by their number, in one chain: device and host microseconds of a graph of nothing else."""
    out = {}
    for count in (n for n in (1, 4, 16, 64, 256) if n * piece <= record.nbytes):
        chain = [Copy(record.source + i * piece, record.slot + i * piece, piece, -1, 0) for i in range(count)]
        out[count] = timed(passes, passes.replayed(capture(passes.card, (), chain)), replays=20, repeats=9)
    return out


def crossings(passes: Passes, record: Record) -> dict[str, float]:
    """A resident pass with tiny copies beside it: what edges between the branches cost, by their number.

    Joins: copies that start at once, each with a late reader of its own. Forks: copies that each follow another step,
    all with the last step as reader.
    """
    last, out = len(passes.launches) - 1, {}
    for n in (0, 1, 2, 4, 8, 12):
        for name, places in (("joins", [(-1, last - i) for i in range(n)]), ("forks", [(i, last) for i in range(n)])):
            copies = [Copy(record.source, record.slot, 256, *place) for place in places]
            recorded = capture(passes.card, passes.launches, sorted(copies, key=lambda c: c.needed_by))
            out[f"{n} {name}"] = timed(passes, passes.replayed(recorded))["device_us"]
    return out


def remap(passes: Passes, record: Record) -> dict[str, Any]:
    """Fresh granules under a recorded graph's key, poisoned, then filled: what the same graph reads each time."""
    memory, granule = passes.memory, passes.memory.arena.granule
    span = [memory.offsets[k] for k in record.keys]
    first, last = span[0] // granule, (span[-1] + memory.plan.keys[record.keys[-1]].nbytes - 1) // granule
    step = passes.replayed(capture(passes.card, passes.launches, ()))
    before = passes.trace(step, FORCED[:1])[0]
    passes.card.sync()  # unmapping does not wait for readers
    for index in range(first, last + 1):
        memory.arena.swap(index)
    passes.card.fill(memory.arena.base + first * granule, (last + 1 - first) * granule)
    poisoned = passes.trace(step, FORCED[:1])[0]
    ends = [o + k.nbytes for o, k in zip(memory.offsets, memory.plan.keys, strict=True)]
    inside = [i for i, o in enumerate(memory.offsets) if o < (last + 1) * granule and ends[i] > first * granule]
    memory.load(inside)
    return {
        "granules": last + 1 - first,
        "keys_refilled": len(inside),
        "nan_while_poisoned": math.isnan(gap_of(poisoned)),
        "same_bits_after_refill": passes.trace(step, FORCED[:1])[0] == before,
    }


def vmm_beside_work(passes: Passes, record: Record) -> dict[str, Any]:
    """Microseconds of each call on a granule that nothing reads, with the card idle and with 20 ms of copies queued.

    A granule that a running graph reads is never unmapped here: that is an illegal access, which ends the context and
    is reported to the card's owner as a fault.
    """
    card, spare = passes.card, Arena(passes.card, 1)
    long = passes.replayed(
        capture(card, (), [Copy(c.source, c.target, c.nbytes, -1, 0) for c in record.copies(False, -1)])
    )
    out: dict[str, Any] = {}

    def call(name: str, act: Callable[[], Any], calls: dict[str, list[float]]) -> Any:
        before = time.perf_counter_ns()
        result = act()
        calls.setdefault(name, []).append((time.perf_counter_ns() - before) / 1e3)
        return result

    for state in ("idle", "busy"):
        calls: dict[str, list[float]] = {}
        running = []
        for _ in range(9):
            card.sync()
            done = card.event()
            for _ in range(40 if state == "busy" else 0):
                long()
            ask(driver.cuEventRecord(done, card.compute))
            handle = call("create", spare.create, calls)
            call("unmap_release", partial(spare.unmap, 0), calls)
            call("map_access", partial(spare.map, 0, handle), calls)
            spare.handles[0] = handle
            running.append(int(driver.cuEventQuery(done)[0]) != 0)
        out[state] = {n: median(v) for n, v in calls.items()} | {"work_running_after": sum(running), "of": len(running)}
    card.sync()
    return out


def host_sources(passes: Passes, graph: Graph, record: Record) -> dict[str, Any]:
    """May a copy node read what is not pinned: a plain array, and the mapped weight file registered in place?"""
    card, target = passes.card, record.slot
    plain = np.arange(record.nbytes, dtype=np.uint8)
    name = passes.plan.keys[record.keys[0]].name
    data = graph.weights[name].data
    start = data.ctypes.data & -4096
    length = (data.ctypes.data + data.nbytes - start + 4095) & -4096
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    out: dict[str, Any] = {
        "read_only_register_supported": int(ask(driver.cuDeviceGetAttribute(attribute, card.device)))
    }

    def attempt(label: str, act: Callable[[], Any]) -> None:
        try:
            out[label] = act()
        except CudaError as error:
            out[label] = str(error)
            driver.cuStreamEndCapture(card.compute)  # a failed capture must still be closed

    def rate(source: NDArray[np.uint8]) -> dict[str, Any]:
        card.fill(target, source.nbytes)
        recorded = capture(card, (), [Copy(source.ctypes.data, target, source.nbytes, -1, 0)])
        us = timed(passes, passes.replayed(recorded), replays=5, repeats=5)["device_us"]
        landed = bool((card.read(target, source.nbytes) == source).all())
        return {"gb_per_s": source.nbytes / us / 1e3, "landed": landed}

    def registered(flags: int) -> dict[str, Any]:
        ask(driver.cuMemHostRegister(start, length, flags))
        try:
            return rate(data)
        finally:
            ask(driver.cuMemHostUnregister(start))

    attempt("plain_array", lambda: rate(plain))
    attempt("mapped_file", lambda: rate(data))
    attempt("mapped_file_registered", lambda: registered(0))
    attempt("mapped_file_registered_read_only", lambda: registered(8))
    return out


def simulated_ids(model: Path) -> list[int]:
    """The ids that the simulator gives: the prompt's, then TOKENS more."""
    lines: list[dict[str, Any]] = []
    request = RunRequest(model, PROMPT, TOKENS + 1, ignore_eos=True, device="sim")
    execute(request, lines.append, time.perf_counter_ns)
    return [int(i) for line in lines if line["type"] == "generation" for i in line["ids"]]


def card_facts(card: Card) -> dict[str, Any]:
    """Card, driver, versions and the date."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": ask(driver.cuDeviceGetName(64, card.device)).decode().strip("\0"),
        "driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None,
        "cuda": int(ask(driver.cuDriverGetVersion())),
        "granularity": card.granularity,
        "kernels_compile_and_load_ms": card.compile_ms,
    }


def main() -> None:
    """Run everything, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    graph = load(args.model)
    plans = {rows: lower(graph, rows) for rows in (1, len(PROMPT))}
    plan, card = plans[1], Card()
    memory = Memory(
        card, graph, plans, Buckets(graph.info.context_length or len(PROMPT) + TOKENS).of(len(PROMPT) + TOKENS)
    )
    passes = Passes(card, memory, plans)
    wider = Passes(card, Memory(card, graph, plans, 2 * memory.capacity), plans)
    facts = {**card_facts(card), "steps": len(plan.steps), "keys": len(plan.keys), "W": plan.weight_bytes}
    record: dict[str, Any] = {"facts": facts, "errors": passes.errors, "chunk_invariant": passes.chunk_invariant}
    try:
        record["capacity_invariant"] = passes.eager_trace() == wider.eager_trace()
        fill(record, passes, graph, simulated_ids(args.model))
    finally:  # what was measured before a failure is worth keeping
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        show(record)


def fill(record: dict[str, Any], passes: Passes, graph: Graph, expected: list[int]) -> None:
    """Every measurement into the record, the ones that may fail last."""
    card, memory, plan = passes.card, passes.memory, passes.plan
    record["misaligned"] = [p.operand.name for b in passes.launches for p in b.placed if p.address % 16]
    eager = lambda: run(card, passes.launches)  # noqa: E731
    states = [passes.eager_trace(), passes.eager_trace(())]
    free = [passes.prompt_token, *map(token_of, states[1])]
    record |= {"same_ids_as_simulator": free == expected, "distinct_ids": len(set(free))}
    record["distinct_logit_rows_forced"] = len({s[0] for s in states[0]})
    record["link_bytes_per_s"] = link(passes)
    records = {name: Record(memory, plan, name) for name in ("down_proj", "lm_head")}
    record["record_bytes"] = {name: r.nbytes for name, r in records.items()}
    record["passes"] = {"eager": timed(passes, eager)}
    for variant in variants(memory, plan, records):
        record["passes"][variant.name] = measure(passes, variant, states)
    record["step_us"] = step_us(passes)
    record["copy_nodes_64k"] = copy_nodes(passes, records["lm_head"])
    record["crossings_us"] = crossings(passes, records["down_proj"])
    record["remap"] = remap(passes, records["down_proj"])
    record["vmm_us"] = vmm_beside_work(passes, records["lm_head"])
    record["host_sources"] = host_sources(passes, graph, records["lm_head"])


def show(record: Mapping[str, Any]) -> None:
    """The record as a short table."""
    print(f"{'pass':34} {'device us':>10} {'host us':>8} {'one us':>8} {'copy us':>8} {'nodes':>6}  bits, graph")
    for name, p in record.get("passes", {}).items():
        nodes = sum(p["graph"]["types"].values()) if "graph" in p else 0
        cells = [p["device_us"], p["host_us"], p.get("one_replay_us", math.nan), p.get("copies_alone_us", math.nan)]
        good = [p.get(k) for k in ("same_bits_forced", "same_bits_free", "graph_as_predicted", "nan_without_the_copy")]
        print(f"{name:34} {cells[0]:10.2f} {cells[1]:8.2f} {cells[2]:8.2f} {cells[3]:8.2f} {nodes:6}  {good}")
    for name, error in record["errors"].items():
        print(f"{name:34} {error:.2e}")
    print({k: v for k, v in record.items() if k not in ("passes", "errors")})


if __name__ == "__main__":
    main()
