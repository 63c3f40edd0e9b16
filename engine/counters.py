"""The counters of a run: one row each, with unit, kind, scope and direction.

Names and meanings follow the reference dictionary (page-ins, bypasses, captures ...), plus the engine's own. Every
event counter names its byte twin, since a share by count and a share by bytes can tell opposite stories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Unit = Literal["count", "bytes", "ns", "logit"]
Kind = Literal["activity", "gauge", "peak"]
Scope = Literal["plan", "device", "numeric", "clock"]
Direction = Literal["lower", "higher", "neutral"]
Phase = Literal["load", "warm", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("load", "warm", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter's definition.

    `kind` activity counts up within a phase and is reported as a delta; gauge is read at the phase's end; peak is the
    highest value since the process began. `scope` plan must be equal on every device given the same plan and granule;
    device comes from calls the device itself counted; numeric comes from logits; clock from time.
    """

    name: str
    unit: Unit
    kind: Kind
    scope: Scope
    direction: Direction
    meaning: str
    twin: str | None = None


_ROWS: tuple[Counter, ...] = (
    # residency
    Counter(
        "loaded_keys", "count", "activity", "plan", "neutral", "keys brought in at load, where all fit", "loaded_bytes"
    ),
    Counter("loaded_bytes", "bytes", "activity", "plan", "neutral", "bytes of keys brought in at load"),
    Counter("touches", "count", "activity", "plan", "neutral", "one step reading one key"),
    Counter("hits", "count", "activity", "plan", "neutral", "touches served by a resident key", "hit_bytes"),
    Counter("hit_bytes", "bytes", "activity", "plan", "higher", "bytes of keys over hits"),
    Counter("page_ins", "count", "activity", "plan", "neutral", "touches filled by copy", "htod_bytes"),
    Counter(
        "retained_page_ins", "count", "activity", "plan", "neutral", "page-ins that stay resident", "retained_bytes"
    ),
    Counter("retained_bytes", "bytes", "activity", "plan", "neutral", "bytes of retained page-ins"),
    Counter("bypassed_page_ins", "count", "activity", "plan", "neutral", "page-ins not kept", "bypassed_page_in_bytes"),
    Counter("bypassed_page_in_bytes", "bytes", "activity", "plan", "neutral", "bytes of bypassed page-ins"),
    Counter("staged_page_ins", "count", "activity", "plan", "neutral", "page-ins through the ring", "staged_bytes"),
    Counter("staged_bytes", "bytes", "activity", "plan", "neutral", "bytes through the ring"),
    Counter("ring_waits", "count", "activity", "plan", "lower", "copies that waited for a ring slot"),
    Counter("htod_bytes", "bytes", "activity", "plan", "lower", "weight bytes copied from host to device"),
    Counter(
        "zero_copy_reads",
        "count",
        "activity",
        "plan",
        "neutral",
        "touches of a key that was read in place, over the link: neither hits nor page-ins",
        "zero_copy_bytes",
    ),
    Counter("zero_copy_bytes", "bytes", "activity", "plan", "lower", "bytes of those keys, once a touch"),
    Counter("zero_copy_binds", "count", "gauge", "plan", "neutral", "keys whose host memory the device reads in place"),
    Counter("evictions", "count", "activity", "plan", "neutral", "retained keys removed", "evicted_bytes"),
    Counter("evicted_bytes", "bytes", "activity", "plan", "neutral", "bytes of evicted keys"),
    Counter("admission_no_progress", "count", "activity", "plan", "neutral", "evictions that freed no granule"),
    Counter("gather_bytes", "bytes", "activity", "plan", "neutral", "embedding rows read in place"),
    Counter(
        "routed_experts",
        "count",
        "activity",
        "plan",
        "neutral",
        "experts that passes asked for, of each bank each once a pass",
        "routed_bytes",
    ),
    Counter("routed_bytes", "bytes", "activity", "plan", "lower", "bytes of those experts: what their banks need read"),
    Counter(
        "expert_touches",
        "count",
        "activity",
        "plan",
        "neutral",
        "touches of experts that are keys of their own",
        "expert_touch_bytes",
    ),
    Counter("expert_touch_bytes", "bytes", "activity", "plan", "neutral", "bytes of those experts"),
    Counter(
        "expert_rereads",
        "count",
        "activity",
        "plan",
        "lower",
        "such touches for which a pass had touched the expert before, since its tokens' experts did not fit at once",
        "expert_reread_bytes",
    ),
    Counter("expert_reread_bytes", "bytes", "activity", "plan", "lower", "bytes of those experts"),
    Counter("forward_steps", "count", "activity", "plan", "neutral", "forward passes, prefill included"),
    Counter("resident_keys", "count", "gauge", "plan", "neutral", "keys resident now", "content_resident_bytes"),
    Counter("content_resident_bytes", "bytes", "gauge", "plan", "neutral", "logical bytes resident now"),
    Counter("peak_resident_bytes", "bytes", "peak", "plan", "lower", "highest logical bytes resident"),
    Counter("mapped_physical_bytes", "bytes", "gauge", "plan", "neutral", "granules mapped for weights, in bytes"),
    Counter("physical_owned_bytes", "bytes", "gauge", "plan", "neutral", "physical memory held by the granule pool"),
    Counter("peak_committed_bytes", "bytes", "peak", "plan", "lower", "highest granule bytes mapped, all owners"),
    Counter("weight_capacity_bytes", "bytes", "gauge", "plan", "neutral", "granule bytes that weights may map now"),
    Counter("kv_committed_bytes", "bytes", "gauge", "plan", "neutral", "granule bytes mapped for the KV cache"),
    Counter("peak_kv_committed_bytes", "bytes", "peak", "plan", "lower", "highest of it, both copies during a growth"),
    Counter(
        "kv_growths", "count", "activity", "plan", "neutral", "larger buckets of a sequence", "kv_growth_dtod_bytes"
    ),
    Counter("kv_growth_dtod_bytes", "bytes", "activity", "plan", "lower", "cached bytes copied because heads moved"),
    Counter(
        "growth_grants", "count", "activity", "plan", "neutral", "KV growths that weights gave way to", "granted_bytes"
    ),
    Counter("granted_bytes", "bytes", "activity", "plan", "neutral", "capacity that weights gave to the KV cache"),
    Counter("grant_refusals", "count", "activity", "plan", "lower", "growths that found no room, nothing changed"),
    Counter("grant_rollbacks", "count", "activity", "plan", "lower", "grants undone since the growth failed"),
    Counter(
        "prefix_hit_tokens", "count", "activity", "plan", "higher", "prompt tokens found cached", "prefix_hit_bytes"
    ),
    Counter("prefix_hit_bytes", "bytes", "activity", "plan", "higher", "bytes of those cached positions"),
    # ledger faults, each must be 0
    Counter("ref_underflows", "count", "activity", "plan", "lower", "granule refunds below zero"),
    Counter("unaccounted_bytes", "bytes", "gauge", "plan", "lower", "mapped granules without an owner"),
    Counter("quarantined_bytes", "bytes", "gauge", "plan", "lower", "granules in unknown state after a failed call"),
    Counter("oversubscribed_bytes", "bytes", "peak", "plan", "lower", "mapped above the limit"),
    # capture
    Counter("segments", "count", "gauge", "plan", "lower", "captured segments of the decode step"),
    Counter("seams", "count", "gauge", "plan", "lower", "eager runs between captured segments"),
    Counter("seam_nodes", "count", "gauge", "plan", "lower", "plan steps inside seams"),
    Counter("warm_steps", "count", "activity", "plan", "neutral", "one-token steps run eagerly before recording"),
    Counter("captures", "count", "activity", "plan", "neutral", "one-token steps that recorded a graph"),
    Counter("replays", "count", "activity", "plan", "neutral", "one-token steps that replayed one"),
    Counter("fallbacks", "count", "activity", "plan", "lower", "one-token steps that wanted a graph and ran eagerly"),
    Counter("invalidations", "count", "activity", "plan", "neutral", "graphs thrown away"),
    Counter("kv_move_invalidations", "count", "activity", "plan", "neutral", "of these, as the KV cache moved"),
    Counter("grant_invalidations", "count", "activity", "plan", "neutral", "of these, as weights gave way"),
    Counter("grant_keeps", "count", "activity", "plan", "neutral", "grants that a graph outlived"),
    Counter("growth_keeps", "count", "activity", "plan", "neutral", "KV growths that a graph outlived"),
    Counter("decode_steps", "count", "activity", "plan", "neutral", "one-token forward passes"),
    Counter(
        "discarded_steps",
        "count",
        "activity",
        "plan",
        "neutral",
        "of these, thrown away: asked for before the token in front was read, which turned out to be an end id",
    ),
    Counter("graph_nodes", "count", "gauge", "device", "neutral", "nodes of the live graphs"),
    Counter("kernel_runs", "count", "activity", "device", "neutral", "kernels run, in a graph or outside"),
    Counter(
        "launch_bytes", "bytes", "gauge", "plan", "lower", "weights or cached positions that one kernel alone reads"
    ),
    Counter("launch_flops", "count", "gauge", "plan", "lower", "multiplications and additions of one kernel alone"),
    Counter("step_kernels", "count", "gauge", "device", "lower", "kernels run by the last one-token step"),
    Counter("eager_launches", "count", "activity", "device", "lower", "kernels launched outside a graph"),
    # device verbs
    Counter(
        "device_htod_bytes", "bytes", "activity", "device", "lower", "weight bytes the device's own copy verb moved"
    ),
    Counter(
        "device_zero_copy_bytes",
        "bytes",
        "activity",
        "device",
        "lower",
        "weight bytes that the device's own launches read over the link",
    ),
    Counter(
        "device_dtod_bytes", "bytes", "activity", "device", "lower", "bytes the device's own inner copy verb moved"
    ),
    Counter("vmm_calls", "count", "activity", "device", "lower", "create, map, set-access, unmap and release calls"),
    Counter("vmm_calls_steady", "count", "activity", "device", "lower", "such calls from the third one-token step on"),
    Counter("alloc_calls", "count", "activity", "device", "lower", "device allocations outside the granule pool"),
    Counter(
        "alloc_calls_steady",
        "count",
        "activity",
        "device",
        "lower",
        "such allocations from the third one-token step on",
    ),
    Counter("host_syncs", "count", "activity", "device", "lower", "host waits for the device"),
    Counter("pool_creates", "count", "activity", "device", "neutral", "physical granules created"),
    Counter("pool_hits", "count", "activity", "device", "neutral", "granules served from the pool"),
    # numbers and tokens
    Counter("min_logit_margin", "logit", "gauge", "numeric", "neutral", "smallest gap between the two best logits"),
    Counter("emitted_tokens", "count", "activity", "plan", "neutral", "tokens given out"),
    # time
    Counter("prefill_ns", "ns", "activity", "clock", "lower", "wall time to the first token"),
    Counter("decode_ns", "ns", "activity", "clock", "lower", "wall time of the one-token steps"),
    Counter("modelled_ns", "ns", "activity", "plan", "lower", "time on the device profile's modelled clock"),
)

