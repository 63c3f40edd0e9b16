"""The reference's nine vectors with known answers (its appendix C), each by its number, against what is built here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.equations import Sums, evaluate
from engine.kernels.nbits import decode_nbits
from engine.kv_layout import growth_copies
from engine.plan import KvGeometry
from jobs.contract import IdentityContract, ListedTie
from jobs.identity import broken_locks, streams_of
from jobs.judge import judge
from jobs.metrics import derive
from jobs.model import Generation, Lock, RunSettings
from jobs.near_tie import Adjudication, ForcedPosition
from jobs.verdict import Verdict
from tests.unit.engine_plain import compute, stored
from tests.unit.engine_rig import build_tiny, run
from tests.unit.test_engine_equations import FACTS
from tests.unit.test_engine_paging import Rig, plan_of

G = 4096
SIXTEEN = Generation(index=0, warmup=False, ids=(1,) * 16, stop_reason="length", step_ns=(1,) * 15)


def holds(name: str, counters: dict[str, int], facts: dict[str, int], sums: Sums) -> bool:
    """One equation of a run, evaluated over these figures."""
    made = evaluate(counters, {**FACTS, **facts}, sums, capture=True)
    return next(row.holds for row in made if row.name == name)


def always(ids: tuple[int, ...], stop: str | None) -> dict[str, Any]:
    """An arm that gives these ids in every generation of every run."""
    return {"ids": lambda _run, _generation: ids, "stop": lambda _run, _generation: stop}


def vector_1(_: Any) -> None:
    """The record of 867 keys over 16 steps: hits follow from the keys, then shares, floor and gap."""
    keys, steps, page_ins, bypassed, evictions = 867, 16, 3_008, 336, 2_672
    htod, requested, bypassed_per_step = 37_584_175_104, 7_870_916_608, 1_048_412_160
    hits = keys * steps - page_ins
    assert hits == 10_864
    retained = page_ins - bypassed
    counters = {"hits": hits, "page_ins": page_ins, "bypassed_page_ins": bypassed, "htod_bytes": htod}
    counters |= {"hit_bytes": requested * steps - htod, "bypassed_page_in_bytes": bypassed_per_step * steps}
    counters |= {"touches": keys * steps, "retained_page_ins": retained, "evictions": evictions, "forward_steps": steps}
    counters["retained_bytes"] = htod - bypassed_per_step * steps
    facts = {"touches_per_step": keys, "requested_bytes_per_step": requested}
    sums = Sums(hits, retained, bypassed, bypassed_per_step * steps, evictions)
    for name in ("W1", "W1p", "W2", "W2h", "W2r", "W2b", "W2e", "W3", "W4", "W6", "W7"):
        assert holds(name, counters, facts, sums), name
    streamed = 389_283_840 + 48_660_480 + 17 * 35_389_440 + 4 * 4_423_680 // 2
    assert streamed == bypassed_per_step, "key by key, a step"
    limits = {"weight_bytes": 8_330_595_870, "capacity_bytes": 7_726_753_178 - 536_870_912 - 50_331_648}
    got: dict[str, Any] = derive(counters, limits, [SIXTEEN])
    shares = ("count_hit_rate", "byte_hit_rate", "bypassed_byte_share")
    assert [f"{got[name]:.2%}" for name in shares] == ["78.32%", "70.16%", "44.63%"]
    assert (got["floor_bytes_per_token"], got["floor_distance_bytes"]) == (1_191_045_252, 1_157_965_692)
    assert round(got["floor_ratio"], 3) == 1.972


def vector_2(_: Any) -> None:
    """A cold record: what was retained and not evicted is what became resident."""
    page_ins, hits, bypassed, evictions = 5_299, 8_573, 691, 3_850
    assert hits + page_ins == 13_872 == 867 * 16
    assert f"{hits / (hits + page_ins):.2%}" == "61.80%"
    retained = page_ins - bypassed
    counters = {"hits": hits, "page_ins": page_ins, "bypassed_page_ins": bypassed, "retained_page_ins": retained}
    counters |= {"evictions": evictions, "touches": 13_872, "forward_steps": 16, "resident_keys": 758}
    sums = Sums(hits, retained, bypassed, 0, evictions)
    assert all(holds(name, counters, {"touches_per_step": 867}, sums) for name in ("W1", "W1p", "W2", "W3"))
    assert not holds("W3", {**counters, "resident_keys": 757}, {"touches_per_step": 867}, sums)


def vector_3(_: Any) -> None:
    """A cyclic scan of n equal pages with room for c: lru hits nothing at any c, keeping what fits c of n."""
    n = 12
    for c in range(2, n):
        scan = plan_of([G] * n, [[k] for k in range(n)])
        lru, keeps = Rig(scan, "lru", c * G), Rig(scan, "zero_copy", c * G)
        for _ in range(3):
            assert lru.walk(check=False).get("hits", 0) == 0
            assert keeps.walk(check=False)["hits"] == c


def vector_4(given: Any) -> None:
    """48 tokens after a prompt of five. The reference's fourth invalidation is its reset at the end; ours keeps."""
    names = ("warm_steps", "captures", "replays", "fallbacks")
    asked = {"prompt_ids": [1, 17, 42, 99, 7], "tokens": 48, "ignore_eos": True}
    calm = run(given.tiny, **asked).counters
    assert [calm[name] for name in names] == [1, 1, 45, 0]
    grown = run(given.tiny, **asked, config={"kv_layout": "head-major", "kv_min_bucket": 8}).counters
    assert [grown[name] for name in names] == [4, 4, 39, 0]
    assert (grown["invalidations"] + 1, grown["kv_growths"]) == (4, 3)


