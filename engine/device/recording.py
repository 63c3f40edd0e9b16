"""A recording: launches and copies in the order they were asked for, on two branches that fork and join by events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from engine import kernels
from engine.device.base import Branch, Event, Launch, Recorded
from engine.errors import DeviceFailure


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A copy of a key's host bytes, on the copy branch."""

    address: int
    source: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Dead:
    """A stretch that is poisoned here, on the compute branch; a card has no node for it."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """An event stands here in its branch."""

    event: Event


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """A branch goes on when the event's branch has come to it."""

    branch: Branch
    event: Event


Act = Launch | Staged | Dead | Mark | Wait


@dataclass(frozen=True, slots=True, eq=False)
class HostGraph:
    """What was recorded, with the addresses it had."""

    acts: tuple[Act, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes: events leave none, and a step as many as it is launches."""
        launched = (kernels.get(act.step.kernel).launches for act in self.acts if isinstance(act, Launch))
        return sum(launched) + sum(isinstance(act, Staged) for act in self.acts)


class Recording:
    """An open capture. It starts on the compute branch; the copy branch enters by a wait, and is joined before the end.

    These are the driver's rules (CUDA: stream capture), and a card refuses what is refused here.
    """

    def __init__(self) -> None:
        self._acts: list[Act] = []
        self._events: dict[Event, int] = {}  # marked here -> acts of its branch before it
        self._entered = False
        self._copy_acts = 0
        self._joined = 0  # acts of the copy branch that compute has waited for

    def add(self, act: Act) -> None:
        """Record one act. Raises DeviceFailure where a branch or an event is not part of this capture."""
        match act:
            case Staged():
                self._check_entered("copy")
                self._copy_acts += 1
            case Mark(event):
                self._check_entered(event.branch)
                self._events[event] = self._copy_acts
            case Wait(branch, event):
                if event not in self._events:
                    raise DeviceFailure("a capture waits for an event that was not marked in it")
                if branch == "copy":
                    self._entered = True
                elif event.branch == "copy":
                    self._joined = max(self._joined, self._events[event])
        self._acts.append(act)

    def close(self) -> HostGraph:
        """The graph. Raises DeviceFailure where copies were never joined."""
        if self._joined < self._copy_acts:
            open_acts = self._copy_acts - self._joined
            raise DeviceFailure(f"{open_acts} copies of the copy branch were not joined before the capture's end")
        return HostGraph(tuple(self._acts))

    def _check_entered(self, branch: Branch) -> None:
        if branch == "copy" and not self._entered:
            raise DeviceFailure("the copy branch has not entered the capture: it must wait for a mark of it first")


def check_closed(recording: Recording | None, verb: str) -> None:
    """Raises DeviceFailure while a capture is open: what the verb does at once would not be done in a replay."""
    if recording is not None:
        raise DeviceFailure(f"{verb} while a capture is open: a graph would not repeat it")


class Recorder:
    """The part of a host's device that opens a capture, fills it and closes it; what it would not repeat is refused."""

    _recording: Recording | None = None

    def begin_capture(self) -> None:
        """Open a recording. Raises DeviceFailure while one is open."""
        if self._recording is not None:
            raise DeviceFailure("a capture is open already")
        self._recording = Recording()

    def end_capture(self) -> HostGraph:
        """Close the recording. Raises DeviceFailure where none is open."""
        if self._recording is None:
            raise DeviceFailure("no capture is open")
        recording, self._recording = self._recording, None
        return recording.close()

    def _acts_of(self, graph: Recorded) -> tuple[Act, ...]:
        """What a replay of the graph runs. Raises DeviceFailure for another device's, or while a capture is open."""
        if not isinstance(graph, HostGraph) or self._recording is not None:
            raise DeviceFailure("a replay needs a recording of this device and no open capture")
        return graph.acts

    def _record(self, act: Act) -> bool:
        """Whether a capture is open and took it. Raises DeviceFailure, with none open, where it may not."""
        if self._recording is None:
            return False
        try:
            self._recording.add(act)
        except DeviceFailure:
            self._recording = None
            raise
        return True

    def _check_closed(self, verb: str) -> None:
        check_closed(self._recording, verb)
