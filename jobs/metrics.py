"""Metrics: what is derived from one run's counters, facts and generations. One function a metric.

A metric with a zero denominator is Missing with the reason, never 0 and never infinite. Exact metrics come from
integers and repeat bit by bit; the others come from a clock. Formulas: bytes and rates as the engine's counter
dictionary defines them (per token = total over the measured generations / tokens they gave out, prefill forward
included); decode time = time of the one-token steps after the first `decode_skip` tokens, divided by the tokens that
they gave out (a step gives one to each sequence of a batch that goes on), upper median over generations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from engine.attribution import CAUSES
from engine.counters import COUNTERS
from jobs.model import Generation, Missing, Reading, RunRecord

Direction = Literal["lower", "higher", "neutral"]

NOT_RECORDED = Missing(missing="not recorded")
PLANNED = Missing(missing="planned alone, so nothing was timed")

FACT_NAMES: tuple[str, ...] = (
    "weight_bytes",
    "keys",
    "largest_key_bytes",
    "largest_step_bytes",
    "budget_bytes",
    "capacity_bytes",
    "capacity_left_bytes",
    "measured_capacity_bytes",
    "requested_bytes_per_step",
    "floor_bytes_per_token",
    "gather_bytes_per_token",
    "routed_bytes_per_token",
    "bank_bytes_per_step",
    "touches_per_step",
    "kv_bytes_per_token",
    "workspace_bytes",
    "measured_generations",
    "measured_tokens",
    "floor_bytes",
    *CAUSES,
)
"""Plan facts that a run reports beside its counters; expressions may use them."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a metric may read: one run."""

    counters: Mapping[str, Reading]
    facts: Mapping[str, int | float | str]
    measured: tuple[Generation, ...]  # warm-ups left out
    decode_skip: int
    tokens: int  # ids given out by the measured generations, counted here and not taken from the engine's own counter

    def counter(self, name: str) -> Reading:
        """A counter's value; Missing where it was not recorded or is not finite."""
        return finite(self.counters.get(name, NOT_RECORDED))

    def fact(self, name: str) -> Reading:
        """A plan fact's value; Missing where absent or not a number."""
        value = self.facts.get(name, NOT_RECORDED)
        return Missing(missing="not a number") if isinstance(value, str) else finite(value)

    def decoded(self, generation: Generation) -> tuple[int, int]:
        """Time in ns of a generation's steps after `decode_skip`, and the tokens that they gave.

        Step k gives the id after the kth to each sequence that has one; a step that gives none to any, as those of a
        plan alone, counts as one.
        """
        first = max(0, self.decode_skip - 1)
        times = generation.step_ns[first:]
        given = [min(max(0, len(sequence.ids) - 1 - first), len(times)) for sequence in generation.sequences]
        return sum(times), sum(given) + len(times) - max(given)


def is_planned(generation: Generation) -> bool:
    """Whether a generation was planned alone: it counted, gave no id to any sequence, and stopped none."""
    if generation.ids or generation.stop_reason:
        return False
    return bool(generation.counters) and not any(s.ids or s.stop_reason for s in generation.further)


def given_tokens(generation: Generation) -> int:
    """Ids of a generation's sequences; of a plan alone, without ids, one a step and one of the prompt for each."""
    if is_planned(generation):
        return (len(generation.step_ns) + 1) * len(generation.sequences)
    return sum(len(sequence.ids) for sequence in generation.sequences)


Formula = Callable[[Sources], Reading]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric's definition. `exact`: repeats bit by bit; `gating`: its gate may block (time metrics: gate.time)."""

    name: str
    unit: str
    direction: Direction
    exact: bool
    gating: bool
    meaning: str
    formula: Formula


_REGISTRY: dict[str, Metric] = {}


def derive(
    counters: Mapping[str, Reading],
    facts: Mapping[str, int | float | str],
    generations: Sequence[Generation],
    decode_skip: int = 1,
) -> dict[str, Reading]:
    """Every metric of one run; `decode_skip` leading tokens are left out of the decode time."""
    return _derived(counters, facts, generations, decode_skip, METRICS.values())


