"""Generations of a run: prompts in, tokens out, counters by phase, and what had been measured when a run broke off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.ahead import Ahead
from engine.batch import Emitted
from engine.config import RunRequest
from engine.counters import COUNTERS, PHASES, Tally
from engine.decode import Decoder
from engine.device.base import Device
from engine.graph import Graph
from engine.journal import Emit

Clock = Callable[[], int]
"""Wall time in ns, from any origin."""


@dataclass(slots=True)
class Stream:
    """What one sequence has given out: ids, the gap at each, and why it stopped (None: it has not)."""

    ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    stop_reason: str | None = None

    def take(self, emitted: Emitted, tokens: int, stops: frozenset[int]) -> None:
        """One token more, and the end where it is one, or the last of `tokens`."""
        self.ids.append(emitted.token)
        self.gaps.append(emitted.gap)
        if emitted.token in stops:
            self.stop_reason = "eos"
        elif len(self.ids) == tokens:
            self.stop_reason = "length"

    def line(self) -> dict[str, Any]:
        """As it stands in a generation line."""
        return {"ids": list(self.ids), "stop_reason": self.stop_reason, "gaps": list(self.gaps)}


@dataclass(slots=True)
class Progress:
    """What has been measured so far, for the error line."""

    tally: Tally = field(default_factory=Tally)
    device: Device | None = None
    streams: list[Stream] = field(default_factory=list)
    """Of the generation under way, one a sequence; none between two."""

    def read(self) -> dict[str, int | float]:
        """All counters, the device's own among them."""
        own = self.tally.read()
        return {**own, **self.device.tally.read()} if self.device is not None else own


def told(streams: Sequence[Stream]) -> dict[str, Any]:
    """Sequence 0's ids, stop reason and gaps; those of the others, where there are any, as `further`."""
    first, *further = [stream.line() for stream in streams]
    return {**first, "further": further} if further else first


def generate(
    request: RunRequest, emit: Emit, clock: Clock, progress: Progress, decoder: Decoder, graph: Graph
) -> list[dict[str, Any]]:
    """All generations, warm-ups first; the lines that were emitted of them."""
    total = request.warmups + request.generations
    loaded: dict[str, int | float] = progress.read()
    lines = []
    for index in range(total):
        emit({"type": "progress", "phase": "generation", "done": index, "of": total})
        line: dict[str, Any] = {"type": "generation", "index": index, "warmup": index < request.warmups}
        line |= _one(request, clock, progress, decoder, graph)
        if index == 0:
            line["counters"]["load"] = {k: v for k, v in loaded.items() if v}
        progress.streams = []  # it is told whole, and an error that follows is not to tell it again
        emit(line)
        lines.append(line)
    return lines


def emitted_tokens(generation: dict[str, Any]) -> int:
    """Tokens that all sequences of a generation gave out; without arithmetic, as many as they would have."""
    of_prompts = generation["counters"]["prefill"]["emitted_tokens"]
    return int(of_prompts + sum(generation["counters"][p].get("emitted_tokens", 0) for p in ("warm", "decode")))


def _one(request: RunRequest, clock: Clock, progress: Progress, decoder: Decoder, graph: Graph) -> dict[str, Any]:
    """One generation. It ends when every sequence has; without arithmetic there are steps, but no tokens."""
    computes = request.arithmetic == "full"
    phases: dict[str, dict[str, int | float]] = {p: {} for p in PHASES}
    prompts = request.prompts
    streams = progress.streams = [Stream() for _ in prompts]
    step_ns: list[int] = []
    stops = frozenset(graph.info.eos_ids) if computes and not request.ignore_eos else frozenset()
    ahead = Ahead(decoder)

    def take(phase: str, work: Callable[[], list[Emitted]]) -> int:
        before, start = progress.read(), clock()
        emitted = work()
        taken = clock() - start
        live = [sequence for sequence, stream in enumerate(streams) if stream.stop_reason is None]
        for sequence in live if computes else ():
            streams[sequence].take(emitted[sequence], request.tokens, stops)
            if streams[sequence].stop_reason is not None:
                decoder.stop(sequence)
        progress.tally.add("emitted_tokens", len(live))
        progress.tally.add("prefill_ns" if phase == "prefill" else "decode_ns", taken)
        after = progress.read()
        warm = after.get("warm_steps", 0) != before.get("warm_steps", 0) or after.get("captures", 0) != before.get(
            "captures", 0
        )
        _merge(phases["warm" if warm and phase == "decode" else phase], before, after)
        return taken

    def prefill() -> list[Emitted]:
        kept = decoder.begin(prompts, reuse=request.config.prefix_reuse)
        return decoder.prefill([p[k:] for p, k in zip(prompts, kept, strict=True)], request.config.prefill_chunk)

    prefill_ns = take("prefill", prefill)
    while 1 + len(step_ns) < request.tokens and any(stream.stop_reason is None for stream in streams):
        last = 2 + len(step_ns) >= request.tokens
        step_ns.append(take("decode", partial(ahead.step, "no" if last else "maybe" if stops else "yes")))
    if ahead.is_under_way:
        before = progress.read()
        ahead.end()
        _merge(phases["decode"], before, progress.read())
    return {**told(streams), "counters": phases, "prefill_ns": prefill_ns, "step_ns": step_ns}


def _merge(into: dict[str, int | float], before: dict[str, int | float], after: dict[str, int | float]) -> None:
    for name, value in after.items():
        if COUNTERS[name].kind == "activity":
            change = value - before.get(name, 0)
            if change or name in into:
                into[name] = into.get(name, 0) + change
        else:
            into[name] = value
