"""Cut a plan into captured segments and eager seams; every step left out says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.plan import Plan, SeamReason, Step

_PATHS: dict[SeamReason, str] = {"HostControlFlowOrSequence": "host-seam"}


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


def cut(plan: Plan, steady: Callable[[int], bool]) -> CapturePlan:
    """Maximal runs of capturable steps.

    `steady(key)` says that a key is never evicted once in. A step that may have to page a key in cannot be recorded:
    mapping granules is an act of the host that a graph does not repeat.
    """
    segments: list[Segment] = []
    seams: list[Seam] = []
    run: list[Step] = []
    captured = True
    for step in plan.steps:
        seam = _seam(step, steady, plan)
        if seam is not None:
            seams.append(seam)
        if (seam is None) != captured and run:
            segments.append(Segment(captured, tuple(run)))
            run = []
        captured = seam is None
        run.append(step)
    segments.append(Segment(captured, tuple(run)))
    return CapturePlan(tuple(segments), tuple(seams))


def _seam(step: Step, steady: Callable[[int], bool], plan: Plan) -> Seam | None:
    if step.reason is not None:
        return Seam(step, step.reason, step.detail)
    moving = [plan.keys[k].name for k in step.keys if not steady(k)]
    if moving:
        return Seam(step, "CaptureRecordingFailed", f"may page in {moving[0]}: mapping granules is not recorded")
    return None
