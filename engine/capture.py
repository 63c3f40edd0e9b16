"""Cut a plan into captured segments and eager seams; every step left out says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.capture_rules import RULES, Rule, left_out, objection
from engine.plan import Plan, SeamReason, Step

_PATHS: dict[SeamReason, str] = {"HostControlFlowOrSequence": "host-seam"}
_HOST = frozenset({"If", "Loop", "Scan"})
"""Operators that the host carries out, with every operator of sequences."""
_EVERY_RULE = frozenset(RULES)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive steps, recorded together or run eagerly."""

    captured: bool
    steps: tuple[Step, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys its steps read, in order, with repeats."""
        return tuple(k for s in self.steps for k in s.keys)


@dataclass(frozen=True, slots=True)
class Seam:
    """One step outside the graph: why, and on which path it runs (onnx-genai section 2.2)."""

    step: Step
    reason: SeamReason
    detail: str

    @property
    def path(self) -> str:
        """eager-device-seam or host-seam."""
        return _PATHS.get(self.reason, "eager-device-seam")


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Segments in step order, and one seam for each step not captured."""

    segments: tuple[Segment, ...]
    seams: tuple[Seam, ...]

    @property
    def captured(self) -> int:
        """Number of captured segments."""
        return sum(s.captured for s in self.segments)

    @property
    def seam_runs(self) -> int:
        """Number of eager runs."""
        return sum(not s.captured for s in self.segments)

    @property
    def decline(self) -> str:
        """Why no graph is recorded at all, of no step in particular; empty where one is."""
        return "" if self.captured else f"nothing can be recorded: all {len(self.seams)} steps are seams"


def cut(
    plan: Plan,
    steady: Callable[[int], bool],
    rules: frozenset[str] = _EVERY_RULE,
    warmed: Callable[[Step], bool] = lambda step: True,
) -> CapturePlan:
    """Maximal runs of capturable steps.

    `steady(key)` says that a key is never evicted once in. A step that may have to page a key in cannot be recorded:
    mapping granules is an act of the host that a graph does not repeat. `rules` are the capture rules in force.
    `warmed(step)` says that its kernel has run before the recording; the decoder's warm step runs all of them.
    """
    segments: list[Segment] = []
    seams: list[Seam] = []
    run: list[Step] = []
    captured, without = True, left_out(rules)
    for step in plan.steps:
        seam = _seam(step, steady, plan, without, warmed)
        if seam is not None:
            seams.append(seam)
        if (seam is None) != captured and run:
            segments.append(Segment(captured, tuple(run)))
            run = []
        captured = seam is None
        run.append(step)
    segments.append(Segment(captured, tuple(run)))
    return CapturePlan(tuple(segments), tuple(seams))


def decisions(plan: Plan, capture: CapturePlan) -> Iterator[str]:
    """What the planner decided, a line each: counts, symbols that grow or are pinned, then each seam's node and why."""
    yield f"segments={capture.captured} seams={capture.seam_runs} seam_nodes={len(capture.seams)}"
    if capture.decline:
        yield f"declined: {capture.decline}"
    yield from (f"symbol {name} grows: it {why}" for name, why in plan.symbols.growing.items())
    yield from (f"symbol {name} is pinned: {what}" for name, what in plan.symbols.pinned.items())
    for number, segment in enumerate(capture.segments, start=1):
        if segment.captured:
            first, last = segment.steps[0], segment.steps[-1]
            yield f"part {number} [capture-region]: steps {first.index} to {last.index}, {len(segment.steps)} nodes"
        else:
            yield f"part {number} [eager]: steps {segment.steps[0].index} to {segment.steps[-1].index}"
    for seam in capture.seams:
        yield f"seam {seam.step.index} {seam.step.node} {seam.step.op} [{seam.path}] {seam.reason}: {seam.detail}"


def _seam(
    step: Step,
    steady: Callable[[int], bool],
    plan: Plan,
    without: tuple[Rule, ...],
    warmed: Callable[[Step], bool],
) -> Seam | None:
    """The first reason that stands against a step, in the reference's order."""
    if step.reason is not None:
        return Seam(step, step.reason, step.detail)
    if step.experts is not None and not all(map(steady, step.experts.keys)):
        return Seam(step, "HostControlFlowOrSequence", "the host reads which experts were chosen to page them in")
    moving = next((k for k in step.keys if not steady(k)), None)
    if moving is not None:
        name = plan.keys[moving].name
        return Seam(step, "CaptureRecordingFailed", f"may page in {name}: mapping granules is not recorded")
    before = objection(step, without)
    if before is not None and before[0] == "CaptureRecordingFailed":
        return Seam(step, *before)
    name = step.op.rpartition("::")[2]
    if name in _HOST or "Sequence" in name:
        return Seam(step, "HostControlFlowOrSequence", f"{name} is carried out by the host")
    open_ = [o for o in step.operands if o.ref.shape and min(o.ref.shape) < 0]
    if open_:
        first = next((o for o in open_ if o.access == "w"), open_[0])
        reason: SeamReason = "UnresolvedOutputShape" if first.access == "w" else "UnresolvedInputShape"
        return Seam(step, reason, f"{first.ref.name or first.name} has the shape {list(first.ref.shape)}")
    if step.grows:
        return Seam(step, "ClassifierDisqualified", step.grows)
    if not warmed(step):
        return Seam(step, "KernelNotWarmed", f"kernel {step.kernel} has not run in these shapes")
    return None if before is None else Seam(step, *before)
