"""Run plans on a device: bind steps to addresses, page weights in, capture and replay the one-token step.

A batch runs as one: each step touches its keys once and is launched once, for all sequences. What a sequence computes
is what it would compute alone, bit for bit: the device gives its kernel that sequence's own length and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.batch import (
    AHEAD_OFFSET,
    CHOICE,
    GAP_OFFSET,
    IDS_OFFSET,
    Emitted,
    Pass,
    Prompts,
    parts,
    routed_offset,
)
from engine.capture import CapturePlan, cut, decisions
from engine.counters import Tally
from engine.decode_memory import DecoderMemory
from engine.device.base import Device, Launch, Recorded
from engine.errors import NonFiniteLogits
from engine.expert_steps import check_choices, launch_of, places, waves
from engine.graph import DTYPES, Graph, stored_bytes
from engine.kv import KvCache
from engine.paging.residency import Residency
from engine.plan import Plan, Step
from engine.prefix import check_no_states, nothing_cached
from engine.routed import Routing
from engine.routing import Choices, Given, flat, routed, routed_bytes

_UNSTEADY_STEPS = 2
"""One-token steps of a process that do not count as steady: the warm one and the recording one, captured or not."""


class Decoder:
    """The sequences of a KV cache on one device. `plans` maps rows to a plan; 1 is the decode step.

    `capture` names the capture rules in force, None for no capture; `tell` hears what was decided of it.
    """

    def __init__(
        self,
        device: Device,
        graph: Graph,
        plans: Mapping[int, Plan],
        pager: Residency,
        kv: KvCache,
        capture: frozenset[str] | None,
        tally: Tally,
        given: Given | None = None,
        tell: Callable[[str], None] = lambda decision: None,
    ) -> None:
        self._device = device
        self.profile = device.profile
        self._plans = plans
        self._pager = pager
        self._kv = kv
        self._tally = tally
        device.prepare(step for plan in plans.values() for step in plan.steps)
        self._all = tuple(range(kv.sequences))
        self._live = set(self._all)
        self._lengths = [0] * kv.sequences
        self._cached = [nothing_cached(plans[1]) for _ in self._all]
        self._next = [0] * kv.sequences  # the ids that stand on the device and go in next
        self._routed_offset = routed_offset(plans)
        self._routed_bytes = {rows: routed_bytes(plan) for rows, plan in plans.items()}
        self._routing = Routing(plans[1], kv.sequences, tally)
        self._given = given
        self._launches: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], Launch] = {}
        self._gathers = {rows: plan.gathers for rows, plan in plans.items()}
        self.gathered: dict[str, int] = {}
        """Bytes of rows read in place so far, by table."""
        self._tell = tell
        self._warm = False
        self._recorded: list[Recorded | None] | None = None
        self.memory = DecoderMemory(device, plans, kv)
        self._rules = capture
        self._epoch = pager.epoch
        self.capture_plan: CapturePlan | None = None
        self._cut()

    def _cut(self) -> None:
        """Cut the one-token step into segments and seams, by what is steady now; so with banks of which all stands."""
        banks = [s.experts for s in self._plans[1].steps if s.experts is not None]
        self._standing = {b.first_key for b in banks if all(map(self._pager.steady, b.keys))}
        if self._rules is None:
            self._tell(f"declined: {self.declined}")
            return
        self.capture_plan = cut(self._plans[1], self._pager.steady, self._rules)
        for decision in decisions(self._plans[1], self.capture_plan):
            self._tell(decision)
        self._tally.set("segments", self.capture_plan.captured)
        self._tally.set("seams", self.capture_plan.seam_runs)
        self._tally.set("seam_nodes", len(self.capture_plan.seams))

    def reset(self) -> None:
        """Begin new sequences: no position is cached, and all of them count."""
        self._kv.restart()
        self._live = set(self._all)
        self._lengths = [0] * len(self._all)
        for cached in self._cached:
            cached.ids.clear()
        for block in self.memory.control_blocks(self._all):
            self._device.copy_in(block, np.zeros(1, np.int64))
            self._device.copy_in(block + AHEAD_OFFSET, np.zeros(1, np.int32))
        self.memory.zero_states()

    def begin(self, prompts: Prompts, *, reuse: bool) -> list[int]:
        """Begin prompts, anew or from what each shares with its cached positions; how many of them each keeps."""
        kept = [c.shared(prompt) if reuse else 0 for c, prompt in zip(self._cached, prompts, strict=True)]
        if any(kept):
            self._live = set(self._all)
            for sequence, tokens in enumerate(kept):
                self._keep(sequence, tokens)
        else:
            self.reset()
        self._tally.add("prefix_hit_tokens", sum(kept))
        self._tally.add("prefix_hit_bytes", sum(kept) * self._kv.geometry.bytes_per_token)
        return kept

    def rewind(self, tokens: int, sequence: int = 0) -> None:
        """Keep a sequence's first `tokens` cached positions and go on from there; graphs hold, since nothing moves.

        Raises BadRequest where a recurrent or convolution state would have to go back too, or a prompt's rotary table.
        """
        self._cached[sequence].check_rewind(tokens)
        self._keep(sequence, tokens)

    def _keep(self, sequence: int, tokens: int) -> None:
        if tokens == self._lengths[sequence]:
            return
        check_no_states(self._plans[1])
        self._kv.forget(sequence, tokens, self._lengths[sequence])
        self._lengths[sequence] = tokens
        del self._cached[sequence].ids[tokens:]
        self._device.copy_in(self.memory.control_blocks([sequence])[0], np.asarray([tokens], np.int64))

    def prefill(self, prompts: Prompts, chunk: int) -> list[Emitted]:
        """Feed a prompt to each sequence in chunks of at most `chunk` tokens; the token that follows each.

        The cache starts in the longest prompt's bucket, so that chunks cause no growth.
        """
        assert len(prompts) == len(self._all) and all(prompts), "an empty prompt was refused before"
        self._make_room([n + len(prompt) for n, prompt in zip(self._lengths, prompts, strict=True)])
        for cached, length, prompt in zip(self._cached, self._lengths, prompts, strict=True):
            if not length:
                cached.begin(len(prompt))
        emitted: dict[int, Emitted] = {}
        for part in parts(prompts, chunk):
            for block, ids, ahead in zip(self.memory.control_blocks(part.sequences), part.ids, part.ahead, strict=True):
                self._device.copy_in(block + AHEAD_OFFSET, np.asarray([ahead], np.int32))
                self._device.copy_in(block + IDS_OFFSET, np.asarray(ids, np.int64))
            emitted |= self._take(self._ask(len(part.ids[0]), part.sequences), part.ids)
        return [emitted[s] for s in self._all]

    def step(self) -> list[Emitted]:
        """Feed each sequence the token chosen last, which stands on the device; the ones that follow.

        A sequence that was stopped goes on beside the others, and nothing that it gives means anything.
        """
        return self.take_step(self.ask_step())

    def ask_step(self) -> Pass:
        """Ask for a step; of two that are under way the later one feeds what the earlier one chooses."""
        return self._ask(1, self._all)

    def take_step(self, asked: Pass) -> list[Emitted]:
        """Wait for the earliest step that was asked for, and tell what it gives."""
        return list(self._take(asked, [[token] for token in self._next]).values())

    def take_back(self, asked: Pass) -> None:
        """Throw away a step, the last one asked for and the only one under way: it cost what it cost, and gave nothing.

        States cannot go back: of a model with any, a new sequence has to begin.
        """
        self._arrived(asked, kept=False)
        self._tally.add("discarded_steps")
        if self._plans[1].states:
            return
        for sequence, length in asked.lengths.items():
            self._keep(sequence, length - 1)
        self.feed(self._next)

    def may_ask_ahead(self, *, certain: bool) -> bool:
        """Whether a step may be asked for before the tokens of the one under way are read.

        The host must have nothing to do between the two: all weights are in, or one graph brings the rest. A step that
        is not `certain` to be wanted may take no more room in the cache either.
        """
        recorded = self._recorded or ()
        if not recorded or not (self._pager.fits or (len(recorded) == 1 and all(recorded))):
            return False
        return certain or self._kv.holds([length + 1 for length in self._lengths])

    @property
    def queues(self) -> bool:
        """Whether a step goes on while the host does something else."""
        return self._device.queues

    def stop(self, sequence: int) -> None:
        """A sequence is at its end: from here on its numbers, finite or not, are nobody's."""
        self._live.discard(sequence)

    def feed(self, tokens: Sequence[int]) -> None:
        """Put another token in place of the one that each sequence chose last, while no step is under way."""
        for block, token in zip(self.memory.control_blocks(self._all), tokens, strict=True):
            self._device.copy_in(block + IDS_OFFSET, np.asarray([token], np.int64))
        self._next = list(tokens)

    def logits(self, rows: int, sequence: int = 0) -> NDArray[np.float32]:
        """What a sequence's last forward pass, one of `rows` rows, left: float32 [rows, vocabulary].

        Rows are all of the call's where the plan keeps them, else the last one.
        """
        ref = self._plans[rows].logits
        address = self.memory.address(self._plans[rows], ref, sequence)
        raw = self._device.copy_out(address, stored_bytes(ref.dtype, math.prod(ref.shape)))
        return np.frombuffer(raw, DTYPES[ref.dtype]).reshape(-1, ref.shape[-1]).astype(np.float32)

    @property
    def declined(self) -> str:
        """Why no graph is recorded, of no step in particular; empty where one is, or will be."""
        return "capture is off" if self.capture_plan is None else self.capture_plan.decline

    @property
    def routing(self) -> Routing:
        """What the mixtures' steps chose so far."""
        return self._routing

    def close(self) -> None:
        """Free what the decoder allocated."""
        self.memory.close()

    def _ask(self, rows: int, sequences: tuple[int, ...]) -> Pass:
        """Ask for one pass over ids that stand on the device, as many for each of these sequences.

        One token for all of them is what a graph is made of.
        """
        plan = self._plans[rows]
        self._make_room([n + rows * (s in sequences) for s, n in enumerate(self._lengths)])
        self._give(plan, sequences)
        before = self._device.tally.read()
        decodes = rows == 1 and sequences == self._all
        if decodes:
            self._one_token(plan)
        else:
            self._eager(plan, plan.steps, sequences)
        for sequence in sequences:
            self._lengths[sequence] += rows
        first, stride = sequences[0], self.memory.blocks.stride
        of_experts = self._routed_bytes[rows]
        of_block = self._routed_offset - GAP_OFFSET + of_experts if of_experts else CHOICE.size
        nbytes = (sequences[-1] - first) * stride + of_block
        choice = self._device.fetch(self.memory.control + first * stride + GAP_OFFSET, nbytes)
        self._account(plan, before, len(sequences), decodes=decodes)
        return Pass(plan, {s: self._lengths[s] for s in sequences}, choice)

    def _give(self, plan: Plan, sequences: tuple[int, ...]) -> None:
        """Put down what experts the pass will choose, where it is known and nothing computes it."""
        if self._given is None or not self._routing.banks:
            return
        for block, sequence in zip(self.memory.control_blocks(sequences), sequences, strict=True):
            choices = self._given.rows(sequence, self._lengths[sequence], plan.rows)
            self._device.copy_in(block + self._routed_offset, flat(choices, self._routing.banks))

    def _make_room(self, positions: Sequence[int]) -> None:
        """Have the cache hold so many positions of each sequence; where it moved, what had its addresses is void."""
        grants = self._kv.grants.made
        growth = self._kv.ensure(positions, kept=self._lengths)
        granted = self._kv.grants.made != grants
        if self._epoch != self._pager.epoch:
            self._epoch = self._pager.epoch
            self._void("grant_invalidations", "weights gave way, and graphs hold their addresses")
            self._cut()
        elif growth == "moved":
            self._void("kv_move_invalidations", "the KV cache moved, and graphs hold its addresses")
        elif self._recorded is not None:
            if growth == "kept" and any(self._lengths):
                self._tally.add("growth_keeps")
                self._tell(f"kept at length {max(self._lengths)}: the KV cache grew where it lies")
            if granted:
                self._tally.add("grant_keeps")
                self._tell(f"kept at length {max(self._lengths)}: weights gave way, and no graph reads them")

    def _void(self, reason: str, why: str) -> None:
        """What has been bound or recorded no longer holds; `reason` is the counter of the graphs thrown away for it."""
        self._launches.clear()
        self._warm = False  # other addresses are another signature: run eagerly once before it is recorded
        if self._recorded is not None:
            self._recorded = None
            self._tally.add("invalidations")
            self._tally.add(reason)
            self._tally_nodes()
            self._tell(f"invalidated at length {max(self._lengths)}: {why}")

    def _arrived(self, asked: Pass, *, kept: bool) -> bytes:
        """Wait for what a pass left in the control blocks, and count the experts that it chose."""
        raw = self._device.fetched(asked.choice)
        first, stride = next(iter(asked.lengths)), self.memory.blocks.stride
        if of_experts := self._routed_bytes[asked.plan.rows]:
            start = self._routed_offset - GAP_OFFSET
            starts = {s: start + (s - first) * stride for s in asked.lengths}
            written = {s: np.frombuffer(raw, np.int32, of_experts // 4, at) for s, at in starts.items()}
            passed = {s: (n - asked.plan.rows, written[s]) for s, n in asked.lengths.items()}
            counted = self._routing.count(passed, kept=kept)
            self._count_standing(asked.plan, self._routing.by_bank(counted) if self._standing else ())
        return raw

    def _take(self, asked: Pass, fed: Prompts) -> dict[int, Emitted]:
        """What each sequence of a pass chose, experts too. Raises NonFiniteLogits for one that has not stopped."""
        raw = self._arrived(asked, kept=True)
        first, stride = next(iter(asked.lengths)), self.memory.blocks.stride
        emitted = {}
        for (sequence, length), ids in zip(asked.lengths.items(), fed, strict=True):
            self._cached[sequence].ids.extend(ids)
            gap, token = CHOICE.unpack_from(raw, (sequence - first) * stride)
            if math.isnan(gap) and sequence in self._live:
                of = f" of sequence {sequence + 1}" if len(self._all) > 1 else ""
                raise NonFiniteLogits(
                    f"logits{of} at position {length - 1} are not finite", "the run's tokens cannot be used"
                )
            self._next[sequence] = token
            emitted[sequence] = Emitted(token, gap)
        return emitted

    def _account(self, plan: Plan, before: Mapping[str, int | float], sequences: int, *, decodes: bool) -> None:
        self._tally.add("forward_steps")
        self._tally.add("touches", plan.touches)
        self._tally.add("gather_bytes", plan.gather_bytes * sequences)
        for table, nbytes in self._gathers[plan.rows].items():
            self.gathered[table] = self.gathered.get(table, 0) + nbytes * sequences
        after = self._device.tally.read()
        if decodes:
            steady = self._tally.read().get("decode_steps", 0) >= _UNSTEADY_STEPS
            self._tally.add("decode_steps")
            self._device.tally.set("step_kernels", int(after.get("kernel_runs", 0) - before.get("kernel_runs", 0)))
            alloc_calls = int(after["alloc_calls"] - before["alloc_calls"])
            self._tally.add("alloc_calls_steady", alloc_calls if steady else 0)
            vmm_calls = int(after.get("vmm_calls", 0) - before.get("vmm_calls", 0))
            self._tally.add("vmm_calls_steady", vmm_calls if steady else 0)

    def _one_token(self, plan: Plan) -> None:
        """Warm, record or replay."""
        if self.capture_plan is None:
            self._eager(plan, plan.steps, self._all)
        elif not self.capture_plan.captured:
            self._eager(plan, plan.steps, self._all)
            self._tally.add("fallbacks")
        elif not self._warm:
            self._eager(plan, plan.steps, self._all)
            self._warm = True
            self._tally.add("warm_steps")
            self._tell(f"warm at length {max(self._lengths)}: run eagerly once before it is recorded")
        elif self._recorded is None:
            self._record(plan, self.capture_plan)
            self._tally.add("captures")
            self._tell(f"recorded at length {max(self._lengths)}: {self.capture_plan.captured} graphs")
        else:
            self._replay(plan, self.capture_plan, self._recorded)
            self._tally.add("replays")

    def _record(self, plan: Plan, capture: CapturePlan) -> None:
        recorded: list[Recorded | None] = []
        for segment in capture.segments:
            if not segment.captured:
                self._eager(plan, segment.steps, self._all)
                recorded.append(None)
                continue
            launches = [self._bind(plan, s, self._pager.touch(plan, s), self._all) for s in segment.steps]
            self._pager.join()
            self._device.begin_capture()
            for step, launch in zip(segment.steps, launches, strict=True):
                self._pager.issue(plan, step)
                self._device.launch(launch)
            self._pager.join()
            graph = self._device.end_capture()
            self._device.replay(graph)
            self._pager.release()
            recorded.append(graph)
        self._recorded = recorded
        self._tally_nodes()

    def _replay(self, plan: Plan, capture: CapturePlan, recorded: list[Recorded | None]) -> None:
        for segment, graph in zip(capture.segments, recorded, strict=True):
            if graph is None:
                self._eager(plan, segment.steps, self._all)
                continue
            if self._pager.fits:  # all keys are in: they are counted while the card is at work
                self._device.replay(graph)
                self._pager.touch_all(plan, segment.steps)
                continue
            for step in segment.steps:  # steady keys keep their addresses, so the baked ones hold
                self._pager.touch(plan, step)
            self._pager.join()  # what a seam before it has under way, as when it was recorded
            self._device.replay(graph)
            self._pager.release()

    def _eager(self, plan: Plan, steps: Sequence[Step], sequences: tuple[int, ...]) -> None:
        for step in steps:
            if step.experts is not None and step.experts.first_key not in self._standing:
                self._routed(plan, step, sequences)
                continue
            keys = self._pager.touch(plan, step)  # once, however many sequences read them
            self._pager.issue(plan, step)
            self._device.launch(self._bind(plan, step, keys, sequences))
            self._pager.release()

    def _routed(self, plan: Plan, step: Step, sequences: tuple[int, ...]) -> None:
        """Wait for the choice of experts, and run a step on those alone."""
        assert step.experts is not None
        chosen = self._choices(plan, step, sequences)
        first_key, seen = step.experts.first_key, set[int]()
        placed = [self.memory.place(plan, operand, None) for operand in step.operands]
        for wave in waves(chosen, lambda experts: self._pager.can_hold([first_key + e for e in experts])):
            keys = [first_key + expert for expert in wave.experts]
            addresses = self._pager.touch(plan, step, keys)
            self._device.launch(launch_of(step, placed, wave, addresses))
            self._pager.release()
            self._count_experts(plan, keys, again=seen.intersection(keys))
            seen.update(keys)

    def _choices(self, plan: Plan, step: Step, sequences: tuple[int, ...]) -> dict[int, Choices]:
        """What each sequence chose, [rows, chosen], in one copy. Raises DeviceFailure for what is no choice."""
        operand = routed(step)
        assert operand is not None
        placed, first = self.memory.place(plan, operand, None), sequences[0]
        nbytes = (sequences[-1] - first) * placed.stride + placed.nbytes
        raw = self._device.copy_out(placed.address + first * placed.stride, nbytes)
        starts = {s: (s - first) * placed.stride for s in sequences}
        parts = {s: np.frombuffer(raw, np.int32, placed.nbytes // 4, start) for s, start in starts.items()}
        chosen = {s: part.reshape(operand.ref.shape) for s, part in parts.items()}
        check_choices(chosen, next(bank for bank in self._routing.banks if bank.node == step.node))
        return chosen

    def _count_standing(self, plan: Plan, asked: Sequence[Sequence[int]]) -> None:
        """After a pass: touches of experts that all stand, which nobody had to wait for; by bank, those asked for."""
        for step, experts in zip((s for s in plan.steps if routed(s) is not None), asked, strict=False):
            if step.experts is not None and step.experts.first_key in self._standing:
                keys = [step.experts.first_key + expert for expert in experts]
                self._pager.touch(plan, step, keys)
                self._pager.release()
                self._count_experts(plan, keys)

    def _count_experts(self, plan: Plan, keys: Sequence[int], again: Collection[int] = ()) -> None:
        self._tally.add("touches", len(keys))
        self._tally.add("expert_touches", len(keys))
        self._tally.add("expert_touch_bytes", sum(plan.keys[k].nbytes for k in keys))
        self._tally.add("expert_rereads", len(again))
        self._tally.add("expert_reread_bytes", sum(plan.keys[k].nbytes for k in again))

    def _tally_nodes(self) -> None:
        self._device.tally.set("graph_nodes", sum(g.nodes for g in self._recorded or () if g is not None))

    def _bind(self, plan: Plan, step: Step, keys: tuple[int, ...], sequences: tuple[int, ...]) -> Launch:
        """A step at its addresses; the same step at the same addresses for the same sequences is one launch."""
        name = (plan.rows, step.index, keys, sequences)
        launch = self._launches.get(name)
        if launch is None:
            addresses = iter(keys)
            placed = [self.memory.place(plan, o, addresses) for o in step.operands]
            if step.experts is not None:
                placed += places(step.experts, {n: self._pager.place(k) for n, k in enumerate(step.experts.keys)})
            launch = self._launches[name] = Launch(step, tuple(placed), sequences)
        return launch
