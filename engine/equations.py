"""The equations that one run's counters must satisfy; named as in the reference digest, section 1.5, appendix A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.attribution import CAUSES

Relation = Literal["==", "<=", ">="]


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation as evaluated: lhs `relation` rhs."""

    name: str
    text: str
    relation: Relation
    lhs: int
    rhs: int

    @property
    def holds(self) -> bool:
        """Whether it is true."""
        match self.relation:
            case "==":
                return self.lhs == self.rhs
            case "<=":
                return self.lhs <= self.rhs
            case ">=":
                return self.lhs >= self.rhs


@dataclass(frozen=True, slots=True)
class ExpertSums:
    """Touches of experts by key, and how many of them passes asked for by what they wrote; each with its bytes."""

    touches: int
    touch_bytes: int
    asked: int
    asked_bytes: int


@dataclass(frozen=True, slots=True)
class Sums:
    """Per-key sums, taken from the traffic table and not from the counters that they are held against."""

    hits: int
    retained: int
    bypassed: int
    bypassed_bytes: int
    evicted: int
    staged: int = 0
    staged_bytes: int = 0
    in_place: int = 0
    in_place_bytes: int = 0
    gathered_bytes: int = 0
    routed_bytes: int | None = None
    """By bank of experts; None where there is none, or nobody knows what was asked for."""
    experts: ExpertSums | None = None
    """Of experts that are keys of their own; None where none are."""