def vector_5(_: Any) -> None:
    """qwen2.5-14b's cache from 512 to 1024: nothing moves in seq-major; in head-major what is cached, and a mask."""
    kv = KvGeometry(layers=48, kv_heads=8, head_size=128, dtype="float16", token_bytes=2048)
    copies = {(g.layout, g.from_tokens): g.sum_bytes for g in growth_copies(kv, 4096, masked=True)}
    assert copies["seq-major", 512] == 0
    assert copies["head-major", 512] == 100_667_392 == kv.bytes_per_token * 512 + 4_096


def vector_6(given: Any) -> None:
    """16 tokens asked, a stream that ends after three and declares no stop: SHORT, exit 1, whoever gives it."""
    documents, settings = given.documents, {"settings": RunSettings(tokens=16, generations=1)}
    whole = always(documents.IDS[:16], "length")
    for stop in (None, "length"):
        short = always(documents.IDS[:3], stop)
        doc = documents.sweep(base=documents.arm(**whole), head=documents.stable_arm(**short), cell=settings)
        verdict = judge(doc)
        assert isinstance(verdict, Verdict)
        assert (verdict.outcome, verdict.exit_code) == ("SHORT", 1)


def vector_7(given: Any) -> None:
    """Id 46283 in place of 33803, 0.09 apart by the oracle, from which base itself is 0.05 away: a near tie, exit 3, or
    0 where the contract allows it. 279, 2.5 behind, is a violation. A lock takes both ids, and 279 breaks it."""
    documents = given.documents
    base = (*documents.IDS[:19], 33803, *documents.IDS[20:])

    def outcome(instead: int, behind: float, **contract: Any) -> tuple[str, int]:
        head = always((*base[:19], instead, *base[20:]), "length")
        doc = documents.sweep(
            base=documents.arm(**always(base, "length"), gap=0.09),
            head=documents.stable_arm(**head),
            identity=IdentityContract(**contract),
        )
        asked = judge(doc)
        assert isinstance(asked, tuple)
        own = {"base_error": 0.05, "base_behind": 0.0}
        rest = [
            ForcedPosition(index=at, base_id=base[at], head_id=base[at], oracle_id=base[at], head_behind=0.0, **own)
            for at in range(20, len(base))
        ]
        first = ForcedPosition(index=19, base_id=33803, head_id=instead, oracle_id=33803, head_behind=behind, **own)
        answers = tuple(Adjudication(asked=question, positions=(first, *rest), own=tuple(rest)) for question in asked)
        verdict = judge(doc.model_copy(update={"adjudications": answers}))
        assert isinstance(verdict, Verdict)
        return verdict.outcome, verdict.exit_code

    assert outcome(46283, 0.09) == ("NEAR_TIE", 3)
    assert outcome(46283, 0.09, near_ties="allow")[1] == 0
    listed = ListedTie(prompt="capital", index=19, ids=(33803, 46283), reason="re-anchored on float32")
    assert outcome(46283, 0.09, near_ties="listed", ties=(listed,)) == ("NEAR_TIE", 0)
    assert outcome(279, 2.5, near_ties="listed", ties=(listed,)) == ("VIOLATION", 1)
    also = listed.model_copy(update={"ids": (33803, 46283, 279)})
    assert outcome(279, 2.5, near_ties="listed", ties=(also,)) == ("VIOLATION", 1), "a list excuses near ties alone"
    assert outcome(46283, 0.09, near_tie_cap=0.08) == ("VIOLATION", 1)
    assert outcome(279, 2.5, near_ties="allow") == ("VIOLATION", 1)
    lock = Lock(prompt="capital", index=19, expected=33803, allowed=(33803, 46283))
    for given_id, broken in ((33803, False), (46283, False), (279, True)):
        head = always((*base[:19], given_id, *base[20:]), "length")
        doc = documents.sweep(head=documents.stable_arm(**head))
        records = [r.record for c in doc.cells for r in c.runs if r.arm == "head" and r.record]
        assert bool(broken_locks([lock], "capital", streams_of("head", records))) is broken