def _derived(
    counters: Mapping[str, Reading],
    facts: Mapping[str, int | float | str],
    generations: Sequence[Generation],
    decode_skip: int,
    metrics: Iterable[Metric],
) -> dict[str, Reading]:
    measured = tuple(generation for generation in generations if not generation.warmup)
    sources = Sources(counters, facts, measured, decode_skip, sum(map(given_tokens, measured)))
    return {metric.name: metric.formula(sources) for metric in metrics}


def same_work(mine: RunRecord, theirs: RunRecord) -> bool:
    """Whether two runs are the same in all that metrics and equations read but for times, as a healthy arm's are."""
    return (
        mine.facts == theirs.facts
        and mine.equations == theirs.equations
        and mine.counters.keys() == theirs.counters.keys()
        and _same_counts(mine.counters, theirs.counters)
        and len(mine.generations) == len(theirs.generations)
        and all(map(_same_generation, mine.generations, theirs.generations))
    )


def _same_generation(mine: Generation, theirs: Generation) -> bool:
    """Whether two generations gave as many ids, and counted the same in each phase."""
    return (
        (mine.warmup, len(mine.further)) == (theirs.warmup, len(theirs.further))
        and given_tokens(mine) == given_tokens(theirs)
        and mine.counters.keys() == theirs.counters.keys()
        and all(_same_counts(counters, theirs.counters[phase]) for phase, counters in mine.counters.items())
    )


def _same_counts(mine: Mapping[str, Reading], theirs: Mapping[str, Reading]) -> bool:
    return mine == theirs or _without_times(mine) == _without_times(theirs)


def _without_times(counters: Mapping[str, Reading]) -> dict[str, Reading]:
    return {name: value for name, value in counters.items() if name not in CLOCKED}


def readings(record: RunRecord, decode_skip: int = 1, like: Mapping[str, Reading] | None = None) -> dict[str, Reading]:
    """All that an expression may name for one run: numeric facts, counters, and metrics derived anew.

    `like`: readings of a run that did the same work (`same_work`), of which only the times are this one's own.
    """
    if like is not None:
        times: dict[str, Reading] = {name: finite(v) for name, v in record.counters.items() if name in CLOCKED}
        return {**like, **times, **_derived(record.counters, record.facts, record.generations, decode_skip, TIMED)}
    facts: dict[str, Reading] = {  # one by a counter's name is none: what looks at counters would not see it
        k: finite(v) for k, v in record.facts.items() if not isinstance(v, str) and k not in COUNTERS
    }
    counters = {name: v if type(v) is int else finite(v) for name, v in record.counters.items()}
    return {**facts, **counters, **derive(record.counters, record.facts, record.generations, decode_skip)}


def expression_names() -> frozenset[str]:
    """Names that a witness or an invariant may use."""
    return frozenset(COUNTERS) | frozenset(METRICS) | frozenset(FACT_NAMES)


def finite(value: Reading) -> Reading:
    """The reading itself, or Missing where a float is NaN or infinite: such a figure is no measurement."""
    if type(value) is int or type(value) is Missing or math.isfinite(value):
        return value
    return Missing(missing=f"not finite: {value}")


def is_finite(value: int | float) -> bool:
    """Whether a figure is a number; an int of any size is (math.isfinite raises beyond a float's range)."""
    return isinstance(value, int) or math.isfinite(value)


