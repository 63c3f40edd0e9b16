"""One arm's weight traffic: shares by count beside shares by bytes, the floor, and the distance to it.

The count view and the byte view can tell opposite stories (a few large keys re-streamed every step are few events and
most of the bytes), so every share here is computed both ways.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from engine.attribution import CAUSES
from jobs.model import KeyBytes, Missing
from jobs.verdict import ArmView
from reports.format import NOT_RECORDED, Value

METRICS: Final = (
    ("byte_hit_rate", "Byte hit rate", "ratio"),
    ("count_hit_rate", "Count hit rate", "ratio"),
    ("htod_bytes_per_token", "htod bytes per token", "bytes"),
    ("bypassed_byte_share", "Bypassed share of page-ins, by bytes", "ratio"),
    ("bypassed_count_share", "Bypassed share of page-ins, by count", "ratio"),
    ("floor_bytes_per_token", "Floor (W − capacity), bytes per token", "bytes"),
    ("floor_distance_bytes", "Distance to the floor, bytes per token", "bytes"),
    ("floor_ratio", "Times the floor", "x"),
)
"""Metric, label, unit: the figures every report shows for every arm."""

PARTS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("hit", "served from resident memory", "hits", "hit_bytes"),
    ("retained", "copied and kept", "retained_page_ins", "retained_bytes"),
    ("bypassed", "copied and not kept", "bypassed_page_ins", "bypassed_page_in_bytes"),
    ("staged", "streamed through the ring", "staged_page_ins", "staged_bytes"),
    ("in_place", "read in place over the link", "zero_copy_reads", "zero_copy_bytes"),
)
"""Kind, words, count, byte twin: where a touch was served from."""


@dataclass(frozen=True, slots=True)
class Part:
    """One share of the touches: `amount` in `unit`, `share` of the whole, start and width in thousandths."""

    kind: str
    words: str
    amount: int | float
    share: float
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One key: bytes by how they were served, and its share of what crossed the link, by bytes and by count."""

    key: str
    nbytes: int
    streamed: int
    read_bytes: int
    resident_bytes: int
    streamed_bytes: int
    bypassed_bytes: int
    gathered_bytes: int
    byte_share: Value
    count_share: Value


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of the distance to the floor: what it is, and bytes a token over a whole run, warm-ups included."""

    words: str
    per_token_bytes: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """One arm's figures. Tuples are empty where the counters behind them are missing; `why` says which."""

    arm: str
    role: str
    config: str
    figures: dict[str, Value]
    link_bytes_per_token: Value
    """Copied, or read in place."""
    weight_bytes: Value
    budget_bytes: Value
    capacity_bytes: Value
    mean_bypass_bytes: Value
    mean_retained_bytes: Value
    bypass_per_token_bytes: Value
    bypass_of_distance: Value
    by_count: tuple[Part, ...]
    by_bytes: tuple[Part, ...]
    why: str
    keys: tuple[KeyLine, ...]
    causes: tuple[Cause, ...]


def build(arm: ArmView) -> Traffic:
    """The traffic of one arm from its counters, metrics and plan facts."""
    figures = {name: reading(arm, name) for name, _, _ in METRICS}
    bypass_per_token = product(figures["bypassed_byte_share"], figures["htod_bytes_per_token"])
    by_count, count_why = _parts(arm, 2)
    by_bytes, bytes_why = _parts(arm, 3)
    return Traffic(
        arm=arm.arm,
        role=arm.role,
        config=", ".join(f"{name}={setting(value)}" for name, value in sorted(arm.config.items())),
        figures=figures,
        link_bytes_per_token=_link(arm, figures["htod_bytes_per_token"]),
        weight_bytes=fact(arm, "weight_bytes"),
        budget_bytes=fact(arm, "budget_bytes"),
        capacity_bytes=fact(arm, "capacity_bytes"),
        mean_bypass_bytes=ratio(reading(arm, "bypassed_page_in_bytes"), reading(arm, "bypassed_page_ins")),
        mean_retained_bytes=ratio(reading(arm, "retained_bytes"), reading(arm, "retained_page_ins")),
        bypass_per_token_bytes=bypass_per_token,
        bypass_of_distance=ratio(bypass_per_token, figures["floor_distance_bytes"]),
        by_count=by_count,
        by_bytes=by_bytes,
        why=count_why or bytes_why,
        keys=tuple(_key_line(key, *arm.crossings) for key in arm.top_keys),
        causes=_causes(arm),
    )


