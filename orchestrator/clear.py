"""Was the card clear? A written policy, judged by a pure function over one snapshot.

Unknown is not clear: each thing that must be known and is not gives a reason of its own. What a card does not have
(ECC memory, MIG) is no reason; what it has and does not tell is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.timeline import SLOWING, clock_events
from orchestrator.cards import CardProcess, CardSnapshot

GIB = 1 << 30

Clearness = Literal["clear", "contended", "throttled", "unknown"]
Grade = Literal["pids", "memory", "scripted", "none"]
Moment = Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True)
class ClearPolicy:
    """What counts as clear.

    `used_floor_bytes`: an idle H200 shows 615 MiB used and no process, reserved by its driver, so the floor is 1 GiB.
    `slowing_bits`: clock events that make times of two runs incomparable. `busy_percent`: utilisation above which a
    card is at work for somebody although nobody is listed.
    """

    used_floor_bytes: int = GIB
    busy_percent: int = 10
    slowing_bits: int = SLOWING
    max_ecc_uncorrected: int = 0


@dataclass(frozen=True, slots=True)
class ClearVerdict:
    """The answer with its reasons; `grade` says how far foreign processes could be told apart.

    `fault`: the card or what shows it is at fault (unfit, or something unknown and no foreign work in sight). Somebody
    has to mend the host, while others' work and slowed clocks only have to end.
    """

    verdict: Clearness
    grade: Grade
    reasons: tuple[str, ...] = ()
    fault: bool = False

    @property
    def clear(self) -> bool:
        """True only when everything that must be known is known and good."""
        return self.verdict == "clear"


def judge(
    snapshot: CardSnapshot,
    policy: ClearPolicy,
    moment: Moment,
    *,
    ours: frozenset[int] = frozenset(),
    visible: frozenset[int] | None = None,
    simulated: bool = False,
    own: int | None = None,
) -> ClearVerdict:
    """Judge one snapshot.

    `ours`: PIDs of the run itself, which may stand on the card during it and not before or after. `visible`: the host's
    process table as we see it; a listed PID outside it tells of a container whose PIDs are hidden. `own`: the PID of
    who asks, which must never stand on a card.
    """
    unknown = _unknown(snapshot, moment)
    unfit, foreign = _unfit(snapshot, policy), _foreign(snapshot, policy, moment, ours, visible, own)
    contended = [*unfit, *foreign]
    throttled = _throttled(snapshot, policy)
    grade: Grade = "scripted" if simulated else _grade(snapshot, policy, visible)
    reasons = (*contended, *unknown, *throttled)
    if contended:
        return ClearVerdict("contended", grade, reasons, fault=bool(unfit))
    if unknown:
        return ClearVerdict("unknown", grade, reasons, fault=True)
    if throttled:
        return ClearVerdict("throttled", grade, reasons)
    return ClearVerdict("clear", grade)


def worst(verdicts: list[ClearVerdict]) -> ClearVerdict:
    """Several moments as one: the worst verdict, the weakest grade, every reason once and in order."""
    assert verdicts
    severity: list[Clearness] = ["clear", "throttled", "unknown", "contended"]
    weakness: list[Grade] = ["scripted", "pids", "memory", "none"]
    return ClearVerdict(
        max((v.verdict for v in verdicts), key=severity.index),
        max((v.grade for v in verdicts), key=weakness.index),
        tuple(dict.fromkeys(reason for v in verdicts for reason in v.reasons)),
        any(v.fault for v in verdicts),
    )


def _unknown(snapshot: CardSnapshot, moment: Moment) -> list[str]:
    """Values that must be known for this moment and are not."""
    needed = {
        "processes": "the list of processes",
        "throttle_bits": "clock events",
        "ecc_uncorrected": "ECC errors",
        "remap_pending": "whether a row remap is pending",
        "remap_failed": "whether a row remap failed",
    }
    if moment != "during":  # during the run its own memory would hide a foreign one's anyway
        needed |= {"used_bytes": "used memory", "utilisation_percent": "utilisation", "mig_enabled": "the MIG mode"}
    causes = dict(snapshot.errors)
    out = []
    for field, words in needed.items():
        if getattr(snapshot, field) is not None:
            continue
        if field in snapshot.unsupported:
            if field in ("used_bytes", "processes"):
                out.append(f"{words} is not supported by this card, so it cannot be known to be clear")
            continue
        cause = causes.get(field) or causes.get("handle") or causes.get("card") or "not told"
        out.append(f"{words} unknown: {cause}")
    return out


def _unfit(snapshot: CardSnapshot, policy: ClearPolicy) -> list[str]:
    """Things about the card itself that forbid measuring on it."""
    out = []
    if snapshot.mig_enabled:
        out.append("MIG is on: slices cannot be told apart; turn it off with nvidia-smi -mig 0")
    if (snapshot.ecc_uncorrected or 0) > policy.max_ecc_uncorrected:
        out.append(f"{snapshot.ecc_uncorrected} uncorrected ECC errors since the driver was loaded: reset the card")
    if snapshot.remap_pending:
        out.append("a row remap is pending: the card needs a reset")
    if snapshot.remap_failed:
        out.append("a row remap failed: the card needs replacing")
    return out


def _foreign(
    snapshot: CardSnapshot,
    policy: ClearPolicy,
    moment: Moment,
    ours: frozenset[int],
    visible: frozenset[int] | None,
    own: int | None,
) -> list[str]:
    """Somebody else's work: listed processes, memory without an owner, utilisation without an owner."""
    listed = snapshot.processes or ()
    out = [_process_words(p, moment, visible, own) for p in listed if p.pid not in ours or moment != "during"]
    if moment == "during":
        return out
    used = snapshot.used_bytes
    if used is not None and used > policy.used_floor_bytes and not listed:
        out.append(
            f"{used} bytes used and no process listed (floor {policy.used_floor_bytes}): "
            "a holder outside this container, or memory that was not given back"
        )
    busy = snapshot.utilisation_percent
    if busy is not None and busy > policy.busy_percent and not listed:
        out.append(f"{busy} % busy and no process listed")
    return out


def _process_words(process: CardProcess, moment: Moment, visible: frozenset[int] | None, own: int | None) -> str:
    if process.pid == own:
        return f"process {own} is this worker itself: something in it has made a CUDA context, which no probe may"
    used = "unknown memory" if process.used_bytes is None else f"{process.used_bytes} bytes"
    where = " (not in this process table: a host PID seen from a container)" if _hidden(process, visible) else ""
    kind = " through MPS" if process.kind == "mps" else ""
    return f"process {process.pid}{where} holds {used}{kind} {moment} the run"


def _hidden(process: CardProcess, visible: frozenset[int] | None) -> bool:
    return visible is not None and process.pid not in visible


def _throttled(snapshot: CardSnapshot, policy: ClearPolicy) -> list[str]:
    slowing = (snapshot.throttle_bits or 0) & policy.slowing_bits
    return [f"clocks slowed: {clock_events(slowing)}"] if slowing else []


def _grade(snapshot: CardSnapshot, policy: ClearPolicy, visible: frozenset[int] | None) -> Grade:
    listed = snapshot.processes
    if listed is None:
        return "none" if snapshot.used_bytes is None else "memory"
    unowned = not listed and (snapshot.used_bytes or 0) > policy.used_floor_bytes
    return "memory" if unowned or any(_hidden(p, visible) for p in listed) else "pids"
