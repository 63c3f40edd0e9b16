"""A scenario over sweeps as pictures: a chart a metric, a line an arm, with what changed and where things broke off.

Places of sweeps and values are thousandths of a chart's width and height, so that a template only prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jobs.gates import GATING
from jobs.history import Change, History, Point, breaks_of, changes_of
from jobs.metrics import CLOCKED, METRICS
from jobs.model import Missing, Reading
from reports.blocks import Column, Inlines, Name, Strong, Struck, SweepRef, Table, words
from reports.format import change, exact, show, step_of
from reports.units import unit_of

CHARTED: Final = frozenset(GATING | set(METRICS))
"""What a scenario's page tells of: what gates, and every metric."""

HISTORY_SWEEPS: Final = 40
"""Sweeps that a page goes back: more are read with `assay history`."""

_EDGE: Final = 25  # thousandths left free at either side, so that a dot is whole
_KINDS: Final = 6  # of lines that a style sheet tells apart

Label = tuple[str, str]
"""Arm, and the settings in which its series differ."""


@dataclass(frozen=True, slots=True)
class Line:
    """The points of one arm: dots that count and struck ones as (x, y), intervals as (x, low, high)."""

    kind: int
    label: str
    dots: tuple[tuple[int, int], ...]
    struck: tuple[tuple[int, int], ...]
    intervals: tuple[tuple[int, int, int], ...]
    latest: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric over sweeps. `changes` and `breaks` are places; `data` is what a script draws it from again."""

    metric: str
    title: str
    lines: tuple[Line, ...]
    changes: tuple[int, ...]
    breaks: tuple[int, ...]
    top: str
    bottom: str
    notes: tuple[str, ...]
    table: Table
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that is shown of a scenario. `unmoved`: metrics with the value that they had in every sweep."""

    name: str
    card: str
    model_digest: str
    sweeps: tuple[tuple[str, str], ...]  # id and time, oldest first
    exact: tuple[Chart, ...]
    time: tuple[Chart, ...]
    changes: Table | None
    unmoved: Table | None

    @property
    def ends(self) -> tuple[str, str]:
        """When the first and the last sweep were: by day, or by minute where that is the same one."""
        first, last = self.sweeps[0][1], self.sweeps[-1][1]
        letters = 10 if first[:10] != last[:10] else 16
        return first[:letters].replace("T", " "), last[:letters].replace("T", " ")


@dataclass(frozen=True, slots=True)
class _Track:
    """The points of one arm of one series, in the order of sweeps."""

    label: str
    points: tuple[Point, ...]
    changes: tuple[Change, ...]
    note: str


def build(name: str, histories: Sequence[History]) -> Scenario:
    """The scenario of that name, from the series that its cell measured; at least one."""
    times = {point.sweep: point.at for one in histories for point in one.points}
    sweeps = sorted(times, key=lambda sweep: (times[sweep], sweep))
    places = {sweep: place for place, sweep in enumerate(sweeps)}
    labels = _labels(histories)
    kinds = {label: kind % _KINDS for kind, label in enumerate(sorted(set(labels.values()), key=_rank))}
    tracks: dict[str, list[_Track]] = {}
    for one in histories:
        tracks.setdefault(one.name, []).extend(_tracks(name, one, labels))
    for of_metric in tracks.values():
        of_metric.sort(key=lambda track: _rank(track.label))
    moved = [metric for metric in sorted(tracks) if metric not in CLOCKED and _has_moved(tracks[metric])]
    moved.sort(key=lambda metric: -_last_change(tracks[metric], places))
    timed = [metric for metric in METRICS if metric in CLOCKED and metric in tracks]
    still = [metric for metric in sorted(tracks) if metric not in CLOCKED and metric not in moved]
    first = histories[0]
    return Scenario(
        name=name,
        card=first.card,
        model_digest=first.model_digest,
        sweeps=tuple((sweep, times[sweep]) for sweep in sweeps),
        exact=tuple(_chart(metric, tracks[metric], places, kinds) for metric in moved),
        time=tuple(_chart(metric, tracks[metric], places, kinds) for metric in timed),
        changes=_changes([*moved, *timed], tracks, places),
        unmoved=_unmoved(still, tracks, sorted(kinds, key=_rank)),
    )


def _labels(histories: Sequence[History]) -> dict[Label, str]:
    """(series, arm) -> the arm, with the settings in which series of one name differ where an arm has several."""
    settings = {one.series: _settings(one) for one in histories}
    names = {name for found in settings.values() for name in found}
    varying = sorted(name for name in names if len({found.get(name) for found in settings.values()}) > 1)
    told = {series: ", ".join(f"{name}={found.get(name)}" for name in varying) for series, found in settings.items()}
    by_arm: dict[str, set[str]] = {}
    for one in histories:
        for point in one.points:
            by_arm.setdefault(point.arm, set()).add(told[one.series])
    return {
        (one.series, point.arm): f"{point.arm} {told[one.series]}" if len(by_arm[point.arm]) > 1 else point.arm
        for one in histories
        for point in one.points
    }


