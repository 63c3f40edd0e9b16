"""What a record claims, against what the card, its link and the clock of whoever watched could have carried.

The engine reports bytes, times and what its ledger holds; the certificate comes from the worker. Each check compares
the two one way only, so that it finds what cannot be and never what is merely slow: a bound is the most that the
hardware allows, and what is not known accuses nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.counters import COUNTERS
from jobs.metrics import is_finite
from jobs.model import Certificate, Reading, RunRecord

LANE_BYTES_PER_S: Mapping[int, float] = {
    1: 2.5e9 / 8 * 8 / 10,
    2: 5e9 / 8 * 8 / 10,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
"""Bytes per second and lane after line coding, by PCIe generation: above it no payload can be, whatever the packets."""

SEEN_S = 1.0
"""A stretch as long as this holds samples of the watch, five a second; a shorter one may lie between two of them."""

CLOCK_SLACK_S = 0.002
"""The watch's time is rounded to a millisecond."""

CARRYING = frozenset(
    ("hits", "page_ins", "retained_page_ins", "bypassed_page_ins", "staged_page_ins", "zero_copy_reads", "evictions")
)
"""Counters of events that each move or serve a key, which has a byte at least."""

TWINS = tuple((name, counter.twin) for name, counter in COUNTERS.items() if counter.twin)
"""Counters of events, each with that of their bytes."""

PEAKS = (
    ("content_resident_bytes", "peak_resident_bytes"),
    ("mapped_physical_bytes", "peak_committed_bytes"),
    ("kv_committed_bytes", "peak_kv_committed_bytes"),
)
"""Gauges, each with the peak of the same bytes."""

_COHERENT = re.compile(r"\bG[HB]\d")
"""Cards whose host memory lies behind NVLink-C2C, such as GH200 and GB10: PCIe says nothing about their copies."""

assert {"htod_bytes", "physical_owned_bytes", "modelled_ns", "page_ins"} <= set(COUNTERS)


def impossible(record: RunRecord, of_counters: Sequence[str] | None = None) -> list[str]:
    """Claims of a record that cannot be, each with the claim and the bound that it breaks; empty for one that can.

    `of_counters`: what is known of its counters already (`counted`), from a run that did the same work.
    """
    found = [_modelled(record), *(counted(record) if of_counters is None else of_counters)]
    if record.certificate is not None:
        found += [_clock(record, record.certificate), *_on_card(record, record.certificate)]
    return [fault for fault in found if fault]


def counted(record: RunRecord) -> list[str]:
    """Those claims that lie in counters and in how many ids there are, none of which is a time."""
    return [fault for fault in (*_twins(record), *_peaks(record), *_nothing(record), _captured(record)) if fault]


def _clock(record: RunRecord, certificate: Certificate) -> str:
    """More time in generations than the whole process had, by the worker's own clock."""
    host = certificate.after.get("host")
    wall_s = _number(host.get("wall_s")) if isinstance(host, dict) else None
    timed_s = _timed_ns(record, warmups=True) / 1e9
    if wall_s is None or timed_s <= wall_s + CLOCK_SLACK_S:
        return ""
    return f"its generations took {timed_s:.3f} s, and the whole process {wall_s:.3f} s by the worker's clock"


def _modelled(record: RunRecord) -> str:
    """More bytes than the modelled link carries in the modelled time; each copy's time is rounded to a nanosecond."""
    copied, model_ns = _counter(record, "htod_bytes"), _counter(record, "modelled_ns")
    rate = _number(record.facts.get("link_bytes_per_s"))
    if copied is None or model_ns is None or not rate:
        return ""
    room = (model_ns + (_counter(record, "page_ins") or 0)) * rate / 1e9
    if copied <= room:
        return ""
    return (
        f"{_bytes(copied)} over the modelled link in {model_ns / 1e9:.6f} s of its clock, "
        f"and at {_rate(rate)} it carries {_bytes(room)} in that time"
    )


def _twins(record: RunRecord) -> Iterator[str]:
    """Bytes without the events that carry them, or fewer bytes than events each of which carries some."""
    for name, twin in TWINS:
        events, nbytes = _counter(record, name), _counter(record, twin)
        if events is None or nbytes is None:
            continue
        if nbytes > 0 and events == 0:
            yield f"{twin} is {nbytes:,.0f} and {name} is 0"
        elif 0 <= nbytes < events and name in CARRYING:
            yield f"{twin} is {nbytes:,.0f} and {name} is {events:,.0f}: each carries a byte at least"


def _peaks(record: RunRecord) -> Iterator[str]:
    """A highest value below the one that stands at the end."""
    for name, peak in PEAKS:
        last, highest = _counter(record, name), _counter(record, peak)
        if last is not None and highest is not None and highest < last:
            yield f"{peak} is {highest:,.0f} and {name} is {last:,.0f} at the end"


