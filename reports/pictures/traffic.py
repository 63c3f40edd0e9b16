"""Bytes by how they were served and by key: the count view beside the byte view, every share in words too."""

from __future__ import annotations

from typing import Final

from jobs.model import Missing
from reports.blocks import Bar, Bars, Block, Paragraph, Slice, words
from reports.format import bytes_decimal, percent, plural, show
from reports.traffic import PARTS, KeyLine, Part, Traffic
from reports.view import CellView

_KEYS: Final = 4
_ARMS: Final = 3
"""Keys and arms drawn, base and head where there are more; tables have the others, and the page of a cell all keys."""


def build(cell: CellView) -> list[Block]:
    """Where touches were served from, what of the link's bytes no policy can avoid, and which keys they are of."""
    groups = []
    for arm in cell.traffic:
        if arm.role == "null" or not arm.by_count or not arm.by_bytes:
            continue
        bars = (_bar("by count", arm.by_count, "count"), _bar("by bytes", arm.by_bytes, "bytes"))
        groups.append((_title(arm), bars))
    if not groups:
        reasons = "; ".join(dict.fromkeys(f"{arm.arm}: {arm.why}" for arm in cell.traffic if arm.why))
        return [Paragraph(words(f"No picture of shares: {reasons}."))] if reasons else []
    legend = tuple((kind, text) for kind, text, _, _ in PARTS if any(kind in _kinds(bars) for _, bars in groups))
    served = Bars("Where each touch of a weight was served from", tuple(groups), legend)
    return [served, *_floor_bars(cell), *_key_bars(cell)]


def _floor_bars(cell: CellView) -> list[Block]:
    arms = [(arm, arm.link_bytes_per_token, arm.figures["floor_bytes_per_token"]) for arm in cell.traffic]
    known = [
        (arm, streamed, floor)
        for arm, streamed, floor in arms
        if not isinstance(streamed, Missing) and not isinstance(floor, Missing)
    ]
    longest = max((max(streamed, floor) for _, streamed, floor in known), default=0)
    if not longest:
        return []
    bars = []
    for arm, streamed, floor in known:
        must = round(1000 * min(floor, streamed) / longest)
        above = round(1000 * streamed / longest) - must
        slices = (
            Slice("floor", "no policy can avoid", bytes_decimal(min(floor, streamed)), 0, must),
            Slice("above", "above the floor", bytes_decimal(max(0, streamed - floor)), must, above),
        )
        bars.append(Bar(arm.arm, slices, f"{bytes_decimal(streamed)} a token, floor {bytes_decimal(floor)}"))
    legend = (("floor", "at the floor: no policy under this budget can avoid it"), ("above", "above the floor"))
    return [Bars("Streamed bytes a token against the floor", (("", tuple(bars)),), legend)]


def _bar(label: str, parts: tuple[Part, ...], unit: str) -> Bar:
    slices = tuple(
        Slice(part.kind, part.words, f"{percent(part.share)} ({show(part.amount, unit)})", part.start, part.width)
        for part in parts
    )
    return Bar(label, slices, ", ".join(f"{part.label} {part.value}" for part in slices))


def _key_bars(cell: CellView) -> list[Block]:
    """The heaviest keys: how often each crossed the link in each arm beside the bytes that crossed for it."""
    arms = [arm for arm in cell.traffic if arm.role != "null" and arm.keys]
    if len(arms) > _ARMS:
        two = [arm for arm in arms if arm.role in ("base", "head")]
        arms = two if len(two) == 2 else arms[:_ARMS]
    told = {arm.arm: {key.key: key for key in arm.keys if key.streamed} for arm in arms}
    every = sorted((key for keys in told.values() for key in keys.values()), key=lambda key: -key.streamed_bytes)
    heaviest: dict[str, KeyLine] = {}
    for key in every:
        heaviest.setdefault(key.key, key)
    groups = [
        (
            f"{key.key}, {show(key.nbytes, 'bytes')}",
            tuple(bar for arm in told for bar in _key(arm, told[arm].get(key.key))),
        )
        for key in list(heaviest.values())[:_KEYS]
    ]
    legend = (("count", "of the times that a key crossed the link"), ("bytes", "of the bytes that crossed it"))
    return [Bars("The heaviest keys over the link", tuple(groups), legend, wide=True)] if groups else []


def _key(arm: str, key: KeyLine | None) -> tuple[Bar, ...]:
    if key is None:
        return (Bar(arm, (), "not among its heaviest"),)
    shares = (
        ("by count", "count", key.count_share, plural(key.streamed, "time")),
        ("by bytes", "bytes", key.byte_share, bytes_decimal(key.streamed_bytes)),
    )
    return tuple(
        Bar(f"{arm}, {label}", (Slice(kind, label, amount, 0, round(1000 * share)),), f"{percent(share)} ({amount})")
        for label, kind, share, amount in shares
        if not isinstance(share, Missing)
    )


def _kinds(bars: tuple[Bar, ...]) -> set[str]:
    return {item.kind for bar in bars for item in bar.slices}


def _title(arm: Traffic) -> str:
    return f"{arm.arm} ({arm.config})" if arm.config else arm.arm