def evaluate(
    counters: Mapping[str, int | float], facts: Mapping[str, int | float | str], sums: Sums, capture: bool
) -> tuple[Equation, ...]:
    """All equations over a process's whole life, warm-ups included."""

    def c(name: str) -> int:
        return int(counters.get(name, 0))

    def f(name: str) -> int:
        return int(facts[name])

    rows = [
        Equation(
            "W1",
            "hits + page_ins + reads in place == touches",
            "==",
            c("hits") + c("page_ins") + c("zero_copy_reads"),
            c("touches"),
        ),
        Equation(
            "W1p",
            "touches == touches_per_step * forward_steps + expert touches",
            "==",
            c("touches"),
            f("touches_per_step") * c("forward_steps") + c("expert_touches"),
        ),
        Equation(
            "W2",
            "page_ins == retained + bypassed + staged",
            "==",
            c("page_ins"),
            c("retained_page_ins") + c("bypassed_page_ins") + c("staged_page_ins"),
        ),
        Equation("W2h", "hits == sum over keys", "==", c("hits"), sums.hits),
        Equation("W2r", "retained == sum over keys", "==", c("retained_page_ins"), sums.retained),
        Equation("W2b", "bypassed == sum over keys", "==", c("bypassed_page_ins"), sums.bypassed),
        Equation("W2s", "staged == sum over keys", "==", c("staged_page_ins"), sums.staged),
        Equation("W2z", "reads in place == sum over keys", "==", c("zero_copy_reads"), sums.in_place),
        Equation("W2e", "evictions == sum over keys", "==", c("evictions"), sums.evicted),
        Equation(
            "W3",
            "loaded + retained - evictions == resident keys",
            "==",
            c("loaded_keys") + c("retained_page_ins") - c("evictions"),
            c("resident_keys"),
        ),
        Equation(
            "W4",
            "hit_bytes + htod_bytes + bytes read in place == requested bytes",
            "==",
            c("hit_bytes") + c("htod_bytes") + c("zero_copy_bytes"),
            f("requested_bytes_per_step") * c("forward_steps") + c("expert_touch_bytes"),
        ),
        Equation(
            "W6",
            "htod_bytes == retained + bypassed + staged bytes",
            "==",
            c("htod_bytes"),
            c("retained_bytes") + c("bypassed_page_in_bytes") + c("staged_bytes"),
        ),
        Equation("W7", "bypassed bytes == sum over keys", "==", c("bypassed_page_in_bytes"), sums.bypassed_bytes),
        Equation("W7s", "staged bytes == sum over keys", "==", c("staged_bytes"), sums.staged_bytes),
        Equation("W7z", "bytes read in place == sum over keys", "==", c("zero_copy_bytes"), sums.in_place_bytes),
        Equation(
            "W10",
            "device's own copied bytes == loaded_bytes + htod_bytes",
            "==",
            c("device_htod_bytes"),
            c("loaded_bytes") + c("htod_bytes"),
        ),
        Equation(
            "W10z",
            "device's own bytes read over the link == bytes read in place",
            "==",
            c("device_zero_copy_bytes"),
            c("zero_copy_bytes"),
        ),
        Equation(
            "W9",
            "bytes over the link - floor * tokens == sum of causes",
            "==",
            c("htod_bytes") + c("zero_copy_bytes") - f("floor_bytes"),
            sum(f(name) for name in CAUSES),
        ),
        Equation("W11", "weights mapped at peak <= capacity", "<=", f("peak_weight_mapped_bytes"), f("capacity_bytes")),
        Equation(
            "G1",
            "capacity at first == capacity left + granted",
            "==",
            f("capacity_bytes"),
            f("capacity_left_bytes") + c("granted_bytes"),
        ),
        Equation("W12", "ledger faults == 0", "==", sum(c(n) for n in _FAULTS), 0),
        Equation("A8", "content resident <= mapped", "<=", c("content_resident_bytes"), c("mapped_physical_bytes")),
        Equation(
            "A8o",
            "mapped + free == owned",
            "==",
            c("mapped_physical_bytes") + c("kv_committed_bytes") + f("pool_free_bytes"),
            c("physical_owned_bytes"),
        ),
        Equation(
            "A18", "KV committed >= bytes per token * longest", ">=", c("kv_committed_bytes"), f("kv_needed_bytes")
        ),
        Equation(
            "K1",
            "KV committed == granules that its layout touches",
            "==",
            c("kv_committed_bytes"),
            f("kv_foreseen_bytes"),
        ),
        Equation(
            "K2",
            "KV committed at peak == foreseen, growth copies included",
            "==",
            c("peak_kv_committed_bytes"),
            f("kv_foreseen_peak_bytes"),
        ),
        Equation("K3", "KV growths == buckets passed", "==", c("kv_growths"), f("kv_foreseen_growths")),
        Equation(
            "K4",
            "growth copies == bytes per token * positions that moved",
            "==",
            c("kv_growth_dtod_bytes"),
            f("kv_bytes_per_token") * f("kv_copied_positions"),
        ),
        Equation(
            "K5",
            "device's own inner copies == growth copies",
            "==",
            c("device_dtod_bytes"),
            c("kv_growth_dtod_bytes"),
        ),
        Equation(
            "P1",
            "embedding rows read + prefix hits == positions asked for, those of thrown-away steps too, in bytes",
            "==",
            c("gather_bytes") + c("prefix_hit_tokens") * f("gather_bytes_per_token"),
            (f("positions_asked") + c("discarded_steps") * f("batch")) * f("gather_bytes_per_token"),
        ),
        Equation("P1t", "embedding rows read == sum over tables", "==", c("gather_bytes"), sums.gathered_bytes),
        Equation(
            "P2",
            "prefix hit bytes == bytes per token * prefix hits",
            "==",
            c("prefix_hit_bytes"),
            f("kv_bytes_per_token") * c("prefix_hit_tokens"),
        ),
        Equation(
            "D1",
            "one-token steps behind prompts == given out + thrown away",
            "==",
            f("steps_asked"),
            f("steps_given") + c("discarded_steps"),
        ),
        Equation("L0", "granules mapped after close == 0", "==", f("mapped_after_close_bytes"), 0),
        Equation("L1", "granules owned after close == 0", "==", f("owned_after_close_bytes"), 0),
    ]
    if sums.routed_bytes is not None:
        asked, least = c("routed_bytes"), f("routed_bytes_per_token") * c("forward_steps")
        rows.append(Equation("M1", "routed bytes == sum over banks", "==", asked, sums.routed_bytes))
        rows.append(Equation("M2", "routed bytes >= one token's in each pass", ">=", asked, least))
        most = f("bank_bytes_per_step") * c("forward_steps")
        rows.append(Equation("M3", "routed bytes <= the banks in each pass", "<=", asked, most))
    if sums.experts is not None:
        by_key, again = sums.experts, (c("expert_rereads"), c("expert_reread_bytes"))
        rows += [
            Equation("E1", "expert touches == sum over experts", "==", c("expert_touches"), by_key.touches),
            Equation("E1b", "expert bytes == sum over experts", "==", c("expert_touch_bytes"), by_key.touch_bytes),
            Equation("E2", "expert touches == asked for + again", "==", by_key.touches, by_key.asked + again[0]),
            Equation(
                "E2b", "expert bytes == asked for + again", "==", by_key.touch_bytes, by_key.asked_bytes + again[1]
            ),
        ]
    if "ring_slots" in facts:
        rows += [
            Equation(name, f"{counter} == what the schedules of all passes copy", "==", c(counter), f(fact))
            for name, counter, fact in (
                ("S1", "staged_bytes", "staged_bytes_foreseen"),
                ("S2", "ring_waits", "ring_waits_foreseen"),
            )
        ]
        calls = c("vmm_calls_steady") + c("alloc_calls_steady")
        rows.append(Equation("S3", "staging: VMM calls and allocations in steady state == 0", "==", calls, 0))
        replanned = f("replanned_keys")
        rows.append(Equation("S4", "staging: evictions == keys of re-planned sets", "==", c("evictions"), replanned))
    if "zero_copy_bytes_foreseen" in facts:
        gone, replanned = c("page_ins") + c("evictions"), f("replanned_keys")
        rows += [
            Equation(
                "Z1",
                "zero_copy_bytes == what all passes read in place",
                "==",
                c("zero_copy_bytes"),
                f("zero_copy_bytes_foreseen"),
            ),
            Equation("Z2", "zero copy: page_ins + evictions == keys of re-planned sets", "==", gone, replanned),
        ]
    if "limit_bytes" in facts:
        rows.append(Equation("G2", "owned <= what the limit leaves", "<=", c("physical_owned_bytes"), f("limit_bytes")))
    if f("resident") == 1:
        rows.append(Equation("W13", "all fits: page_ins == 0", "==", c("page_ins"), 0))
        rows.append(Equation("W13l", "all fits: loaded_keys == keys", "==", c("loaded_keys"), f("keys")))
    if facts["kv_layout"] == "seq-major":
        rows.append(Equation("A17", "seq-major: growth copies == 0", "==", c("kv_growth_dtod_bytes"), 0))
        rows.append(
            Equation("A17g", "seq-major: graphs that its moves throw away == 0", "==", c("kv_move_invalidations"), 0)
        )
    if capture:
        parts = c("warm_steps") + c("captures") + c("replays") + c("fallbacks")
        causes = c("kv_move_invalidations") + c("grant_invalidations")
        rows.append(Equation("A14r", "invalidations == sum over reasons", "==", c("invalidations"), causes))
        rows.append(Equation("A14", "invalidations <= captures", "<=", c("invalidations"), c("captures")))
        rows.append(
            Equation("C1", "one-token steps == warm + captures + replays + fallbacks", "==", c("decode_steps"), parts)
        )
    return tuple(rows)


_FAULTS = ("ref_underflows", "unaccounted_bytes", "quarantined_bytes", "oversubscribed_bytes")