def _nothing(record: RunRecord) -> Iterator[str]:
    """A gating figure of 0, the best that there is, where something was done that cannot be done with none."""
    if _counter(record, "peak_committed_bytes") == 0:
        held = ((name, _counter(record, name) or 0) for name in ("peak_resident_bytes", "peak_kv_committed_bytes"))
        yield from (f"peak_committed_bytes is 0 and {name} is {nbytes:,.0f}" for name, nbytes in held if nbytes > 0)
    longest = max((len(s.ids) for g in record.generations for s in g.sequences), default=0)
    if _counter(record, "step_kernels") == 0 and longest > 1:
        yield f"step_kernels is 0, and steps of one token gave {longest - 1} ids"


def _captured(record: RunRecord) -> str:
    """Graphs that were recorded or run, and nothing that could be in them."""
    captures, replays = _counter(record, "captures") or 0, _counter(record, "replays") or 0
    if captures + replays <= 0:
        return ""
    shown = f"captures are {captures:,.0f} and replays {replays:,.0f}"
    if _counter(record, "segments") == 0:
        return f"{shown}, and the step has no captured segment"
    if _counter(record, "graph_nodes") == 0 == _counter(record, "invalidations"):
        return f"{shown}, no graph was thrown away, and none has a node"
    steps = _counter(record, "decode_steps")
    if steps is not None and captures + replays > steps:
        return f"{shown}, of {steps:,.0f} one-token steps"
    runs, eager = _counter(record, "kernel_runs"), _counter(record, "eager_launches")
    if replays > 0 and runs is not None and runs == eager:
        return f"{shown}, and all {runs:,.0f} kernels ran outside a graph"
    return ""


def _on_card(record: RunRecord, certificate: Certificate) -> Iterator[str]:
    """A simulated card has no link and no memory of its own that somebody else could have looked at."""
    if certificate.grade == "scripted" or record.device.get("kind") != "cuda":
        return
    yield _link(record, certificate)
    yield _memory(record, certificate)


def _link(record: RunRecord, certificate: Certificate) -> str:
    """More bytes in the generations' time than the card's PCIe link carries at most."""
    copied, timed_s = _counter(record, "htod_bytes"), _timed_ns(record, warmups=False) / 1e9
    link = _widest(certificate, seen=timed_s >= SEEN_S)
    if copied is None or link is None or timed_s <= 0 or _COHERENT.search(certificate.card):
        return ""
    generation, width = link
    rate = LANE_BYTES_PER_S[generation] * width
    if copied <= rate * timed_s:
        return ""
    return (
        f"{_bytes(copied)} copied to the card in {timed_s:.6f} s, which is {_rate(copied / timed_s)}, "
        f"over PCIe {generation} x{width}, which carries {_rate(rate)} at most"
    )


def _widest(certificate: Certificate, *, seen: bool) -> tuple[int, int] | None:
    """Generation and width of the link: the best that was seen, for stretches that were; else the card's own best."""
    found = []
    for field in ("pcie_generation", "pcie_width"):
        known = _most(certificate, field) if seen else None
        if known is None:
            known = _number(certificate.before.get(f"max_{field}"))
        found.append(known)
    generation, width = found
    if generation is None or width is None or int(generation) not in LANE_BYTES_PER_S or width < 1:
        return None
    return int(generation), int(width)


def _memory(record: RunRecord, certificate: Certificate) -> str:
    """Less memory in use on the card, at its most, than the engine's pool held all along between two generations."""
    held = [_held(generation.counters) for generation in record.generations]
    later = record.generations[1:]
    between_s = sum(generation.prefill_ns + sum(generation.step_ns) for generation in later) / 1e9
    used = _most(certificate, "used_bytes")
    known = [nbytes for nbytes in held if nbytes is not None]
    if used is None or between_s < SEEN_S or len(known) < len(held):
        return ""
    least = min(known)
    if used >= least:
        return ""
    shown = f"the card showed {_bytes(used)} in use at most"
    return f"its pool held {_bytes(least)} or more for {between_s:.1f} s, and {shown}"


def _held(phases: Mapping[str, Mapping[str, Reading]]) -> float | None:
    """Physical bytes of the pool at a generation's end."""
    for phase in ("decode", "warm", "prefill"):
        if (nbytes := _number(phases.get(phase, {}).get("physical_owned_bytes"))) is not None:
            return nbytes
    return None


def _most(certificate: Certificate, field: str) -> float | None:
    """The highest value that a watch saw."""
    spread = certificate.during.get(field)
    return _number(spread.get("max")) if isinstance(spread, dict) else None


def _timed_ns(record: RunRecord, *, warmups: bool) -> int:
    timed = [generation for generation in record.generations if warmups or not generation.warmup]
    return sum(generation.prefill_ns + sum(generation.step_ns) for generation in timed)


def _counter(record: RunRecord, name: str) -> float | None:
    return _number(record.counters.get(name))


def _number(value: Any) -> float | None:
    """A figure that can be computed with; None for what is absent, a word or not finite."""
    if type(value) is int:  # as nearly all are
        return value
    return value if isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value) else None


def _bytes(value: float) -> str:
    return f"{value:,.0f} bytes"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