def vector_8(_: Any) -> None:
    """Router logits that tie: the lower expert's index wins."""
    gives = np.array([1.0, 10.0, 100.0, 1000.0], np.float32)
    weights = {
        "w1": stored("w1", np.zeros((4, 2, 2), np.float32)),
        "b1": stored("b1", np.ones((4, 2), np.float32)),
        "w2": stored("w2", np.repeat(gives, 4).reshape(4, 2, 2) / 2),
    }
    for logits, total in (([2, 0, 2, 2], 101), ([0, 5, 5, 5], 110), ([1, 1, 1, 1], 11)):
        inputs = {"x": np.ones((1, 2), np.float32), "router": np.array([logits], np.float32)}
        wiring = ("x", "router", "w1", "b1", "w2")
        [y] = compute("MoE", inputs, wiring=wiring, weights=weights, k=2, normalize_routing_weights=1)
        np.testing.assert_allclose(y[0], total / 2, rtol=1e-6)


def vector_9(_: Any) -> None:
    """int4 with K = 160 in blocks of 32: five zero points a row take three bytes; one index over all fails."""
    n, blocks, size = 3, 5, 32
    points = np.arange(n * blocks).reshape(n, blocks) % 16
    rows = np.concatenate([points, np.zeros((n, 1), np.int64)], axis=1)
    packed = (rows[:, 0::2] | rows[:, 1::2] << 4).astype(np.uint8)
    assert packed.shape == (n, 3)
    codes, scales = np.zeros((n, blocks, size // 2), np.uint8), np.ones((n, blocks), np.float32)
    decoded = decode_nbits(
        {"codes": codes, "scales": scales, "zero_points": packed},
        {"K": blocks * size, "N": n, "bits": 4, "block": size},
    )
    got = -decoded.reshape(n, blocks, size)[:, :, 0]
    np.testing.assert_array_equal(got, points)
    nibbles = np.stack([packed.reshape(-1) & 15, packed.reshape(-1) >> 4], axis=1).reshape(-1)
    assert not np.array_equal(nibbles[: n * blocks].reshape(n, blocks)[1:], points[1:]), (
        "rows after the first are wrong"
    )


VECTORS: dict[int, Callable[[Any], None]] = {
    1: vector_1, 2: vector_2, 3: vector_3, 4: vector_4, 5: vector_5, 6: vector_6, 7: vector_7, 8: vector_8, 9: vector_9,
}  # fmt: skip


class Given:
    """What vectors are tried on: the seeded model, and judge's documents made in code."""

    def __init__(self, tiny: Path, documents: Any) -> None:
        self.tiny, self.documents = tiny, documents


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, documents: Any) -> Given:
    """Both, once."""
    return Given(build_tiny(tmp_path_factory.mktemp("vectors")), documents)


@pytest.mark.parametrize("number", VECTORS)
def test_reference_vector(number: int, given: Given) -> None:
    VECTORS[number](given)
