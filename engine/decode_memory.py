"""Plain memory of a decoder, and where each operand of a step lies: there, in the KV cache, or at a key's address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from engine.batch import CONTROL_OFFSETS, control, routed_offset, states, workspace
from engine.device.base import CONTROL, Device, Placed
from engine.errors import EngineError
from engine.graph import stored_bytes
from engine.kv import KvCache
from engine.plan import Operand, Plan, Ref
from engine.routing import ROUTED


class DecoderMemory:
    """Control blocks, workspace, tables with what is in them, and states; of all sequences."""

    def __init__(self, device: Device, plans: Mapping[int, Plan], kv: KvCache) -> None:
        self._device, self._kv = device, kv
        self.blocks = control(plans, kv.sequences)
        self.spreads = states(plans, kv.sequences)
        self._spaces = workspace(plans, kv.sequences)
        self._routed_offset = routed_offset(plans)
        self._host = {w.name: w.array() for plan in plans.values() for w in plan.hosts}
        self._allocated: list[int] = []
        try:
            self._allocate(plans)
        except EngineError:
            self.close()
            raise

    def _allocate(self, plans: Mapping[int, Plan]) -> None:
        self.control = self._alloc(self.blocks.total_bytes, CONTROL)
        self._workspace = self._alloc(self._spaces.total_bytes, "workspace")
        constants = {c.name: c for plan in plans.values() for c in plan.constants}
        self.constants = {name: self._alloc(c.nbytes, f"constant {name}") for name, c in constants.items()}
        for name, constant in constants.items():
            self._device.copy_in(self.constants[name], constant.data)
        named = zip(self.spreads, plans[1].states, strict=True)
        self.states = [self._alloc(spread.total_bytes, f"state {s.name}") for spread, s in named]

    def _alloc(self, nbytes: int, what: str) -> int:
        self._allocated.append(self._device.alloc(nbytes, what))
        return self._allocated[-1]

    def close(self) -> None:
        """Free all of it."""
        while self._allocated:
            self._device.free(self._allocated.pop())

    def control_blocks(self, sequences: Sequence[int]) -> list[int]:
        """Where the control blocks of these sequences start."""
        return [self.control + sequence * self.blocks.stride for sequence in sequences]

    def zero_states(self) -> None:
        """States as a sequence begins with them."""
        for address, spread in zip(self.states, self.spreads, strict=True):
            self._device.fill(address, spread.total_bytes, 0)

    def address(self, plan: Plan, ref: Ref, sequence: int = 0) -> int:
        """Where a buffer of a plan lies, that of a sequence."""
        offset_bytes = plan.buffers[ref.index].offset_bytes + ref.offset_bytes
        return self._workspace + sequence * self._spaces.stride + offset_bytes

    def place(self, plan: Plan, operand: Operand, keys: Iterator[int] | None) -> Placed:
        """An operand at its address; a key is at the next of `keys`."""
        ref = operand.ref
        nbytes = stored_bytes(ref.dtype, int(np.prod(ref.shape, dtype=np.int64)))
        match ref.kind:
            case "key":
                assert keys is not None, operand.name
                return Placed(operand, next(keys), nbytes)
            case "buffer":
                return Placed(operand, self.address(plan, ref), nbytes, stride=self._spaces.stride)
            case "state":
                return Placed(operand, self.states[ref.index], nbytes, stride=self.spreads[ref.index].stride)
            case "constant":
                return Placed(operand, self.constants[ref.name], nbytes)
            case "kv_key" | "kv_value":
                placement = self._kv.placement
                address = self._kv.address(ref.index, "key" if ref.kind == "kv_key" else "value")
                return Placed(operand, address, placement.nbytes, placement=placement, stride=self._kv.stride)
            case "host":
                return Placed(operand, 0, nbytes, self._host[ref.name])
            case "control":
                start = self._routed_offset if ref.name == ROUTED else CONTROL_OFFSETS[ref.name]
                return Placed(operand, self.control + start + ref.offset_bytes, nbytes, stride=self.blocks.stride)
