"""Which cards a sweep runs on: the real ones that this process may see, or simulated ones."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import cards_can_be_called
from orchestrator.cards import CardName, CardProbe, ProbeError
from orchestrator.scripted import SIMULATED_CARD, SIMULATED_DRIVER, simulated_uuid

ANY_CLASS = "any"


def simulated_cards(host: str, count: int) -> tuple[CardName, ...]:
    """`count` simulated cards of a host."""
    return tuple(
        CardName(simulated_uuid(host, i), SIMULATED_CARD, SIMULATED_DRIVER, i, simulated=True) for i in range(count)
    )


def choose_cards(
    asked: int | None,
    device: str,
    real: CardProbe | None,
    why_none: str,
    visible: str | None,
    host: str,
    card_class: str = ANY_CLASS,
) -> tuple[CardName, ...]:
    """The cards to use: `asked` of them, or (None) every visible real card, or one simulated card.

    `card_class` narrows them to cards whose model's name holds it, whatever the case; "any" takes each.

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
        return of_class(card_class, simulated_cards(host, asked or 1))
    fitting = of_class(card_class, found)
    if asked is not None and asked > len(fitting):
        kind = "" if card_class == ANY_CLASS else f" of class {card_class!r}"
        raise ProbeError(f"{asked} cards asked, {len(fitting)} visible{kind}", f"use --cards {len(fitting)} or fewer")
    return fitting[:asked]


def of_class(card_class: str, cards: Sequence[CardName]) -> tuple[CardName, ...]:
    """Those of `cards` whose name holds `card_class`. Raises ProbeError with the names that are here if none does."""
    if card_class == ANY_CLASS:
        return tuple(cards)
    fitting = tuple(card for card in cards if card_class.casefold() in card.name.casefold())
    if not fitting:
        here = ", ".join(sorted({card.name for card in cards}))
        raise ProbeError(
            f"the sweep asks for cards of class {card_class!r}, and here are: {here}",
            "run it where such a card is, or give cards: {class: any}",
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