def _link(arm: ArmView, copied: Value) -> Value:
    """An engine that does not record it reads nothing in place."""
    link = reading(arm, "link_bytes_per_token")
    return copied if isinstance(link, Missing) else link


def _key_line(key: KeyBytes, crossings: int, crossed_bytes: int) -> KeyLine:
    return KeyLine(
        key.key,
        key.nbytes,
        key.streamed,
        (key.hits + key.streamed) * key.nbytes,
        key.hits * key.nbytes,
        key.streamed_bytes,
        key.bypassed * key.nbytes,
        key.gathered_bytes,
        ratio(key.streamed_bytes, crossed_bytes),
        ratio(key.streamed, crossings),
    )


def _causes(arm: ArmView) -> tuple[Cause, ...]:
    """The distance to the floor by cause, in the engine's order; empty where a cause is missing or all fits."""
    found = {words: fact(arm, name) for name, words in CAUSES.items()}
    tokens = fact(arm, "all_tokens")
    if isinstance(tokens, Missing) or not tokens or fact(arm, "resident") != 0:
        return ()
    known = {words: value for words, value in found.items() if not isinstance(value, Missing)}
    if len(known) != len(found):
        return ()
    return tuple(Cause(words, value / tokens) for words, value in known.items())


def reading(arm: ArmView, name: str) -> Value:
    """A counter or metric of an arm; one that the verdict does not hold is missing, with that reason."""
    return arm.values.get(name, Missing(missing=NOT_RECORDED))


def fact(arm: ArmView, name: str) -> Value:
    """A plan fact of an arm as a number, or missing."""
    value = arm.facts.get(name)
    return Missing(missing=NOT_RECORDED) if value is None or isinstance(value, str) else value


def ratio(top: Value, bottom: Value) -> Value:
    """`top / bottom`; missing where either is, or where there is nothing to divide by."""
    if isinstance(top, Missing):
        return top
    if isinstance(bottom, Missing):
        return bottom
    return Missing(missing="none to divide by") if bottom == 0 else top / bottom


def product(left: Value, right: Value) -> Value:
    """`left * right`; missing where either is."""
    if isinstance(left, Missing):
        return left
    return right if isinstance(right, Missing) else left * right


def shown_unit(metric: str, unit: str) -> str:
    """The unit a metric is shown in: a ratio that is no share of a whole reads as a multiple, not as a percentage."""
    return "x" if metric == "floor_ratio" else unit


def spans(amounts: list[int | float], whole: int | float) -> list[tuple[int, int]]:
    """(start, width) of each amount on a bar of 1000, rounded at the edges so that neighbours always meet."""
    edges = [0]
    for index in range(len(amounts)):
        edges.append(round(1000 * sum(amounts[: index + 1]) / whole) if whole else 0)
    return [(left, right - left) for left, right in itertools.pairwise(edges)]


def setting(value: str | int | float | bool | None) -> str:
    """A configured value as a command line writes it."""
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _parts(arm: ArmView, column: int) -> tuple[tuple[Part, ...], str]:
    amounts: list[int | float] = []
    for row in PARTS:
        value = reading(arm, row[column])
        if isinstance(value, Missing):
            if row[0] in ("staged", "in_place"):  # an engine without such a policy has nothing to report
                value = 0
            else:
                return (), f"{row[column]}: {value.missing}"
        amounts.append(value)
    whole = sum(amounts)
    if whole == 0:
        return (), "no touches were counted"
    cuts = spans(amounts, whole)
    return tuple(
        Part(row[0], row[1], amount, amount / whole, start, width)
        for row, amount, (start, width) in zip(PARTS, amounts, cuts, strict=True)
        if amount
    ), ""
