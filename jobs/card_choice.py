"""Which card may serve what was asked: by a part of its model's name, whatever the case, and by its memory.

The queue asks the same in SQL (`jobs.store.leases`); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

ANY_CARD = "any"


class ModelAndMemory(Protocol):
    """A card as far as it is chosen by; `memory_bytes` 0: not known."""

    @property
    def name(self) -> str:
        """The card model's name."""
        ...

    @property
    def memory_bytes(self) -> int:
        """All memory of the card."""
        ...


def is_fit(card: ModelAndMemory, card_class: str, memory_bytes: int) -> bool:
    """Whether a card has what is asked for; one of unknown memory has not as much as any."""
    named = card_class in ("", ANY_CARD) or card_class.lower() in card.name.lower()
    return named and card.memory_bytes >= memory_bytes


def asked_of_card(card_class: str, memory_bytes: int) -> str:
    """What is asked for, in words."""
    words = [] if card_class in ("", ANY_CARD) else [f"of class {card_class!r}"]
    words += [f"with {memory_bytes:,} bytes or more"] if memory_bytes else []
    return " ".join(words) or "of any class"


def kinds(cards: Iterable[ModelAndMemory], memory_bytes: int) -> str:
    """The kinds of card that there are, each once; with their memory where `memory_bytes` asks for some."""
    return ", ".join(sorted({card.name + (_memory(card) if memory_bytes else "") for card in cards}))


def _memory(card: ModelAndMemory) -> str:
    return f" ({card.memory_bytes:,} bytes)" if card.memory_bytes else " (memory unknown)"
