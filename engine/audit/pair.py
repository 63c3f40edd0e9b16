"""Two decoders in step over the same prompts: the one that is audited, and a shadow that is resident and eager.

The shadow's weights are all in, its cache starts at its last bucket and never moves, and it records no graph. Both run
the same kernels over the same plan, so that equal to the last bit is the contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from engine.audit.difference import Difference
from engine.audit.sequences import Sequences, Side
from engine.audit.watched import WatchedDevice, unheard
from engine.audit.weights import Weights
from engine.batch import Emitted
from engine.config import EngineConfig, RunRequest
from engine.counters import Tally
from engine.device.base import Device
from engine.errors import DeviceFailure, EngineError, NonFiniteLogits, OutOfMemory
from engine.graph import Graph
from engine.plan import Plan
from engine.run import close, set_up

RAN = ("page_ins", "evictions", "bypassed_page_ins", "captures", "replays", "invalidations", "kv_growths")
"""Counters that say which paths the audited run took at all."""


@dataclass(frozen=True, slots=True)
class At:
    """A pass: generations count from 1, step 0 is the prompt. `lengths` are the sequences' before and after it."""

    generation: int
    step: int
    before: tuple[int, ...]
    lengths: tuple[int, ...]

    def line(self) -> dict[str, int]:
        """As JSON has it; the position is that of the last token that went in, of the longest sequence."""
        return {"generation": self.generation, "step": self.step, "position": max(self.lengths) - 1}

    def located(self, one: Difference) -> Difference:
        """At the position of this pass's token, of the difference's own sequence, where it does not know better."""
        if one.position is not None:
            return one
        return replace(one, position=(max(self.lengths) if one.sequence is None else self.lengths[one.sequence]) - 1)


@dataclass(slots=True)
class Report:
    """What was checked, and the first pass after which something differed."""

    steps: int = 0
    checks: list[dict[str, Any]] = field(default_factory=list)
    at: At | None = None
    found: list[Difference] = field(default_factory=list)


