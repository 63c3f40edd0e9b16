"""A card along one run: clocks, memory, load and what else stood on it, with the region marked that is timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from jobs.model import Certificate, Interval
from jobs.timeline import CLOCK_EVENTS, SLOWING, Reading, Span, Timeline, any_bits, clock_events
from reports.blocks import Bar, Bars, Slice
from reports.format import bytes_decimal, integer, number, plural

MOST_STANDING: Final = 12
"""Bars of what stood on the card; the rest is counted."""
_LEAST_WIDTH: Final = 3  # thousandths: what lasted one sample is seen too
_EVENTS: Final = "throttle_bits"
_SERIES: Final[Mapping[str, str]] = {
    "sm_clock_mhz": "SM clock",
    "memory_clock_mhz": "Memory clock",
    "used_bytes": "Used memory",
    "utilisation_percent": "Utilisation",
    "power_mw": "Power",
    "temperature_c": "Temperature",
}
_REGIONS: Final = (("load", "before it generates"), ("warm_up", "warm-up"), ("timed", "timed region"))


def build(proof: Certificate, along: Timeline) -> Bars:
    """The picture of one run. All bars share an axis of seconds since the watch began."""
    whole_ms = max(_last_ms(proof, along), 1)
    regions = _regions(along)
    timed = [span for kind, span in regions if kind == "timed"]
    run = Bar("Engine", tuple(_slice(kind, _words(kind), span, whole_ms) for kind, span in regions), _told(regions))
    lines = [_line(name, label, along, whole_ms) for name, label in _SERIES.items()]
    events = [_event(bit, name, along, whole_ms) for bit, name in CLOCK_EVENTS.items() if _has(along, bit)]
    other = _unnamed(along, whole_ms)
    return Bars(
        "Seconds since the watch began",
        (
            ("", (run, *lines)),
            ("Clock events and foreign work", (*events, *other, *_standing(proof.intervals, whole_ms))),
        ),
        tuple((kind, words) for kind, words in _REGIONS if any(kind == found for found, _ in regions)),
        bands=tuple(_slice("timed", "timed region", span, whole_ms) for span in timed),
        ends=("0 s", f"{_s(whole_ms)} s"),
        wide=True,
        hint="The shade is the timed region; lines rise from 0." if timed else "Lines rise from 0.",
    )


def points(along: Timeline) -> str:
    """How many samples there were and what a point stands for, in words."""
    taken = f"{plural(len(along.at_ms), 'point')} over {_s(along.end_ms)} s"
    if along.samples_a_point == 1:
        return f"{taken}, one a sample"
    kept = "its lowest clock, most memory, highest load and every clock event"
    return f"{taken}, each of {integer(along.samples_a_point)} samples in a row: {kept}"


def _last_ms(proof: Certificate, along: Timeline) -> int:
    ends = [along.end_ms, *(round(1000 * one.end_s) for one in proof.intervals)]
    return max(ends + [span[1] for span in (along.warm_up_ms, along.timed_ms) if span])


def _regions(along: Timeline) -> list[tuple[str, Span]]:
    told = [(kind, span) for kind, span in (("warm_up", along.warm_up_ms), ("timed", along.timed_ms)) if span]
    first = min((span[0] for _, span in told), default=0)
    return [("load", (0, first)), *told] if first else told


def _told(regions: list[tuple[str, Span]]) -> str:
    if not regions:
        return "when it generated was not told"
    return ", ".join(f"{_words(kind)} {_s(start)} to {_s(end)} s" for kind, (start, end) in regions)


def _words(kind: str) -> str:
    return dict(_REGIONS)[kind]


def _line(name: str, label: str, along: Timeline, whole_ms: int) -> Bar:
    """One series from 0 up to its highest reading; one that never moves is a line of two points."""
    values = along.series.get(name, ())
    known = [value for value in values if value is not None]
    if not known:
        return Bar(label, (), "not told by this card")
    low, high = min(known), max(known)
    reading = f"{_value(name, low)} throughout" if low == high else f"{_value(name, low)} to {_value(name, high)}"
    inside = _inside(along, values)
    if low != high and inside:
        a, b = min(inside), max(inside)
        reading += f"; timed region {_value(name, a)}" + (f" to {_value(name, b)}" if a != b else "")
    if lost := len(values) - len(known):
        reading += f"; not told at {plural(lost, 'point')}"
    top = 100 if name == "utilisation_percent" else max(high, 1)
    return Bar(label, (), reading, _drawn(along, values, whole_ms, top))


def _drawn(
    along: Timeline, values: Sequence[Reading], whole_ms: int, top: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    if len(set(values)) == 1 and values[0] is not None:
        y = _y(values[0], top)
        return (((0, y), (_x(along.end_ms, whole_ms), y)),)
    stretches: list[list[tuple[int, int]]] = [[]]
    ends = [*along.at_ms[1:], along.end_ms]
    for value, start, end in zip(values, along.at_ms, ends, strict=True):
        if value is None:
            stretches.append([])
        else:
            stretches[-1] += [(_x(start, whole_ms), _y(value, top)), (_x(end, whole_ms), _y(value, top))]
    return tuple(_thinned(stretch) for stretch in stretches if stretch)


def _thinned(stretch: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Without the points inside a level stretch."""
    inner = (
        here
        for before, here, after in zip(stretch, stretch[1:], stretch[2:], strict=False)
        if not before[1] == here[1] == after[1]
    )
    return (stretch[0], *inner, stretch[-1])


