"""What is planted: changes of the engine's source, and stimuli from outside, each with the verdict that is due.

A patch is a piece of a file that stands there once and what takes its place; it is applied to a copy of the engine, so
that the product holds no switch for it. A stimulus is what a card, a driver or a disk does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jobs.errors import SpecError
from jobs.verdict import Outcome

Model = Literal["tiny", "mixture"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What base and head run: a model, and engine config beside 4 KiB granules."""

    model: Model = "tiny"
    config: Mapping[str, Any] = field(default_factory=dict)
    witness: str = "forward_steps > 0"


@dataclass(frozen=True, slots=True)
class Patch:
    """`find` stands once in `file`, which counts from the engine's folder; `put` takes its place."""

    file: str
    find: str
    put: str

    def apply(self, engine: Path) -> None:
        """Change the file. Raises SpecError when `find` is not there just once: the defect is of another engine."""
        path = engine / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.find) != 1:
            said = f"{self.file} holds {text.count(self.find)} times what a planted defect replaces"
            raise SpecError(said, "bring orchestrator/selftest/defects.py up to this engine")
        path.write_text(text.replace(self.find, self.put), encoding="utf-8")


Stimulus = Literal["foreign process", "stale build", "stopped driver"]


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect and the verdict that is due: outcome, exit code, and words of the finding that names it."""

    name: str
    kind: str
    scenario: Scenario
    outcome: Outcome
    exit_code: int
    says: str
    patches: tuple[Patch, ...] = ()
    stimulus: Stimulus | None = None


PAGED = Scenario(config=MappingProxyType({"weight_budget": "50%", "policy": "stable"}), witness="page_ins > 0")
LRU = Scenario(config=MappingProxyType({"weight_budget": "50%", "policy": "lru"}), witness="evictions > 0")
SLOT = Scenario(config=MappingProxyType({"weight_budget": "50%", "policy": "stable_slot"}), witness="page_ins > 0")
STAGED = Scenario(config=MappingProxyType({"weight_budget": "50%", "policy": "staging"}), witness="ring_waits > 0")
IN_PLACE = Scenario(
    config=MappingProxyType({"weight_budget": "50%", "policy": "zero_copy"}), witness="zero_copy_reads > 0"
)
RESIDENT = Scenario(witness="replays > 0")
GROWN = Scenario(
    config=MappingProxyType({"kv_layout": "head-major", "kv_min_bucket": 4}), witness="kv_growth_dtod_bytes > 0"
)
MIXTURE = Scenario("mixture", witness="routed_experts > 0")
EXPERTS = Scenario("mixture", MappingProxyType({"weight_budget": "60%", "policy": "lru"}), "expert_touches > 0")

CLEAN = MappingProxyType(
    {
        "stable under a budget": PAGED,
        "lru under a budget": LRU,
        "a fixed slot under a budget": SLOT,
        "staging under a budget": STAGED,
        "read in place under a budget": IN_PLACE,
        "all resident, captured": RESIDENT,
        "a cache that grows and moves": GROWN,
        "a mixture, all resident": MIXTURE,
        "a mixture, expert by expert": EXPERTS,
    }
)
"""Runs of one engine against itself, none of which may be found fault with."""

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "dropped zero points",
        "tokens",
        RESIDENT,
        "VIOLATION",
        1,
        "differs from base",
        (
            Patch(
                "kernels/matmul.py",
                "    if points is None:\n        return np.float32(1 <<",
                "    if True:\n        return np.float32(1 <<",
            ),
        ),
    ),
    Defect(
        "wrong router ties",
        "tokens",
        MIXTURE,
        "VIOLATION",
        1,
        "differs from base",
        (
            Patch(
                "kernels/moe.py",
                "np.lexsort((np.arange(logits.size), -logits))",
                "np.lexsort((-np.arange(logits.size), -logits))",
            ),
        ),
    ),
    Defect(
        "KV growth forgotten",
        "tokens",
        GROWN,
        "VIOLATION",
        1,
        "differs from base",
        (
            Patch(
                "kv.py",
                "self._device.copy_within(new + there[0], old + here[0], here[1] - here[0])",
                "self._device.fill(new + there[0], here[1] - here[0], 0)",
            ),
        ),
    ),
    Defect(
        "staging slot reused early",
        "tokens",
        STAGED,
        "VIOLATION",
        1,
        "",
        (Patch("paging/stream.py", "free_after = last_reader[turn % ring.slots]", "free_after = -1"),),
    ),
    Defect(
        "retained slot reused by the next generation",
        "tokens",
        PAGED,
        "VIOLATION",
        1,
        "is equal",
        (
            Patch(
                "decode.py",
                "        self._kv.restart()\n",
                "        self._kv.restart()\n        if any(self._lengths):\n            self._pager.hand_out()\n",
            ),
            Patch(
                "paging/pager.py",
                "    def release(self) -> None:\n",
                "    def hand_out(self) -> None:\n"
                "        view = max(self._resident.values(), key=lambda v: v.nbytes)\n"
                "        self._device.fill(self._base + self._offsets[view.index], view.nbytes, 0x11)\n\n"
                "    def release(self) -> None:\n",
            ),
        ),
    ),
    Defect(
        "early stop",
        "length",
        RESIDENT,
        "SHORT",
        1,
        "stops after 3",
        (Patch("generate.py", "if emitted.token in stops:", "if emitted.token in stops or len(self.ids) == 3:"),),
    ),
    Defect(
        "runs on",
        "length",
        RESIDENT,
        "LONG",
        1,
        "runs on to",
        (
            Patch("generate.py", "elif len(self.ids) == tokens:", "elif len(self.ids) == tokens + 1:"),
            Patch(
                "generate.py",
                "while 1 + len(step_ns) < request.tokens and",
                "while 1 + len(step_ns) < request.tokens + 1 and",
            ),
        ),
    ),
    Defect(
        "NaN logits",
        "crash",
        RESIDENT,
        "VIOLATION",
        1,
        "non_finite",
        (
            Patch(
                "kernels/nbits.py",
                "    shaped *= scales[..., None]\n",
                "    shaped *= scales[..., None] * np.float32('nan')\n",
            ),
        ),
    ),
    Defect(
        "a race",
        "determinism",
        RESIDENT,
        "NONDETERMINISTIC",
        1,
        "does not repeat itself",
        (
            Patch(
                "generate.py",
                "self.ids.append(emitted.token)",
                "import time\n"
                "        self.ids.append(time.time_ns() // 1000 % 499 if len(self.ids) == 3 else emitted.token)",
            ),
        ),
    ),
    Defect(
        "capture broken by one op",
        "capture",
        RESIDENT,
        "REGRESSED",
        1,
        "segments rose by",
        (
            Patch(
                "capture.py",
                "    if step.reason is not None:\n",
                "    if step.index == len(plan.steps) // 2:\n"
                '        return Seam(step, "KernelCaptureUnsupported", "reads its sizes on the host")\n'
                "    if step.reason is not None:\n",
            ),
        ),
    ),
    Defect(
        "double-counted bytes",
        "bytes",
        PAGED,
        "BROKEN_INVARIANT",
        1,
        "htod_bytes",
        (
            Patch(
                "paging/pager.py",
                'self._tally.add("htod_bytes", key.nbytes)',
                'self._tally.add("htod_bytes", 2 * key.nbytes)',
            ),
        ),
    ),
    Defect(
        "extra page-ins",
        "bytes",
        PAGED,
        "REGRESSED",
        1,
        "htod_bytes rose by",
        (Patch("paging/stable.py", 'return "bypass" if self._full else "retain"', 'return "bypass"'),),
    ),
    Defect(
        "impossible bandwidth",
        "bytes",
        PAGED,
        "BROKEN_INVARIANT",
        1,
        "over the modelled link",
        (
            Patch(
                "device/book.py",
                'self.tally.add("modelled_ns", round(ns))',
                'self.tally.add("modelled_ns", round(ns / 1000))',
            ),
        ),
    ),
    Defect(
        "streaming never engaged",
        "witness",
        PAGED,
        "VACUOUS",
        3,
        "page_ins > 0",
        (
            Patch(
                "run.py",
                "choice.policy, choice.budget_bytes, ledger, pool, tally, hot",
                "choice.policy, None, ledger, pool, tally, hot",
            ),
        ),
    ),
    Defect(
        "budget ignored",
        "settings",
        PAGED,
        "NOT_COMPARABLE",
        3,
        "the run held itself to",
        (
            Patch(
                "choice.py",
                "    streams = limit is not None and",
                "    nominal = None\n    streams = limit is not None and",
            ),
        ),
    ),
    Defect(
        "other card",
        "provenance",
        RESIDENT,
        "INFRASTRUCTURE",
        4,
        "ran on card",
        (Patch("run.py", '"uuid": device.uuid,', '"uuid": "SIM-elsewhere-0",'),),
    ),
    Defect(
        "stale head",
        "provenance",
        RESIDENT,
        "INFRASTRUCTURE",
        4,
        "it changed since",
        (Patch("generate.py", "if emitted.token in stops:", "if emitted.token in stops or len(self.ids) == 3:"),),
        "stale build",
    ),
    Defect("foreign process on the card", "host", RESIDENT, "CONTAMINATED", 3, "", stimulus="foreign process"),
    Defect("missing cell", "host", RESIDENT, "MISSING", 3, "are missing", stimulus="stopped driver"),
)