def _settings(one: History) -> dict[str, str]:
    effective = one.config.get("effective")
    return {name: str(value) for name, value in effective.items()} if isinstance(effective, dict) else {}


def _rank(label: str) -> tuple[int, str]:
    arm = label.split(" ", 1)[0]
    return {"head": 0, "base": 1}.get(arm, 2), label


def _tracks(name: str, one: History, labels: Mapping[Label, str]) -> Iterable[_Track]:
    """Points by arm; of a sweep where several cells have the series, those of the cell of that name."""
    by_arm: dict[str, dict[str, Point]] = {}
    for point in one.points:
        kept = by_arm.setdefault(point.arm, {})
        if point.sweep not in kept or point.cell == name:
            kept[point.sweep] = point
    for arm, kept in by_arm.items():
        points = tuple(kept.values())
        yield _Track(labels[one.series, arm], points, *changes_of(one.name, points))


def _has_moved(tracks: Sequence[_Track]) -> bool:
    return any(track.changes for track in tracks)


def _last_change(tracks: Sequence[_Track], places: Mapping[str, int]) -> int:
    return max(places[track.points[one.index].sweep] for track in tracks for one in track.changes)


# ---- a chart -----------------------------------------------------------------------------------------------------


def _chart(metric: str, tracks: Sequence[_Track], places: Mapping[str, int], kinds: Mapping[str, int]) -> Chart:
    unit = unit_of(metric)
    xs = _across(len(places))
    counted = [point for track in tracks for point in track.points if not point.struck]
    bounds = [value for point in counted for value in (point.low, point.high) if not isinstance(value, Missing)]
    low, high = (min(bounds), max(bounds)) if bounds else (0, 0)
    scale = _Scale(low, high)
    broken = {places[track.points[at].sweep] for track in tracks for at, _ in breaks_of(track.points)}
    changed = {places[track.points[one.index].sweep] for track in tracks for one in track.changes}
    return Chart(
        metric=metric,
        title=f"{metric}, {unit}" if unit not in ("", "count") else metric,
        lines=tuple(_line(track, unit, xs, places, scale, kinds[track.label]) for track in tracks),
        changes=tuple(xs[place] for place in sorted(changed)),
        breaks=tuple(xs[place] for place in sorted(broken - changed)),
        top=show(high, unit) if bounds else "",
        bottom=show(low, unit) if bounds and low != high else "",
        notes=tuple(dict.fromkeys(track.note for track in tracks if track.note)),
        table=_points(metric, tracks, unit),
        data=_data(tracks, unit, places, kinds, sorted(changed), sorted(broken - changed)),
    )


class _Scale:
    """Values to thousandths from the top, the lowest and the highest a little inside."""

    def __init__(self, low: int | float, high: int | float) -> None:
        self._low, self._span = low, high - low

    def __call__(self, value: int | float) -> int:
        if not self._span:
            return 500
        return min(1000, max(0, round(920 - 840 * (value - self._low) / self._span)))


def _across(count: int) -> tuple[int, ...]:
    if count == 1:
        return (500,)
    return tuple(round(_EDGE + (1000 - 2 * _EDGE) * place / (count - 1)) for place in range(count))


def _line(track: _Track, unit: str, xs: Sequence[int], places: Mapping[str, int], scale: _Scale, kind: int) -> Line:
    dots: list[tuple[int, int]] = []
    struck: list[tuple[int, int]] = []
    intervals = []
    latest: Reading = Missing(missing="retracted")
    for point in track.points:
        x = xs[places[point.sweep]]
        if not point.struck:
            latest = point.value
        if isinstance(point.value, Missing):
            continue
        (struck if point.struck else dots).append((x, scale(point.value)))
        if not point.struck and point.low != point.high:
            intervals.append((x, scale(_known(point.low)), scale(_known(point.high))))
    return Line(kind, track.label, tuple(dots), tuple(struck), tuple(intervals), exact(latest, unit))


def _known(value: Reading) -> int | float:
    assert not isinstance(value, Missing), "a point with a value has its bounds"
    return value


def _data(
    tracks: Sequence[_Track],
    unit: str,
    places: Mapping[str, int],
    kinds: Mapping[str, int],
    changed: Sequence[int],
    broken: Sequence[int],
) -> dict[str, Any]:
    """For the script: values a sweep as numbers and as words; a missing one is null."""
    largest = max((abs(value) for track in tracks for value in _values(track.points)), default=0)
    step, suffix = step_of(largest, unit)
    times = {point.sweep: point.at[:16].replace("T", " ") for track in tracks for point in track.points}
    lines = [_drawn(track, places, unit, step, kinds[track.label]) for track in tracks]
    when = [times.get(sweep, "") for sweep in places]
    return {"unit": suffix, "when": when, "lines": lines, "changes": list(changed), "breaks": list(broken)}