def _inside(along: Timeline, values: Sequence[Reading]) -> list[int]:
    """Readings of points whose stretch meets the timed region."""
    if along.timed_ms is None:
        return []
    start, end = along.timed_ms
    ends = [*along.at_ms[1:], along.end_ms]
    return [
        value
        for value, begins, ends_ms in zip(values, along.at_ms, ends, strict=True)
        if value is not None and begins <= end and ends_ms >= start
    ]


def _has(along: Timeline, bit: int) -> bool:
    return any(bits and bits & bit for bits in along.series.get(_EVENTS, ()))


def _event(bit: int, name: str, along: Timeline, whole_ms: int) -> Bar:
    slows = bool(bit & SLOWING)
    return _spans_bar(
        f"{name}, slowed" if slows else name, "slowed" if slows else "event", _stretches(along, bit), whole_ms
    )


def _unnamed(along: Timeline, whole_ms: int) -> list[Bar]:
    """Clock events that have no name here."""
    rest = any_bits(bits for bits in along.series.get(_EVENTS, ()) if bits) & ~sum(CLOCK_EVENTS)
    return [_spans_bar(clock_events(rest), "event", _stretches(along, rest), whole_ms)] if rest else []


def _stretches(along: Timeline, bits: int) -> list[Span]:
    """Where any of these bits was set; points that touch are one stretch."""
    found: list[Span] = []
    ends = [*along.at_ms[1:], along.end_ms]
    for value, start, end in zip(along.series[_EVENTS], along.at_ms, ends, strict=True):
        if not value or not value & bits:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _standing(intervals: Iterable[Interval], whole_ms: int) -> list[Bar]:
    """What stood on the card or against it and was not the run's own, a bar a thing, in the order it came."""
    things: dict[tuple[str, str], list[Span]] = {}
    for one in intervals:
        kind = "slowed" if one.pid is None else "foreign"
        things.setdefault((kind, one.what), []).append((round(1000 * one.start_s), round(1000 * one.end_s)))
    if not things:
        return [Bar("Foreign work", (), "none seen")]
    shown = list(things.items())[:MOST_STANDING]
    bars = [_spans_bar(what, kind, spans, whole_ms) for (kind, what), spans in shown]
    left = len(things) - len(shown)
    return [*bars, *([Bar("More", (), f"{plural(left, 'thing')} more stood there")] if left else [])]


def _spans_bar(label: str, kind: str, spans: Sequence[Span], whole_ms: int) -> Bar:
    told = [f"{_s(start)} to {_s(end)} s" if start != end else f"at {_s(start)} s" for start, end in spans[:4]]
    more = f" and {integer(len(spans) - 4)} more" if len(spans) > 4 else ""
    return Bar(label, _marks(kind, label, spans, whole_ms), ", ".join(told) + more)


def _marks(kind: str, label: str, spans: Sequence[Span], whole_ms: int) -> tuple[Slice, ...]:
    """Stretches at their places; those that touch on the scale are one mark, so their number is bounded."""
    marks: list[Slice] = []
    for span in spans:
        found = _slice(kind, label, span, whole_ms)
        before = marks[-1] if marks else None
        if before is None or found.start > before.start + before.width:
            marks.append(found)
        else:
            width = max(before.width, found.start + found.width - before.start)
            marks[-1] = Slice(kind, label, "several stretches", before.start, width)
    return tuple(marks)


def _slice(kind: str, label: str, span: Span, whole_ms: int) -> Slice:
    start, end = _x(span[0], whole_ms), _x(span[1], whole_ms)
    width = max(end - start, _LEAST_WIDTH)
    return Slice(kind, label, f"{_s(span[0])} to {_s(span[1])} s", min(start, 1000 - width), width)


def _x(at_ms: int, whole_ms: int) -> int:
    return min(1000, round(1000 * at_ms / whole_ms))


def _y(value: int, top: int) -> int:
    return 950 - round(900 * value / top)


def _s(at_ms: int) -> str:
    return number(at_ms / 1000) if at_ms % 1000 else integer(at_ms // 1000)


def _value(name: str, value: int) -> str:
    if name == "used_bytes":
        return bytes_decimal(value)
    if name == "power_mw":
        return f"{number(value / 1000)} W"
    return f"{integer(value)} {({'utilisation_percent': '%', 'temperature_c': '°C'}).get(name, 'MHz')}"
