"""The engine and onnxruntime in turns on one card, on the same model file, and where onnxruntime's nodes ran.

A plugin's provider that takes no node leaves a session that names it and runs on the CPU without a word. So each figure
stands beside what onnxruntime says of itself: the provider that each node of the graph was given to, and from a profile
of decode steps in a session of its own the nodes that ran on each provider, by operator, and their time by the host's
clock. `figure_of` names the providers that ran nodes, and there is a ratio where the one asked for ran all or some.

The prompt goes in at once; keys and values stay where the session leaves them and are bound back as they grow; logits
come to the host, as the graph chooses nothing. The session lives in a process of its own: a library that cannot be
loaded, ends its process or does not answer in time is a label with the error's text, not a slow result.

    python -m benchmarks.cuda_peers_ort --model models/qwen2.5-0.5b --plugin nxrt_ep_cuda --out ort.json   (needs a GPU)

With `--provider CPUExecutionProvider --device sim` in the plugin's place it runs without one: ids, and no rate of ours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cuda_decode import arm
from benchmarks.cuda_peers import ROUNDS, TOKENS, agreeing, generated
from engine.device.cuda import CudaDevice
from engine.onnx_load import recorded_digest
from jobs.adapters.onnxruntime import OrtDecoder, provider_for

PROFILED_STEPS = 8
ENDS_IN_S = 30
SETTINGS = ("ONNX_GENAI_", "ORT_", "OMP_")
"""How names of variables begin that change what a peer does; those that are set stand in the record."""


class PeerLost(Exception):
    """The peer's process told of an error, ended, or did not answer in time."""


def ran(profile: Path) -> dict[str, dict[str, Any]]:
    """What a profile says of all runs but its first, by provider: nodes, their operators, times run, microseconds."""
    events = json.loads(profile.read_text(encoding="utf-8"))
    second = sorted(e["ts"] for e in events if e["name"] == "model_run")[1]
    steps: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["cat"] != "Node" or not event["name"].endswith("_kernel_time") or event["ts"] < second:
            continue
        of = steps.setdefault(event["args"]["provider"], {"names": {}, "runs": 0, "us": 0})
        of["names"][event["name"]] = event["args"]["op_name"]
        of["runs"] += 1
        of["us"] += event["dur"]
    for of in steps.values():
        names = of.pop("names")
        of |= {"nodes": len(names), "operators": dict(Counter(names.values()).most_common())}
    return steps


def share_of(provider: str, steps: dict[str, dict[str, Any]]) -> str:
    """Which of the nodes that ran did so on `provider`: all, some or none."""
    if provider not in steps:
        return "none"
    return "all" if len(steps) == 1 else "some"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the peer's process is to do: `provider` by name and `plugin` by module, at least one of them."""

    model: Path
    provider: str | None
    plugin: str | None
    kv: str
    tokens: int


def serve(pipe: Connection, asked: Asked) -> None:
    """The peer's process: tells of its session, then of its profile, then of a generation whenever it is asked for one.

    An error goes over as its text and ends it.
    """
    try:
        ort: Any = import_module("onnxruntime")
        provider = provider_for(ort, asked.provider, asked.plugin)
        with tempfile.TemporaryDirectory() as folder:
            decoder = OrtDecoder(ort, asked.model, provider, asked.kv, Path(folder) / "profile")
            given = decoder.assigned()
            named = {"provider": provider.name, "session_providers": decoder.session.get_providers()}
            pipe.send({"onnxruntime": ort.__version__, **named, "assigned": given})
            generated(decoder, 1 + PROFILED_STEPS)
            pipe.send({"ran": ran(Path(decoder.session.end_profiling())), "kv_on": decoder.kv_found_on})
        del decoder
        decoder = OrtDecoder(ort, asked.model, provider, asked.kv)
        generated(decoder, asked.tokens)  # left out, as the engine's first is
        pipe.send({"assigned_as_profiled": decoder.assigned() == given})
        while pipe.recv():
            pipe.send(generated(decoder, asked.tokens))
    except Exception as error:  # noqa: BLE001  # the process's edge: whatever a peer's library raises is a label
        pipe.send(f"{type(error).__name__}: {error}")