def upper_median(values: Sequence[float]) -> float:
    """sorted[n // 2], as the reference harness takes it; needs at least one value."""
    return sorted(values)[len(values) // 2]


# ---- the rows ----------------------------------------------------------------------------------------------------


def _metric(
    name: str, unit: str, direction: Direction, *, exact: bool, gating: bool = False
) -> Callable[[Formula], Formula]:
    def add(formula: Formula) -> Formula:
        assert name not in _REGISTRY, name
        meaning = (formula.__doc__ or "").strip()
        _REGISTRY[name] = Metric(name, unit, direction, exact, gating, meaning, formula)
        return formula

    return add


@_metric("htod_bytes_per_token", "bytes/token", "lower", exact=True)
def _htod_bytes_per_token(run: Sources) -> Reading:
    """Weight bytes copied from host to device for each token given out."""
    return _quotient(run.counter("htod_bytes"), run.tokens, "no token was given out")


@_metric("link_bytes_per_token", "bytes/token", "lower", exact=True)
def _link_bytes_per_token(run: Sources) -> Reading:
    """Weight bytes that came over the link for each token given out: copied, or read in place by a kernel."""
    return _quotient(_link_bytes(run), run.tokens, "no token was given out")


@_metric("page_ins_per_token", "count/token", "neutral", exact=True)
def _page_ins_per_token(run: Sources) -> Reading:
    """Touches filled by a copy, for each token given out."""
    return _quotient(run.counter("page_ins"), run.tokens, "no token was given out")


@_metric("byte_hit_rate", "ratio", "higher", exact=True)
def _byte_hit_rate(run: Sources) -> Reading:
    """Bytes served by resident keys, of all bytes touched."""
    hit = run.counter("hit_bytes")
    return _quotient(hit, _sum(hit, _link_bytes(run)), "no weight was touched")


@_metric("count_hit_rate", "ratio", "higher", exact=True)
def _count_hit_rate(run: Sources) -> Reading:
    """Touches served by resident keys, of all touches; hides what the bytes say when keys differ in size."""
    hits = run.counter("hits")
    others = _in_place(run, "zero_copy_reads", run.counter("page_ins"))
    return _quotient(hits, _sum(hits, others), "no weight was touched")


@_metric("bypassed_byte_share", "ratio", "lower", exact=True)
def _bypassed_byte_share(run: Sources) -> Reading:
    """Bytes copied and not kept, of all bytes copied."""
    return _quotient(run.counter("bypassed_page_in_bytes"), run.counter("htod_bytes"), "nothing was copied")


@_metric("bypassed_count_share", "ratio", "lower", exact=True)
def _bypassed_count_share(run: Sources) -> Reading:
    """Page-ins not kept, of all page-ins."""
    return _quotient(run.counter("bypassed_page_ins"), run.counter("page_ins"), "nothing was copied")


@_metric("floor_bytes_per_token", "bytes/token", "neutral", exact=True)
def _floor_bytes_per_token(run: Sources) -> Reading:
    """Least bytes that any policy must bring over the link for one token: W less the capacity (the whole granules of
    the budget, as measuring began), over the batch."""
    weights = run.fact("weight_bytes")
    capacity = run.fact("measured_capacity_bytes" if "measured_capacity_bytes" in run.facts else "capacity_bytes")
    if type(weights) is Missing or type(capacity) is Missing:
        return run.fact("floor_bytes_per_token")
    sequences = max((len(generation.sequences) for generation in run.measured), default=1)
    return _quotient(max(0, weights - capacity), sequences, "no sequence was run")


@_metric("floor_distance_bytes", "bytes/token", "lower", exact=True)
def _floor_distance_bytes(run: Sources) -> Reading:
    """Bytes over the link for one token above the floor."""
    copied, floor = _link_bytes_per_token(run), _floor_bytes_per_token(run)
    if type(copied) is Missing:
        return copied
    return floor if type(floor) is Missing else copied - floor


@_metric("floor_ratio", "ratio", "lower", exact=True)
def _floor_ratio(run: Sources) -> Reading:
    """Bytes over the link for one token, over the floor."""
    return _quotient(_link_bytes_per_token(run), _floor_bytes_per_token(run), "the floor is zero")


@_metric("modelled_ms_per_token", "ms/token", "lower", exact=True)
def _modelled_ms_per_token(run: Sources) -> Reading:
    """Time on the device profile's modelled clock for each token; never compared with a real card's."""
    nanoseconds = _quotient(run.counter("modelled_ns"), run.tokens, "no token was given out")
    return nanoseconds if type(nanoseconds) is Missing else nanoseconds / 1e6


@_metric("decode_ms_per_token", "ms/token", "lower", exact=False, gating=True)
def _decode_ms_per_token(run: Sources) -> Reading:
    """Wall time of the one-token steps over the tokens that they gave all sequences; upper median over generations."""
    if run.measured and all(map(is_planned, run.measured)):
        return PLANNED
    times = [total_ns / tokens / 1e6 for total_ns, tokens in map(run.decoded, run.measured) if tokens]
    stepped = [g for g in run.measured if max(len(sequence.ids) for sequence in g.sequences) > 1]
    if times and (untimed := sum(not generation.step_ns for generation in stepped)):
        return Missing(missing=f"the steps of {untimed} of {len(run.measured)} generations were not timed")
    return upper_median(times) if times else Missing(missing="no one-token step was timed")


@_metric("tokens_per_s", "tokens/s", "higher", exact=False)
def _tokens_per_s(run: Sources) -> Reading:
    """Reciprocal of the decode time, over all sequences: shown, judged through decode_ms_per_token alone."""
    milliseconds = _decode_ms_per_token(run)
    return milliseconds if type(milliseconds) is Missing else _quotient(1000.0, milliseconds, "no time passed")


@_metric("prefill_ms", "ms", "lower", exact=False, gating=True)
def _prefill_ms(run: Sources) -> Reading:
    """Wall time to the first token, upper median over the measured generations."""
    if run.measured and all(map(is_planned, run.measured)):
        return PLANNED
    times = [generation.prefill_ns / 1e6 for generation in run.measured if generation.prefill_ns > 0]
    if times and (untimed := len(run.measured) - len(times)):
        return Missing(missing=f"the prefill of {untimed} of {len(run.measured)} generations was not timed")
    return upper_median(times) if times else Missing(missing="no prefill was timed")


METRICS: Mapping[str, Metric] = MappingProxyType(_REGISTRY)
"""Every metric by its name."""

TIMED: tuple[Metric, ...] = tuple(metric for metric in METRICS.values() if not metric.exact)
"""Metrics that a clock gives."""

CLOCKED: frozenset[str] = frozenset(
    name
    for name in (*COUNTERS, *METRICS)
    if (COUNTERS[name].scope == "clock" if name in COUNTERS else not METRICS[name].exact)
)
"""Counters and metrics that come from a clock, and so differ from run to run."""


class _Asked(dict[str, Reading]):
    """Counters that are all 1, and which of them were read."""

    def get(self, name: str, default: Any = None) -> Reading:
        return self.setdefault(name, 1)

    def __contains__(self, name: object) -> bool:
        return True


def counters_of(metric: str) -> frozenset[str]:
    """The counters that a metric is made of."""
    asked = _Asked()
    METRICS[metric].formula(Sources(asked, {}, (), decode_skip=1, tokens=0))
    return frozenset(asked)


def _sum(left: Reading, right: Reading) -> Reading:
    if type(left) is Missing:
        return left
    return right if type(right) is Missing else left + right


def _link_bytes(run: Sources) -> Reading:
    return _in_place(run, "zero_copy_bytes", run.counter("htod_bytes"))


def _in_place(run: Sources, name: str, copied: Reading) -> Reading:
    """`copied` and what was read in place; an engine without such a counter reads nothing in place."""
    return _sum(copied, run.counter(name)) if name in run.counters else copied


def _quotient(part: Reading, whole: Reading, when_zero: str) -> Reading:
    """part / whole; whole numbers stay whole, so that bytes per token can be compared to the byte."""
    if type(part) is Missing:
        return part
    if type(whole) is Missing:
        return whole
    if whole == 0:
        return Missing.made(missing=when_zero)
    if isinstance(part, int) and isinstance(whole, int) and part % whole == 0:
        return part // whole
    try:
        return finite(part / whole)
    except OverflowError:
        return Missing(missing="out of range")
