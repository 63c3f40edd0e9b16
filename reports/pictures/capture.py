"""The capture map: one decode step from its first plan step to its last, what a graph holds of it, and where seams are.

A strip for the whole step, and below it one for each cause, so that a cause is found by its words and not by its
colour alone. The reasons are those of docs/capture.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Final

from jobs.model import Missing, SeamRow
from jobs.verdict import ArmView
from reports.blocks import Bar, Bars, Block, Paragraph, Slice, words
from reports.format import integer, plural
from reports.traffic import fact, reading

REASONS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "CaptureRecordingFailed": ("recording", "recording it failed, or would fail"),
        "HostControlFlowOrSequence": ("host", "the host carries it out"),
        "UnresolvedOutputShape": ("output", "the shape of an output is not known"),
        "UnresolvedInputShape": ("input", "the shape of an input is not known"),
        "ClassifierDisqualified": ("grows", "an extent grows from token to token"),
        "KernelNotWarmed": ("cold", "its kernel has not run in these shapes"),
        "KernelCaptureUnsupported": ("unsupported", "its kernel cannot be recorded"),
    }
)
"""Reason -> its colour's name, and what it says."""

_OTHER: Final = ("other", "a reason that this report does not know")
_MARK: Final = 4  # thousandths: a seam of one step in a thousand is seen too
_MOST_CAUSES: Final = 8
_MOST_TITLES: Final = 40
Cause = tuple[str, str]
"""Reason and operator."""


@dataclass(frozen=True, slots=True)
class _Map:
    """What arms that are cut alike have: all plan steps of a decode step, and those that are in seams."""

    steps: int
    seams: tuple[SeamRow, ...]


def build(arms: Iterable[ArmView]) -> list[Block]:
    """One picture, a group of strips for all arms that are cut alike; nothing where each arm is one graph.

    An arm whose rows and counters disagree, or whose plan's length is not known, has no map, and it is said why.
    """
    maps: dict[_Map, list[ArmView]] = {}
    without: dict[str, list[str]] = {}
    for arm in arms:
        found = _map(arm)
        if isinstance(found, str):
            without.setdefault(found, []).append(arm.arm)
        else:
            maps.setdefault(found, []).append(arm)
    said = [Paragraph(words(f"No map of {', '.join(names)}: {why}.")) for why, names in without.items() if why]
    if not any(one.seams for one in maps):
        return [*said]
    longest = max(one.steps for one in maps)
    groups = tuple((_title(one, alike), _bars(one)) for one, alike in maps.items())
    reasons = dict.fromkeys(seam.reason for one in maps for seam in one.seams)
    causes = tuple((f"seam-{_kind(reason)}", f"{reason}: {_said(reason)}") for reason in reasons)
    covers = plural(math.ceil(longest * _MARK / 1000), "plan step")
    hint = f"From its first plan step to its last; a mark is at least {covers} wide."
    legend = (("captured", "in a graph"), *causes)
    picture = Bars("One decode step", groups, legend, ends=("first plan step", "last"), wide=True, hint=hint)
    return [picture, *said]


def _map(arm: ArmView) -> _Map | str:
    """The arm's map, or why there is none; empty where nothing is captured and nothing is to be said."""
    segments = reading(arm, "segments")
    if isinstance(segments, Missing):
        return f"segments {segments.missing}"
    if segments == 0 and not arm.seams:
        return ""
    steps = fact(arm, "plan_steps")
    if isinstance(steps, Missing):
        return "how many steps its plan has was not recorded"
    places = [seam.step for seam in arm.seams]
    cut = sum(not is_seam for is_seam, _ in groupby(range(int(steps)), key=set(places).__contains__))
    if places != sorted(set(places)) or (places and not 0 <= places[0] <= places[-1] < steps) or cut != segments:
        return f"its {plural(len(places), 'seam row')} and its {plural(int(segments), 'segment')} disagree"
    return _Map(int(steps), arm.seams)


def _title(one: _Map, alike: Sequence[ArmView]) -> str:
    runs = len(_runs([seam.step for seam in one.seams]))
    cut = f"{plural(_segments(one), 'captured segment')} and {plural(runs, 'seam')}"
    return f"{', '.join(arm.arm for arm in alike)}: {cut} along {plural(one.steps, 'plan step')}"


def _segments(one: _Map) -> int:
    inside = {seam.step for seam in one.seams}
    return sum(not is_seam for is_seam, _ in groupby(range(one.steps), key=inside.__contains__))


def _bars(one: _Map) -> tuple[Bar, ...]:
    """The whole step, then each cause, the most steps first; the rarest causes share a bar."""
    causes = Counter((seam.reason, seam.op) for seam in one.seams)
    order = [cause for cause, _ in causes.most_common()]
    left = one.steps - len(one.seams)
    whole = Slice("captured", "in a graph", plural(left, "plan step"), 0, 1000) if left else None
    marks = _marks(one.seams, one.steps)
    told = f"{plural(left, 'plan step')} in graphs, {integer(len(one.seams))} in seams"
    bars = [Bar("Whole step", ((whole, *marks) if whole else marks), told)]
    bars += [_cause(cause, one) for cause in order[:_MOST_CAUSES]]
    rest = set(order[_MOST_CAUSES:])
    if rest:
        seams = tuple(seam for seam in one.seams if (seam.reason, seam.op) in rest)
        said = f"{plural(len(seams), 'plan step')} of {plural(len(rest), 'more cause')}"
        bars.append(Bar("Other causes", _marks(seams, one.steps), said))
    return tuple(bars)


def _cause(cause: Cause, one: _Map) -> Bar:
    reason, operator = cause
    seams = tuple(seam for seam in one.seams if (seam.reason, seam.op) == cause)
    details = dict.fromkeys(seam.detail for seam in seams if seam.detail)
    why = f": {next(iter(details))}" if len(details) == 1 else ""
    told = f"{plural(len(seams), 'plan step')} on the path {seams[0].path}{why}"
    return Bar(f"{operator.rpartition('::')[2] or operator}: {reason}", _marks(seams, one.steps), told)


def _marks(seams: Sequence[SeamRow], steps: int) -> tuple[Slice, ...]:
    """Seams as marks at their places; marks of one reason that touch are one, so their number is bounded."""
    marks: list[Slice] = []
    for reason, group in groupby(seams, key=lambda seam: seam.reason):
        kind = f"seam-{_kind(reason)}"
        for first, last in _runs([seam.step for seam in group]):
            start = min(1000 * first // steps // _MARK * _MARK, 1000 - _MARK)
            end = max(math.ceil(1000 * (last + 1) / steps), start + _MARK)
            where = f"step {integer(first)}" if first == last else f"steps {integer(first)} to {integer(last)}"
            before = marks[-1] if marks else None
            if before is not None and before.kind == kind and before.start + before.width >= start:
                marks[-1] = Slice(
                    kind, reason, "several seams", before.start, max(end, before.start + before.width) - before.start
                )
            else:
                marks.append(Slice(kind, reason, where, start, end - start))
    if len(marks) > _MOST_TITLES:
        return tuple(Slice(mark.kind, "", "", mark.start, mark.width) for mark in marks)
    return tuple(marks)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of steps that follow on each other."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place - 1:
            runs[-1] = (runs[-1][0], place)
        else:
            runs.append((place, place))
    return runs


def _kind(reason: str) -> str:
    return REASONS.get(reason, _OTHER)[0]


def _said(reason: str) -> str:
    return REASONS.get(reason, _OTHER)[1]
