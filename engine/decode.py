"""Run plans on a device: bind steps to addresses, page weights in, capture and replay the one-token step."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.capture import CapturePlan, cut
from engine.counters import Tally
from engine.device.base import CONTROL, Device, Launch, Placed, Recorded
from engine.errors import NonFiniteLogits
from engine.graph import DTYPES, Graph, stored_bytes
from engine.kv import KvCache
from engine.paging.pager import Pager
from engine.plan import Operand, Plan, Step
from engine.prefix import check_no_states, nothing_cached

_UNSTEADY_STEPS = 2
"""One-token steps of a process that do not count as steady: the warm one and the recording one, captured or not."""

_GAP_BYTES, _LENGTH_BYTES, _ID_BYTES = 8, 8, 8
"""The control block: length, then gap and ahead (four bytes each), then ids; so one copy brings gap and token."""
_AHEAD_OFFSET = _LENGTH_BYTES + 4


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token: its id and the gap between the two best logits."""

    token: int
    gap: float


def control_bytes(rows: int) -> int:
    """Bytes of the control block for prompt chunks of at most `rows` tokens."""
    return _LENGTH_BYTES + _GAP_BYTES + _ID_BYTES * rows


class Decoder:
    """One sequence on one device. `plans` maps rows to a plan; 1 is the decode step."""

    def __init__(
        self,
        device: Device,
        graph: Graph,
        plans: Mapping[int, Plan],
        pager: Pager,
        kv: KvCache,
        capture: bool,
        tally: Tally,
    ) -> None:
        self._device = device
        self.profile = device.profile
        self._plans = plans
        self._pager = pager
        self._kv = kv
        self._tally = tally
        self._length = 0
        self._cached = nothing_cached(plans[1])
        self._next = 0  # the id that stands on the device and goes in next
        self._control = device.alloc(control_bytes(max(plans)), CONTROL)
        self._workspace = device.alloc(max(p.workspace_bytes for p in plans.values()), "workspace")
        constants = {c.name: c for plan in plans.values() for c in plan.constants}
        self._constants = {name: device.alloc(c.nbytes, f"constant {name}") for name, c in constants.items()}
        for name, constant in constants.items():
            device.copy_in(self._constants[name], constant.data)
        self._launches: dict[tuple[int, int, tuple[int, ...]], Launch] = {}
        self._states = [device.alloc(s.nbytes, f"state {s.name}") for s in plans[1].states]
        self._host = {w.name: w.array() for plan in plans.values() for w in plan.hosts}
        self.capture_plan: CapturePlan | None = cut(plans[1], pager.steady) if capture else None
        self._warm = False
        self._recorded: list[Recorded | None] | None = None
        if self.capture_plan is not None:
            tally.set("segments", self.capture_plan.captured)
            tally.set("seams", self.capture_plan.seam_runs)
            tally.set("seam_nodes", len(self.capture_plan.seams))

    def reset(self) -> None:
        """Begin a new sequence: no position is cached."""
        self._kv.restart()
        self._cached.ids.clear()
        self._length = 0
        self._device.copy_in(self._control, np.zeros(1, np.int64))
        self._device.copy_in(self._control + _AHEAD_OFFSET, np.zeros(1, np.int32))
        for address, state in zip(self._states, self._plans[1].states, strict=True):
            self._device.fill(address, state.nbytes, 0)

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Begin a prompt, anew or from what it shares with the cached positions; how many of them it keeps."""
        kept = self._cached.shared(prompt) if reuse else 0
        if kept:
            self._keep(kept)
        else:
            self.reset()
        self._tally.add("prefix_hit_tokens", kept)
        self._tally.add("prefix_hit_bytes", kept * self._kv.geometry.bytes_per_token)
        return kept

    def rewind(self, tokens: int) -> None:
        """Keep the first `tokens` cached positions and go on from there; graphs hold, since nothing moves.

        Raises BadRequest where a recurrent or convolution state would have to go back too, or a prompt's rotary table.
        """
        self._cached.check_rewind(tokens)
        self._keep(tokens)

    def _keep(self, tokens: int) -> None:
        if tokens == self._length:
            return
        check_no_states(self._plans[1])
        self._kv.forget(tokens, self._length)
        self._length = tokens
        del self._cached.ids[tokens:]
        self._device.copy_in(self._control, np.asarray([tokens], np.int64))

    def prefill(self, ids: Sequence[int], chunk: int) -> Emitted:
        """Feed a prompt in chunks of at most `chunk` tokens; the token that follows it.

        The cache starts in the whole prompt's bucket, so that chunks cause no growth.
        """
        self._make_room(len(ids))
        if not self._length:
            self._cached.begin(len(ids))
        emitted = None
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            ahead = np.asarray([len(ids) - start - len(part)], np.int32)
            self._device.copy_in(self._control + _AHEAD_OFFSET, ahead)
            self._device.copy_in(self._control + _LENGTH_BYTES + _GAP_BYTES, np.asarray(part, np.int64))
            emitted = self._forward(part)
        assert emitted is not None, "an empty prompt was refused before"
        return emitted

    def step(self) -> Emitted:
        """Feed the token that was chosen last, which stands on the device; the one that follows it."""
        return self._forward([self._next])

    def feed(self, token: int) -> None:
        """Put another token in place of the one that was chosen last."""
        self._device.copy_in(self._control + _LENGTH_BYTES + _GAP_BYTES, np.asarray([token], np.int64))
        self._next = token

    def force(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Feed given ids in one call, by the plan of so many rows; the logits it leaves, float32 [rows, vocabulary].

        Rows are all of the call's where the plan keeps them, else the last one.
        """
        self._device.copy_in(self._control + _LENGTH_BYTES + _GAP_BYTES, np.asarray(ids, np.int64))
        if not self._length:
            self._cached.begin(len(ids))
        self._forward(ids)
        plan = self._plans[len(ids)]
        ref = plan.logits
        address = self._workspace + plan.buffers[ref.index].offset_bytes + ref.offset_bytes
        raw = self._device.copy_out(address, stored_bytes(ref.dtype, math.prod(ref.shape)))
        return np.frombuffer(raw, DTYPES[ref.dtype]).reshape(-1, ref.shape[-1]).astype(np.float32)

    def close(self) -> None:
        """Free what the decoder allocated."""
        for address in (self._control, self._workspace, *self._constants.values(), *self._states):
            self._device.free(address)

    def _forward(self, ids: Sequence[int]) -> Emitted:
        """One pass over ids that stand on the device."""
        rows = len(ids)
        plan = self._plans[rows]
        self._make_room(rows)
        before = self._device.tally.read()
        if rows == 1:
            self._one_token(plan)
        else:
            self._eager(plan, plan.steps)
        self._length += rows
        self._cached.ids.extend(ids)
        self._account(plan, before)
        raw = self._device.copy_out(self._control + _LENGTH_BYTES, _GAP_BYTES + _ID_BYTES)
        gap, token = struct.unpack("<f4xq", raw)
        if math.isnan(gap):
            raise NonFiniteLogits(
                f"logits at position {self._length - 1} are not finite", "the run's tokens cannot be used"
            )
        self._next = token
        return Emitted(token, gap)

    def _make_room(self, rows: int) -> None:
        """Have the cache hold `rows` positions more; where it moved, what had its addresses baked in is void."""
        growth = self._kv.ensure(self._length + rows, kept=self._length)
        if growth == "moved":
            self._launches.clear()
            self._warm = False  # other strides are another signature: run eagerly once before it is recorded
            if self._recorded is not None:
                self._recorded = None
                self._tally.add("invalidations")
                self._tally_nodes()
        elif growth == "kept" and self._length and self._recorded is not None:
            self._tally.add("growth_keeps")

    def _account(self, plan: Plan, before: Mapping[str, int | float]) -> None:
        self._tally.add("forward_steps")
        self._tally.add("touches", plan.touches)
        self._tally.add("gather_bytes", plan.gather_bytes)
        after = self._device.tally.read()
        if plan.rows == 1:
            steady = self._tally.read().get("decode_steps", 0) >= _UNSTEADY_STEPS
            self._tally.add("decode_steps")
            self._device.tally.set("step_kernels", int(after["kernel_runs"] - before.get("kernel_runs", 0)))
            alloc_calls = int(after["alloc_calls"] - before["alloc_calls"])
            self._tally.add("alloc_calls_steady", alloc_calls if steady else 0)
            vmm_calls = int(after.get("vmm_calls", 0) - before.get("vmm_calls", 0))
            self._tally.add("vmm_calls_steady", vmm_calls if steady else 0)

    def _one_token(self, plan: Plan) -> None:
        """Warm, record or replay."""
        if self.capture_plan is None:
            self._eager(plan, plan.steps)
        elif not self.capture_plan.captured:
            self._eager(plan, plan.steps)
            self._tally.add("fallbacks")
        elif not self._warm:
            self._eager(plan, plan.steps)
            self._warm = True
            self._tally.add("warm_steps")
        elif self._recorded is None:
            self._record(plan, self.capture_plan)
            self._tally.add("captures")
        else:
            self._replay(plan, self.capture_plan, self._recorded)
            self._tally.add("replays")

    def _record(self, plan: Plan, capture: CapturePlan) -> None:
        recorded: list[Recorded | None] = []
        for segment in capture.segments:
            if not segment.captured:
                self._eager(plan, segment.steps)
                recorded.append(None)
                continue
            launches = [self._bind(plan, s, tuple(self._pager.touch(k) for k in s.keys)) for s in segment.steps]
            self._device.begin_capture()
            for launch in launches:
                self._device.launch(launch)
            graph = self._device.end_capture()
            self._device.replay(graph)
            self._pager.release()
            recorded.append(graph)
        self._recorded = recorded
        self._tally_nodes()

    def _replay(self, plan: Plan, capture: CapturePlan, recorded: list[Recorded | None]) -> None:
        for segment, graph in zip(capture.segments, recorded, strict=True):
            if graph is None:
                self._eager(plan, segment.steps)
                continue
            for key in segment.keys:  # steady keys keep their addresses, so the baked ones hold
                self._pager.touch(key)
            self._device.replay(graph)
            self._pager.release()

    def _eager(self, plan: Plan, steps: Sequence[Step]) -> None:
        for step in steps:
            self._device.launch(self._bind(plan, step, tuple(self._pager.touch(k) for k in step.keys)))
            self._pager.release()

    def _tally_nodes(self) -> None:
        nodes = sum(g.nodes for g in self._recorded or () if g is not None)
        self._device.tally.set("graph_nodes", nodes)

    def _bind(self, plan: Plan, step: Step, keys: tuple[int, ...]) -> Launch:
        """A step at its addresses; the same step at the same addresses is one launch."""
        name = (plan.rows, step.index, keys)
        launch = self._launches.get(name)
        if launch is None:
            places = iter(keys)
            launch = Launch(step, tuple(self._place(plan, o, places) for o in step.operands))
            self._launches[name] = launch
        return launch

    def _place(self, plan: Plan, operand: Operand, keys: Any) -> Placed:
        ref = operand.ref
        nbytes = stored_bytes(ref.dtype, int(np.prod(ref.shape, dtype=np.int64)))
        match ref.kind:
            case "key":
                return Placed(operand, next(keys), nbytes)
            case "buffer":
                address = self._workspace + plan.buffers[ref.index].offset_bytes + ref.offset_bytes
                return Placed(operand, address, nbytes)
            case "state":
                return Placed(operand, self._states[ref.index], nbytes)
            case "constant":
                return Placed(operand, self._constants[ref.name], nbytes)
            case "kv_key" | "kv_value":
                placement = self._kv.placement
                address = self._kv.address(ref.index, "key" if ref.kind == "kv_key" else "value")
                return Placed(operand, address, placement.nbytes, placement=placement)
            case "host":
                return Placed(operand, 0, nbytes, self._host[ref.name])
            case "control":
                offsets = {
                    "length": 0,
                    "gap": _LENGTH_BYTES,
                    "ahead": _AHEAD_OFFSET,
                    "ids": _LENGTH_BYTES + _GAP_BYTES,
                }
                return Placed(operand, self._control + offsets[ref.name], nbytes)
