"""How one child's run ended: what its stream, its exit and its parent's own look say, in one word and a sentence."""

from __future__ import annotations

from engine.errors import EXIT_KINDS
from engine.interrupt import INTERRUPTED
from jobs.adapters.base import RunResult
from jobs.adapters.child import ChildEnd
from jobs.adapters.native_record import Stream
from jobs.excerpt import first_words
from jobs.model import RunRecord

KINDS = frozenset(EXIT_KINDS.values()) - {"ok"}
"""What an engine may say of its own end; any other word is a crash, so that none can pass for a measurement or blame
the host."""
RETRIED_KINDS = frozenset({"out_of_memory", "device"})
"""Ends that another attempt may not meet; the others are the same each time, being facts of the arm."""


def outcome(end: ChildEnd, stream: Stream, lie: str | None) -> tuple[str, str, bool]:
    """(measured or a failure's kind, reason, whether to try again)."""
    if end.stopped:
        return "cancelled", "stopped by the user", False
    if end.timed_out:
        late = "running: no end" if end.spoke else "spawning: no word"
        return "timeout", f"timeout: {late} within {end.wall_s:.0f} s", True
    if lie:
        return "provenance", f"provenance: {lie}", False
    if stream.fault and end.signal is None:  # who died while writing crashed, and says no more than that
        return "protocol", f"protocol: {stream.fault}", False
    if stream.error is not None and stream.error.kind != INTERRUPTED:  # then the signal says it all
        told, remedy = stream.error.kind, stream.error.remedy
        kind = told if told in KINDS else "crash"
        said = f"{told}: {stream.error.message}" + (f" ({remedy})" if remedy else "")
        return kind, said if kind == told else f"{kind}: {said}", kind in RETRIED_KINDS
    if end.signal is not None:
        return "crash", f"crash: ended by signal {end.signal}", True
    if stream.fault:
        return "protocol", f"protocol: {stream.fault}", False
    if end.exit_code == 0 and stream.result is not None:
        return "measured", "", False
    kind = EXIT_KINDS[end.exit_code] if end.exit_code and end.exit_code in EXIT_KINDS else "crash"
    what = "no result" if end.exit_code == 0 else f"exit {end.exit_code}"
    return kind, f"{kind}: {what}; {last_log_line(end)}", kind not in KINDS or kind in RETRIED_KINDS


def result_of(kind: str, record: RunRecord, reason: str, retry: bool, end: ChildEnd) -> RunResult:
    """What a worker hears of it."""
    if kind == "measured":
        return RunResult("measured", record, leftovers=end.leftovers)
    if kind == "cancelled":
        return RunResult("cancelled", record, reason, leftovers=end.leftovers)
    if kind == "refused":
        return RunResult("refused", record, reason, leftovers=end.leftovers, fault=kind)
    return RunResult("failed", record, reason, retry, end.leftovers, fault=kind)


def last_log_line(end: ChildEnd) -> str:
    """The last words of a child that said nothing else."""
    lines = [line for line in end.log_tail.splitlines() if line.strip()]
    return f"log ends: {first_words(lines[-1], 300)}" if lines else "the log is empty"