class Audit:
    """A request audited on a device; `every` so many steps, and where a generation ends, memory is read back."""

    def __init__(
        self, request: RunRequest, device: Device, graph: Graph, plans: dict[int, Plan], *, every: int, shadow: bool
    ) -> None:
        self._request, self._every = request, every
        self.tally = Tally()
        self.device = WatchedDevice(device)
        self.setup = set_up(request, self.device.device, graph, plans, self.tally)
        self.weights = Weights(self.device, self.setup.plan)
        self._audited = Side(self.setup, self.device)
        self._shadow: Side | None = None
        self.sequences: Sequences | None = None
        self._ids = 0
        self._resident: dict[int, None] = {}
        if shadow:
            try:
                self._shadow = _shadow(request, device, graph, plans)
            except EngineError:
                self.close()
                raise
            self.sequences = Sequences(self._audited, self._shadow)

    @property
    def counts(self) -> Mapping[str, int]:
        """How much was compared."""
        weights, sequences = self.weights, self.sequences
        counted = {"keys": weights.keys, "key_bytes": weights.key_bytes, "granules": weights.granules}
        if sequences is None:
            return counted
        of_shadow = {"kv_bytes": sequences.kv_bytes, "state_bytes": sequences.state_bytes}
        return {**counted, **of_shadow, "logits": sequences.logits, "ids": self._ids}

    @property
    def ran(self) -> Mapping[str, int]:
        """What the audited run did."""
        counted = self.tally.read()
        return {name: int(counted.get(name, 0)) for name in RAN}

    def run(self) -> Report:
        """All generations, or up to the first difference.

        Raises what the shadow raises, and what the audited run does where nothing is found that explains it and there
        is no shadow to say that the model can do better.
        """
        report = Report()
        prompts = tuple(map(len, self._request.prompts))
        for generation in range(1, self._request.generations + 1):
            before = (0,) * len(prompts)
            for step in range(self._request.tokens):
                at = At(generation, step, before, prompts if step == 0 else tuple(n + 1 for n in before))
                report.found = [at.located(one) for one in self._pass(at, report)]
                report.steps += 1
                before = at.lengths
                if report.found:
                    report.at = at
                    return report
        return report

    def close(self) -> None:
        """Give everything back."""
        for side in (self._shadow, self._audited):
            if side is not None:
                close(side.setup, {})

    def _pass(self, at: At, report: Report) -> list[Difference]:
        due = at.step % self._every == 0 or at.step == self._request.tokens - 1
        weights = self.weights
        weights.crc32 = 0
        self.device.before_launch = weights.hear if due else unheard
        emitted, failure = self._advance(self._audited, at)
        self.device.before_launch = unheard
        expected: list[Emitted] = []
        if self._shadow is not None:
            expected, failed = self._advance(self._shadow, at)
            if failed is not None:  # a card that failed one fails both; a model without numbers has none twice
                if failure is None or not weights.found:
                    raise failure or failed
                return [*weights.found, Difference("failure", str(failure))]
        symptoms = [] if failure is not None else self._symptoms(at, emitted, expected)
        if not due and not symptoms and failure is None:
            return []
        found = [*self._standing(), *self._computed(at, failure), *symptoms]
        if failure is not None:
            if not found and self._shadow is None:
                raise failure
            found.append(Difference("failure", str(failure)))
        if not found:
            report.checks.append({**at.line(), **self._residents(), "crc32": f"{weights.crc32:08x}"})
        return found

    def _advance(self, side: Side, at: At) -> tuple[list[Emitted], EngineError | None]:
        """One pass of one side: what it chose, or how it failed."""
        decoder = side.setup.decoder
        try:
            if at.step:
                return decoder.step(), None
            decoder.reset()
            return decoder.prefill(self._request.prompts, self._request.config.prefill_chunk), None
        except (DeviceFailure, NonFiniteLogits) as error:
            return [], error

    def _symptoms(self, at: At, emitted: Sequence[Emitted], expected: Sequence[Emitted]) -> list[Difference]:
        """What a pass gave out against what the shadow's did."""
        if self.sequences is None:
            return []
        found = list(self.sequences.last_logits(self._rows(at)))
        self._ids += len(expected)
        for sequence, (got, right) in enumerate(zip(emitted, expected, strict=True)):
            if got.token != right.token:
                ids = str(right.token), str(got.token)
                found.append(Difference("ids", f"sequence {sequence + 1}", sequence, expected=ids[0], found=ids[1]))
                break
        return found

    def _rows(self, at: At) -> list[int]:
        """Rows of each sequence's last forward pass."""
        chunk = self._request.config.prefill_chunk
        return [1 if at.step else (length - 1) % chunk + 1 for length in at.lengths]

    def _standing(self) -> list[Difference]:
        """Keys that the pager says are in: what the pass itself read is checked before."""
        for key, address in self.setup.pager.standing():
            self.weights.check(key, address)
        return self.weights.found

    def _computed(self, at: At, failure: EngineError | None) -> list[Difference]:
        """Caches and states, the lowest layer first; those of a pass that broke off are as they were, or nobody's."""
        if self.sequences is None:
            return []
        broken = isinstance(failure, DeviceFailure)
        lengths = at.before if broken else at.lengths
        states = () if broken else self.sequences.states(len(lengths))
        caches = self.sequences.caches(lengths) if any(lengths) else ()
        return sorted(chain(caches, states), key=lambda one: -1 if one.layer is None else one.layer)

    def _residents(self) -> dict[str, Any]:
        """The resident set, and which keys came and went since the last check."""
        keys, pager = self.setup.plan.keys, self.setup.pager
        now = {key.index: None for key in keys if pager.resident(key.index)}
        before, self._resident = self._resident, now
        return {
            "resident_keys": len(now),
            "resident_bytes": sum(keys[k].nbytes for k in now),
            "entered": [keys[k].name for k in now if k not in before],
            "left": [keys[k].name for k in before if k not in now],
        }


def _shadow(request: RunRequest, device: Device, graph: Graph, plans: dict[int, Plan]) -> Side:
    """The same prompts with room for everything. Raises OutOfMemory where the device has none for both."""
    config, own = request.config, EngineConfig()
    positions = max(map(len, request.prompts)) + request.tokens
    roomy = replace(
        config,
        weight_budget=None,
        vram_limit=None,
        policy=own.policy,
        hot_experts=None,
        capture=False,
        kv_layout=own.kv_layout,
        kv_min_bucket=config.kv_capacity or positions,
    )
    watched = WatchedDevice(device)
    try:
        setup = set_up(replace(request, config=roomy), watched.device, graph, plans, Tally())
    except OutOfMemory as error:
        raise OutOfMemory(
            f"no room for the shadow's {plans[1].weight_bytes} bytes of weights: {error.message}", "leave out --shadow"
        ) from error
    return Side(setup, watched)