def _drawn(track: _Track, places: Mapping[str, int], unit: str, step: int | float, kind: int) -> dict[str, Any]:
    at = {places[point.sweep]: point for point in track.points}
    found = [at.get(place) for place in range(len(places))]
    told = [None if point is None or isinstance(point.value, Missing) else point for point in found]
    counted = [None if point is None or point.struck else point for point in told]
    return {
        "label": track.label,
        "kind": kind,
        "values": [None if point is None else _scaled(point.value, step) for point in counted],
        "low": [None if point is None else _scaled(point.low, step) for point in counted],
        "high": [None if point is None else _scaled(point.high, step) for point in counted],
        "struck": [_scaled(point.value, step) if point is not None and point.struck else None for point in told],
        "told": [None if point is None else exact(point.value, unit) + _mark(point) for point in found],
    }


def _mark(point: Point) -> str:
    return " (retracted)" if point.struck else ""


def _values(points: Iterable[Point]) -> list[int | float]:
    return [point.value for point in points if not point.struck and not isinstance(point.value, Missing)]


def _scaled(value: Reading, step: int | float) -> float:
    return float(_known(value)) / step


# ---- tables ------------------------------------------------------------------------------------------------------


def _points(metric: str, tracks: Sequence[_Track], unit: str) -> Table:
    """Every point, newest sweep first, as it is also read where a picture is not."""
    columns = (
        Column("Sweep"), Column("When", "right"), Column("Arm"), Column("Runs", "right"), Column("Median", "right"),
        Column("From", "right"), Column("To", "right"), Column("What changed", prose=True),
    )  # fmt: skip
    rows = [(point.at, _point(track, place, unit)) for track in tracks for place, point in enumerate(track.points)]
    ordered = sorted(rows, key=lambda row: row[0], reverse=True)
    return Table(f"{metric}, newest first", columns, tuple(row for _, row in ordered))


def _point(track: _Track, place: int, unit: str) -> tuple[Inlines, ...]:
    point = track.points[place]
    told = exact(point.value, unit)
    moved = [f"change: {_moved(one, unit)}" for one in track.changes if one.index == place]
    said = [*([f"retracted: {point.struck}"] if point.struck else []), *moved]
    said += [words_ for at, words_ in breaks_of(track.points) if at == place]
    spread = (point.low, point.high) if point.low != point.high else (None, None)
    return (
        words(SweepRef(point.sweep)),
        words(point.at[:16].replace("T", " ")),
        words(track.label),
        words(str(point.runs)),
        words(Struck(told)) if point.struck else words(told),
        *(words("" if side is None else exact(side, unit)) for side in spread),
        words("; ".join(said)),
    )


def _changes(metrics: Sequence[str], tracks: Mapping[str, Sequence[_Track]], places: Mapping[str, int]) -> Table | None:
    """Every change of level, newest first."""
    found = [
        (places[track.points[one.index].sweep], metric, track, one)
        for metric in metrics
        for track in tracks[metric]
        for one in track.changes
    ]
    if not found:
        return None
    found.sort(key=lambda row: -row[0])
    columns = (
        Column("Metric"), Column("Arm"), Column("Before", "right"), Column("After", "right"),
        Column("Change", "right"), Column("From sweep"), Column("When", "right"), Column("Changed with it", prose=True),
    )  # fmt: skip
    rows = tuple(_change(metric, track, one) for _, metric, track, one in found)
    return Table("Changes of level, newest first", columns, rows)


def _change(metric: str, track: _Track, one: Change) -> tuple[Inlines, ...]:
    unit, point = unit_of(metric), track.points[one.index]
    return (
        words(Name(metric)),
        words(track.label),
        words(exact(one.before, unit)),
        words(exact(one.after, unit)),
        words(Strong(change(one.before, one.after, unit))),
        words(SweepRef(point.sweep)),
        words(point.at[:16].replace("T", " ")),
        words("; ".join(one.beside) or "nothing that is known"),
    )


def _moved(one: Change, unit: str) -> str:
    return f"{exact(one.before, unit)} -> {exact(one.after, unit)}, {change(one.before, one.after, unit)}"


def _unmoved(metrics: Sequence[str], tracks: Mapping[str, Sequence[_Track]], labels: Sequence[str]) -> Table | None:
    """One row a metric, one column an arm: the value of every sweep."""
    if not metrics:
        return None
    columns = (Column("Metric"), *(Column(label, "right") for label in labels))
    rows = []
    for metric in metrics:
        told = {track.label: track.points[-1].value for track in tracks[metric]}
        rows.append((words(Name(metric)), *(words(_still(told.get(label), metric)) for label in labels)))
    return Table("The same in every sweep", columns, tuple(rows))


def _still(value: Reading | None, metric: str) -> str:
    return "not measured" if value is None else exact(value, unit_of(metric))