class Peer:
    """The process of a peer, from the outside."""

    def __init__(self, asked: Asked, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        start = multiprocessing.get_context("spawn")  # a fork would take over what the parent holds of a driver
        self.pipe, theirs = start.Pipe()
        self.process = start.Process(target=serve, args=(theirs, asked), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """What comes next. Raises PeerLost for an error, an end and a silence."""
        if not self.pipe.poll(self.timeout_s):
            raise PeerLost(f"no answer in {self.timeout_s:g} s")
        try:
            told = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if isinstance(told, str):
            raise PeerLost(told)
        return told

    def generation(self) -> tuple[list[int], float]:
        """Ids and tokens a second. Raises PeerLost."""
        try:
            self.pipe.send(True)
        except ConnectionError:
            raise self._ended() from None
        ids, rate = self.answer()
        return ids, rate

    def end(self) -> None:
        """Kill it: one that hangs in a driver's call hears nothing less."""
        self.process.kill()
        self.process.join(ENDS_IN_S)

    def _ended(self) -> PeerLost:
        self.process.join(ENDS_IN_S)
        return PeerLost(f"its process ended with {self.process.exitcode}")


def measured(peer: Peer, asked: Asked, device: str) -> dict[str, Any]:
    """The record. Its `label` is ran, or what did not come about: cannot load until there is a session."""
    record: dict[str, Any] = {"label": "cannot load"}
    ours: list[dict[str, Any]] = []
    theirs: list[tuple[list[int], float]] = []
    try:
        record |= peer.answer()
        record["label"] = "cannot run"
        record |= peer.answer()
        steps = record["ran"]
        record |= {"figure_of": " and ".join(sorted(steps)), "ran_on_provider": share_of(record["provider"], steps)}
        record |= peer.answer()
        for _ in range(ROUNDS):
            theirs.append(peer.generation())
            if device == "cuda" or not ours:
                ours.append(arm(asked.model, asked.tokens, 2, {}, device))
            if ours[-1]["exit_code"]:
                rates = {"ort_tokens_per_s": [rate for _, rate in theirs]}
                return record | {"label": "the engine failed", "error": ours[-1]["error"], **rates}
    except PeerLost as lost:
        return record | {"error": str(lost), "ort_tokens_per_s": [rate for _, rate in theirs]}
    if device == "cuda":
        card = CudaDevice()
        record["card"] = {"name": card.name, "driver": card.driver}
    record["label"] = "ran"
    return record | compared(ours, theirs, rated=device == "cuda", given=record["ran_on_provider"] != "none")


def compared(
    ours: list[dict[str, Any]], theirs: list[tuple[list[int], float]], *, rated: bool, given: bool
) -> dict[str, Any]:
    """Rates and ids of both. No rate of ours where no card ran it, no ratio where the provider ran nothing."""
    rates = [rate for _, rate in theirs]
    mine = [run["tokens_per_s"]["median"] for run in ours] if rated else None
    return {
        "engine_tokens_per_s": mine,
        "ort_tokens_per_s": rates,
        "ort_median": median(rates),
        "ratio": median(mine) / median(rates) if mine and given else None,
        "ids_before_the_first_that_differs": agreeing(ours[0]["ids"], theirs[0][0]),
        "ort_repeats_itself": len({tuple(ids) for ids, _ in theirs}) == 1,
    }


def main() -> int:
    """Measure in turns, write the record, print it short. 1 where there is no figure of the provider asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--plugin", help="module of a plugin's wheel, such as nxrt_ep_cuda")
    parser.add_argument("--provider", help="one built in, or one of several that the plugin offers")
    parser.add_argument("--kv", choices=("provider", "host"), default="provider", help="where keys and values are kept")
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="the engine's; sim gives ids alone")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--timeout", type=float, default=120, help="seconds that the peer has for each answer")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.tokens < 2:
        parser.error(f"--tokens {arguments.tokens}: the first is not timed; pass 2 or more")
    model = arguments.model.absolute()
    asked = Asked(model, arguments.provider, arguments.plugin, arguments.kv, arguments.tokens)
    peer = Peer(asked, arguments.timeout)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": recorded_digest(model),
        "plugin": arguments.plugin,
        "asked_for": arguments.provider,
        "kv": arguments.kv,
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }
    try:
        record |= measured(peer, asked, arguments.device)
    finally:
        peer.end()
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 0 if record["label"] == "ran" and record["ran_on_provider"] != "none" else 1


if __name__ == "__main__":
    raise SystemExit(main())
