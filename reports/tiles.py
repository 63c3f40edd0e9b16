"""The few figures that head a page."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.model import Missing
from reports.blocks import Tone
from reports.format import change, integer, plural, show
from reports.traffic import Traffic, reading
from reports.view import CellView, SweepView
from reports.wording import OUTCOMES


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure with what it is, how it moved, and a tone that the words repeat."""

    label: str
    value: str
    note: str
    tone: Tone = "quiet"


def of_sweep(view: SweepView) -> tuple[Tile, ...]:
    """Cells by outcome, worst first."""
    verdict = view.verdict
    tiles = [
        Tile(
            "Cells judged",
            f"{integer(verdict.cells_judged)} of {integer(verdict.cells_expected)}",
            "fixed at submission",
        )
    ]
    tiles += [
        Tile(name, integer(count), plural(count, "cell")[len(integer(count)) + 1 :], OUTCOMES[name][0])
        for name, count in view.counts
    ]
    return tuple(tiles)


def of_cell(cell: CellView) -> tuple[Tile, ...]:
    """Tokens, streamed bytes, byte hit rate, distance to the floor and segments of head against base."""
    base = next((arm for arm in cell.traffic if arm.role == "base"), None)
    name = cell.under_test
    head = next((arm for arm in cell.traffic if cell.head is not None and arm.arm == name), None)
    tiles = [_tokens(cell)]
    if head is not None:
        tiles += [
            _figure(f"Streamed a token, {name}", base, head, "htod_bytes_per_token", "bytes"),
            _figure(f"Byte hit rate, {name}", base, head, "byte_hit_rate", "ratio"),
            _figure(f"Distance to the floor, {name}", base, head, "floor_distance_bytes", "bytes"),
        ]
    if cell.head is not None:
        segments = reading(cell.head, "segments")
        before = None if cell.base is None else reading(cell.base, "segments")
        tiles.append(Tile(f"Graph segments, {name}", _short(segments, "count"), _against(before, segments, "count")))
    return tuple(tiles)


def _tokens(cell: CellView) -> Tile:
    pairs = [item for item in cell.comparisons if item.row.what == "pair"]
    if not pairs:
        return Tile("Tokens", "not compared", "nothing is known", "warn")
    worst = next((item for item in pairs if not item.is_equal), pairs[0])
    ids = max(item.row.compared for item in pairs)
    note = f"{plural(ids, 'id')} compared" + (f", {integer(len(pairs))} times" if len(pairs) > 1 else "")
    return Tile(f"Tokens, {cell.under_test} and base", worst.state.word, note, worst.state.tone)


def _figure(label: str, base: Traffic | None, head: Traffic, name: str, unit: str) -> Tile:
    value = head.figures[name]
    return Tile(label, _short(value, unit), _against(None if base is None else base.figures[name], value, unit))


def _against(before: int | float | Missing | None, after: int | float | Missing, unit: str) -> str:
    if before is None:
        return "no base"
    if isinstance(after, Missing):
        return after.missing
    text = change(before, after, unit)
    return "as base" if text == "unchanged" else f"{text} against base"


def _short(value: int | float | Missing, unit: str) -> str:
    return "n/a" if isinstance(value, Missing) else show(value, unit)
