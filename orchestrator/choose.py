"""Which cards a sweep runs on: the real ones that this process may see, or simulated ones."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import cards_can_be_called
from jobs.card_choice import ANY_CARD, asked_of_card, is_fit, kinds
from orchestrator.cards import CardName, CardProbe, ProbeError
from orchestrator.scripted import SIMULATED_CARD, SIMULATED_DRIVER, SIMULATED_MEMORY_BYTES, simulated_uuid


def simulated_cards(host: str, count: int) -> tuple[CardName, ...]:
    """`count` simulated cards of a host."""
    return tuple(
        CardName(
            simulated_uuid(host, i),
            SIMULATED_CARD,
            SIMULATED_DRIVER,
            i,
            simulated=True,
            memory_bytes=SIMULATED_MEMORY_BYTES,
        )
        for i in range(count)
    )


def choose_cards(
    asked: int | None,
    device: str,
    real: CardProbe | None,
    why_none: str,
    visible: str | None,
    host: str,
    card_class: str = ANY_CARD,
    memory_bytes: int = 0,
) -> tuple[CardName, ...]:
    """The cards to use: `asked` of them, or (None) every visible real card, or one simulated card.

    `card_class` narrows them to cards whose model's name holds it, whatever the case ("any" takes each), and
    `memory_bytes` to those with as much memory.

    A run on the simulated device never holds a real card: it would look like a measurement of it. So `auto` stands for
    the simulator wherever the engine lacks the library to call a card with.

    `real` is None where there is no driver, for the reason `why_none`. `device` is the sweep's: sim, cuda or auto.
    Raises ProbeError when a real card is wanted and there is none, fewer than asked, or none of the class.
    """
    found: tuple[CardName, ...] = ()
    if device == "auto" and not cards_can_be_called():
        device = "sim"
    if device != "sim" and real is not None:
        found = resolve_visible(visible, real.cards())
    if not found and device == "cuda":
        raise ProbeError(f"no card for device cuda: {why_none or 'none is visible'}", "use device: sim, or a GPU host")
    if not found:
        return fit(card_class, memory_bytes, simulated_cards(host, asked or 1))
    fitting = fit(card_class, memory_bytes, found)
    if asked is not None and asked > len(fitting):
        kind = "" if (card_class, memory_bytes) == (ANY_CARD, 0) else f" {asked_of_card(card_class, memory_bytes)}"
        raise ProbeError(f"{asked} cards asked, {len(fitting)} visible{kind}", f"use --cards {len(fitting)} or fewer")
    return fitting[:asked]


def fit(card_class: str, memory_bytes: int, cards: Sequence[CardName]) -> tuple[CardName, ...]:
    """Those of `cards` that have what is asked for. Raises ProbeError with the kinds that are here if none has."""
    fitting = tuple(card for card in cards if is_fit(card, card_class, memory_bytes))
    if not fitting:
        wanted, here = asked_of_card(card_class, memory_bytes), kinds(cards, memory_bytes)
        raise ProbeError(
            f"the sweep asks for cards {wanted}, and here are: {here}",
            "run it where such a card is, or ask for less under cards: in the sweep file",
        )
    return fitting


def resolve_visible(value: str | None, cards: Sequence[CardName]) -> tuple[CardName, ...]:
    """Cards that a CUDA_VISIBLE_DEVICES value names, by index, full UUID or a UUID's unique beginning.

    None means unset: all cards. Raises ProbeError on phantom and duplicate entries and on MIG slices, since CUDA itself
    would silently drop what follows a bad entry.
    """
    if value is None:
        return tuple(cards)
    chosen: list[CardName] = []
    for entry in (part.strip() for part in value.split(",")):
        if not entry:
            continue
        if entry.startswith("MIG-"):
            raise ProbeError(f"CUDA_VISIBLE_DEVICES names the MIG slice {entry}", "turn MIG off: nvidia-smi -mig 0")
        hits = [c for c in cards if (str(c.index) == entry if entry.isdigit() else c.uuid.startswith(entry))]
        if len(hits) != 1:
            known = ", ".join(f"{c.index} = {c.uuid}" for c in cards) or "none"
            raise ProbeError(f"CUDA_VISIBLE_DEVICES entry {entry!r} names {len(hits)} cards", f"cards here: {known}")
        if hits[0] in chosen:
            raise ProbeError(f"CUDA_VISIBLE_DEVICES names {hits[0].uuid} twice", "name each card once")
        chosen.append(hits[0])
    return tuple(chosen)


def only_visible(value: str | None, cards: Sequence[CardName]) -> CardName:
    """The one card that a worker was given. Raises ProbeError unless it is exactly one."""
    visible = resolve_visible(value, cards)
    if len(visible) != 1:
        raise ProbeError(
            f"a worker must see exactly one card and sees {len(visible)} (CUDA_VISIBLE_DEVICES={value!r})",
            "give the worker one GPU",
        )
    return visible[0]