COUNTERS: Mapping[str, Counter] = {row.name: row for row in _ROWS}
"""Every counter by its name on the wire."""


class Tally:
    """Values of one engine instance's counters; never shared, never global.

    `add` for activity, `set` for gauges, `high` for peaks. Unknown names raise KeyError: a typo must not become a
    series of its own.
    """

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._gauges: dict[str, int | float] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Raise an activity counter by `amount` (>= 0)."""
        assert COUNTERS[name].kind == "activity" and amount >= 0, (name, amount)
        self._values[name] = self._values.get(name, 0) + amount

    def set(self, name: str, value: int | float) -> None:
        """Set a gauge."""
        assert COUNTERS[name].kind == "gauge", name
        self._gauges[name] = value

    def high(self, name: str, value: int) -> None:
        """Raise a peak to `value` if higher."""
        assert COUNTERS[name].kind == "peak", name
        self._gauges[name] = max(value, self._gauges.get(name, 0))

    def read(self) -> dict[str, int | float]:
        """All counters touched so far, activity totals and current gauges."""
        return {**self._values, **self._gauges}

    def since(self, before: Mapping[str, int | float]) -> dict[str, int | float]:
        """Activity as the difference to an earlier `read`; gauges and peaks as they stand."""
        deltas = {name: value - int(before.get(name, 0)) for name, value in self._values.items()}
        assert all(v >= 0 for v in deltas.values()), deltas
        return {**deltas, **self._gauges}
