"""When a card gets no more work: after faults of its own in a row, for a while, and with one message.

A fault that a change can make (a crash, a timeout) never drains a card: it would take the change's card away, and the
next one's, until none is left.
"""

from __future__ import annotations

CARD_FAULTS = frozenset({"device", "lost", "start"})
"""Classes of error that speak of the card or its host."""
DRAIN_AFTER = 3
DRAIN_S = 1800.0


def is_drained(faults: int) -> bool:
    """Whether so many faults in a row are enough."""
    return faults >= DRAIN_AFTER


def counted(faults: int, state: str, fault: str) -> int:
    """Faults in a row after one more attempt: a measured one begins anew, others than the card's say nothing of it."""
    if state == "measured":
        return 0
    return faults + (fault in CARD_FAULTS)
