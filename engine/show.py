"""A run for a person at a terminal: the lines that a profiling binary would print, with floors and sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.attribution import CAUSES

_CROSSINGS = ("retained", "bypassed", "staged", "in_place")
"""Ways of a key over the link."""
_SHOWN_KEYS = 10
_TOKEN_PHASES = (("prefill",), ("warm", "decode"))


def show(lines: list[dict[str, Any]], text_of: Callable[[list[int]], str | None]) -> str:
    """The lines of a finished run as text; counters absent from the run print as n/a, never as 0."""
    by_type: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_type.setdefault(line["type"], []).append(line)
    parts: list[str] = []
    for hello in by_type.get("hello", ()):
        parts += _hello(hello)
    for generation in by_type.get("generation", ()):
        parts += _generation(generation, text_of)
    parts += [f"grant: {_pick(g, *(name for name in g if name != 'type'))}" for g in by_type.get("grant", ())]
    for result in by_type.get("result", ()):
        parts += _result(result)
    return "\n".join(parts)


def _hello(hello: dict[str, Any]) -> list[str]:
    device = hello["device"]
    rows = [f"device: {device['name']} {_pick(device, 'uuid', 'driver', 'granule_bytes', 'profile')}"]
    for name, entry in hello["effective_config"].items():
        reason = f" reason: {entry['reason']}" if "reason" in entry else ""
        rows.append(f"config: {name}={entry['value']} source={entry['source']}{reason}")
    for decision in hello.get("decisions", ()):
        told = f"{decision['name']}={decision['value']} source={decision['source']}"
        rows.append(f"memory_strategy: {told} reason: {decision['reason']}")
    return rows


def _generation(g: dict[str, Any], text_of: Callable[[list[int]], str | None]) -> list[str]:
    """A line for the generation, one for each sequence of a batch, and what each gave."""
    kind = "warmup" if g["warmup"] else "generation"
    plan_only = g["stop_reason"] is None
    steps, total_ns = len(g["step_ns"]), sum(g["step_ns"])
    first, decoded = (sum(g["counters"][p].get("emitted_tokens", 0) for p in ps) for ps in _TOKEN_PHASES)
    rate = f"{decoded / total_ns * 1e9:.2f}" if total_ns else "n/a"
    each = f"{total_ns / (decoded or steps) / 1e6:.3f}" if steps else "n/a"
    head = (
        f"{kind} {g['index'] + 1}: prefill_ms={g['prefill_ns'] / 1e6:.3f} decode_ms_per_token={each} "
        f"tokens_per_s={rate} tokens={first + decoded}"
    )
    streams = [g, *g.get("further", ())]
    if len(streams) == 1:
        head += f" {_end(g)}"
    if plan_only:
        return [head, "plan only: nothing was computed, so there are no ids, and times are the planner's own"]
    rows = [head]
    for number, stream in enumerate(streams, start=1):
        if len(streams) > 1:
            rows.append(f"sequence {number} of {len(streams)}: tokens={len(stream['ids'])} {_end(stream)}")
        rows.append(f"generated_token_ids: {' '.join(map(str, stream['ids']))}")
        text = text_of(stream["ids"])
        rows += [] if text is None else [f"generated_text: {text!r}"]
    return rows


def _end(stream: dict[str, Any]) -> str:
    """Why a sequence stopped, and its smallest gap; neither is there without arithmetic."""
    gap = f"{min(stream['gaps']):.4f}" if stream["gaps"] else "n/a"
    return f"stop={stream['stop_reason'] or 'n/a'} min_gap={gap}"


def _result(result: dict[str, Any]) -> list[str]:
    c, f = result["counters"], result["facts"]
    tokens = f["measured_tokens"]
    hits, misses = c.get("hits"), c.get("page_ins")
    link_bytes = c["htod_bytes"] + c["zero_copy_bytes"]
    per_token = link_bytes / tokens
    floor = f["floor_bytes_per_token"]
    rows = [
        f"bound by: {f['bound_by']}",
        f"weights: {_pick(f, 'weight_bytes', 'keys', 'largest_key', 'largest_key_bytes', 'budget_bytes')} "
        f"{_pick(f, 'capacity_bytes', 'capacity_left_bytes')}",
        f"weight_offload_cache: {_pick(c, 'page_ins', 'hits', 'evictions', 'bypassed_page_ins')} "
        f"hit_rate={_share(hits, hits + misses + c['zero_copy_reads'])} "
        f"byte_hit_rate={_share(c['hit_bytes'], c['hit_bytes'] + link_bytes)} "
        f"bypassed_share_by_count={_share(c['bypassed_page_ins'], misses)} "
        f"bypassed_share_by_bytes={_share(c['bypassed_page_in_bytes'], c['htod_bytes'])}",
        f"weight_offload_amortization: emitted_tokens={tokens} htod_bytes_per_token={c['htod_bytes'] / tokens:.1f} "
        f"zero_copy_bytes_per_token={c['zero_copy_bytes'] / tokens:.1f} link_bytes_per_token={per_token:.1f} "
        f"floor_bytes_per_token={floor} over_floor_bytes={per_token - floor:.1f} "
        f"ratio_to_floor={f'{per_token / floor:.3f}' if floor else 'n/a'}",
        f"floors_per_token: link_ms={floor / f['link_bytes_per_s'] * 1e3:.3f} "
        f"memory_ms={f['requested_bytes_per_step'] / f['batch'] / f['memory_bytes_per_s'] * 1e3:.3f} "
        f"modelled_ms={c['modelled_ns'] / tokens / 1e6:.3f} (device profile, not wall time)",
        f"weight_offload_physical: {_pick(c, 'mapped_physical_bytes', 'physical_owned_bytes', 'peak_committed_bytes')} "
        f"{_pick(c, 'oversubscribed_bytes', 'ref_underflows')}",
        f"cuda_graph: {_pick(c, 'segments', 'seams', 'seam_nodes', 'warm_steps', 'captures', 'replays', 'fallbacks')} "
        f"{_pick(c, 'invalidations', 'growth_keeps')}"
        + (f" declined: {f['capture_declined']}" if "capture_declined" in f else ""),
        f"growth: {_pick(c, 'growth_grants', 'granted_bytes', 'grant_refusals', 'grant_rollbacks')} "
        f"{_pick(c, 'kv_move_invalidations', 'grant_invalidations', 'grant_keeps')}",
        f"steady: {_pick(c, 'vmm_calls_steady', 'alloc_calls_steady', 'host_syncs', 'step_kernels', 'graph_nodes')}",
        f"kv: {_pick(f, 'kv_layout', 'kv_bytes_per_token', 'kv_capacity')} "
        f"{_pick(c, 'kv_committed_bytes', 'peak_kv_committed_bytes', 'kv_growths', 'kv_growth_dtod_bytes')} "
        f"{_pick(c, 'prefix_hit_tokens', 'prefix_hit_bytes')}",
        f"peak_rss_bytes: {result['peak_rss_bytes']}",
    ]
    rows += _over_floor(c, f)
    rows += _keys(result["keys"])
    if "ring_slots" in f:
        rows.append(_staging(c, f))
    if "zero_copy_bytes_per_step" in f:
        of_pass = _pick(f, "resident_set_bytes", "zero_copy_bytes_per_step")
        rows.append(f"zero_copy: {of_pass} {_pick(c, 'zero_copy_binds', 'zero_copy_reads', 'zero_copy_bytes')}")
    if f.get("bank_bytes_per_step"):
        per_step = _pick(f, "routed_bytes_per_token", "bank_bytes_per_step")
        rows.append(f"experts: {_pick(c, 'routed_experts', 'routed_bytes')} {per_step}")
        rows.append(_banks(c, f, result))
    rows += [
        f"equation {e['name']}: {e['text']}: {e['lhs']} {e['relation']} {e['rhs']} "
        f"{'holds' if e['holds'] else 'BROKEN'}"
        for e in result["equations"]
    ]
    return rows


def _over_floor(c: Mapping[str, Any], f: Mapping[str, Any]) -> list[str]:
    """The distance to the floor by cause, over all generations; the causes add up to it."""
    if f.get("resident") != 0:
        return []
    rows = [f"over_floor: {sum(f[name] for name in CAUSES)} bytes above floor_bytes={f['floor_bytes']}, of which:"]
    return rows + [f"  {name}={f[name]} ({words})" for name, words in CAUSES.items() if f[name]]


def _keys(keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of the most bytes over the link: each key's share of the bytes beside its share of the events."""
    crossings = [sum(k[n] for n in _CROSSINGS) for k in keys]
    nbytes = [times * k["nbytes"] for times, k in zip(crossings, keys, strict=True)]
    largest = sorted(zip(nbytes, crossings, keys, strict=True), key=lambda row: (-row[0], row[2]["key"]))
    return [
        f"key {k['key']}: nbytes={k['nbytes']} {_pick(k, 'hits', *_CROSSINGS, 'evicted')} streamed_bytes={streamed} "
        f"share_by_bytes={_share(streamed, sum(nbytes))} share_by_count={_share(times, sum(crossings))}"
        for streamed, times, k in largest[:_SHOWN_KEYS]
        if times
    ]


