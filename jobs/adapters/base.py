"""What an adapter is: it turns one order for a run into one record, whatever the engine behind it.

Adapters know processes and documents. They know no store, no card library and no scheduler: whoever calls them has
cleared the card and passes in what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from jobs.model import ArmPlan, CellPlan, RunRecord

RunEnd = Literal["measured", "refused", "failed", "cancelled"]
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RunOrder:
    """One attempt at one run of one arm, with everything that the child must be given.

    `card_uuid` is the card that the child must report, `timeout_s` bounds the whole child, and `start_timeout_s` the
    time until it speaks (None: nothing does).
    """

    run_id: str
    attempt_id: str
    attempt_number: int
    cell: CellPlan
    arm: ArmPlan
    card_uuid: str
    timeout_s: float
    start_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run happens: scratch folder, environment to draw from, stop flag, clocks, ears for progress.

    `environ` is the worker's environment; adapters pass on what their allowlist names. `on_spawn` hears the child's PID
    as soon as it exists.
    """

    scratch: Path
    environ: Mapping[str, str]
    utc_now: Callable[[], str]
    stopped: Callable[[], bool] = lambda: False
    on_spawn: Callable[[int], None] = lambda _pid: None
    on_progress: Progress = lambda _line: None


@dataclass(frozen=True, slots=True)
class RunResult:
    """How an attempt ended. `retry`: another attempt could end otherwise. `record` is there whenever a child ran.

    `fault`: the class of error that ended it, in one word; empty when none did.
    """

    end: RunEnd
    record: RunRecord | None
    reason: str = ""
    retry: bool = False
    leftovers: tuple[int, ...] = field(default=())
    fault: str = ""


class Adapter(Protocol):
    """One kind of engine."""

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        """Run `order` to its end. Never raises for what the engine does; only for our own bugs."""
        ...