def _banks(c: Mapping[str, Any], f: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """How many banks are read expert by expert, what that came to, and why others are not."""
    kinds = _pick(f, "banks_split", "banks_whole")
    read = _pick(c, "expert_touches", "expert_touch_bytes", "expert_rereads", "expert_reread_bytes")
    reasons = dict.fromkeys(row["whole"] for row in result.get("experts", ()) if row["whole"])
    return f"expert_paging: {kinds} {read}" + "".join(f"; whole: {reason}" for reason in reasons)


def _staging(c: Mapping[str, Any], f: Mapping[str, Any]) -> str:
    """How the capacity was divided: the resident set, the ring, and what neither could use; their sum is all of it."""
    lost = f["capacity_left_bytes"] - f["resident_set_bytes"] - f["ring_bytes"] - f["unfilled_bytes"]
    return (
        f"staging: {_pick(f, 'resident_set_bytes', 'ring_slots', 'slot_bytes', 'ring_bytes', 'piece_bytes')} "
        f"{_pick(f, 'unfilled_bytes')} alignment_bytes={lost if f['ring_slots'] else 'n/a'} "
        f"{_pick(f, 'staged_bytes_per_step', 'ring_waits_per_step')} "
        f"{_pick(c, 'staged_page_ins', 'staged_bytes', 'ring_waits')}"
    )


def _pick(counters: Mapping[str, Any], *names: str) -> str:
    return " ".join(f"{name}={counters.get(name, 'n/a')}" for name in names)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "n/a"
