"""Records: what was written comes back equal, on both stores, and what no store can hold is flagged, never a number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from jobs.errors import StoreError
from jobs.model import (
    ArmPlan,
    CellPlan,
    Certificate,
    Equation,
    Generation,
    Interval,
    KeyBytes,
    Manifest,
    Missing,
    RunRecord,
    RunSettings,
    SeamRow,
    SequenceTokens,
)
from jobs.store import AttemptRef, BlockClaim, Store, readback, records
from jobs.store.connect import Database
from jobs.store.strict import storable
from jobs.tables import series, value

pytest_plugins = ("tests.unit.jobs_store_cases",)

KEYS = itertools.count()
FEW = settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes: each example is six transactions
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store.open(store_url, lambda: datetime(2026, 11, 30, tzinfo=UTC))
    yield opened
    opened.close()


BASE = ArmPlan(name="base", role="base", source="checkout")


def manifest(blocks: int = 1, arm: ArmPlan = BASE, **config: str) -> Manifest:
    plan = CellPlan(
        cell="cell",
        model="toy",
        model_path="/models/toy",
        model_digest="d",
        prompt="p",
        prompt_ids=(1,),
        settings=RunSettings(tokens=4),
        arms=("base",),
        blocks=blocks,
        config=dict(config),
    )
    return Manifest(name="sweep", arms=(arm,), cells=(plan,))


def begin(store: Store, *, blocks: int = 1, arm: ArmPlan = BASE) -> tuple[str, BlockClaim]:
    sweep_id = store.submit(manifest(blocks, arm), "harness", "0.1", key=f"k{next(KEYS)}")
    claim = store.claim_block(sweep_id, "w", 60)
    assert claim is not None
    return sweep_id, claim


def running(store: Store, claim: BlockClaim, place: int = 0) -> AttemptRef:
    attempt = store.open_attempt(claim.runs[place].run_id, claim.fence, "w", "SIM-0")
    store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
    store.move(attempt.attempt_id, claim.fence, "clearing", "running")
    return attempt


def named(attempt: AttemptRef) -> dict[str, Any]:
    return {"run_id": attempt.run_id, "attempt_id": attempt.attempt_id, "attempt_number": attempt.number}


def written(store: Store, fields: dict[str, Any], arm: ArmPlan = BASE) -> tuple[RunRecord, RunRecord]:
    """What was handed over, and what the judge will read."""
    sweep_id, claim = begin(store, arm=arm)
    attempt = running(store, claim)
    given_record = RunRecord(**{**fields, **named(attempt)})
    store.write_record(attempt.attempt_id, claim.fence, given_record)
    found = store.judge_input(sweep_id).cells[0].runs[0].record
    assert found is not None
    assert found == store.record(attempt.attempt_id)
    store.write_record(attempt.attempt_id, claim.fence, given_record)  # a resend is a no-op
    return given_record, found


# ---- any record --------------------------------------------------------------------------------------------------

INTEGERS = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NAMES = st.text("abcdefghijk_", min_size=1, max_size=8)
READINGS = st.one_of(INTEGERS, FLOATS, st.builds(Missing, missing=TEXT))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
DOCUMENTS = st.dictionaries(TEXT, JSON, max_size=3)


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


TOKENS: dict[str, st.SearchStrategy[Any]] = {
    "ids": several(COUNTS),
    "stop_reason": st.sampled_from(["length", "eos", None]),
    "gaps": several(FLOATS),
}
GENERATIONS = st.builds(
    Generation,
    index=st.integers(0, 5),
    warmup=st.booleans(),
    **TOKENS,
    further=several(st.builds(SequenceTokens, **TOKENS)),
    counters=st.dictionaries(NAMES, st.dictionaries(NAMES, st.one_of(INTEGERS, FLOATS), max_size=3), max_size=2),
    prefill_ns=COUNTS,
    step_ns=several(COUNTS),
)
CERTIFICATES = st.builds(
    Certificate,
    uuid=TEXT,
    card=TEXT,
    driver=TEXT,
    verdict=st.sampled_from(["clear", "contended", "throttled", "unknown"]),
    grade=st.sampled_from(["pids", "memory", "scripted", "none"]),
    reasons=several(TEXT),
    before=DOCUMENTS,
    after=DOCUMENTS,
    samples=COUNTS,
    during=DOCUMENTS,
    intervals=several(st.builds(Interval, start_s=FLOATS, end_s=FLOATS, what=TEXT, pid=st.none() | COUNTS)),
)
RECORDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "exit_code": st.none() | st.integers(0, 255),
        "signal": st.none() | st.integers(1, 64),
        "error": st.none() | TEXT,
        "engine_digest": TEXT,
        "module_path": TEXT,
        "model_digest": TEXT,
        "effective_config": DOCUMENTS,
        "device": DOCUMENTS,
        "generations": several(GENERATIONS),
        "counters": st.dictionaries(NAMES, READINGS, max_size=6),
        "metrics": st.dictionaries(NAMES, READINGS, max_size=6),
        "facts": st.dictionaries(NAMES, st.one_of(INTEGERS, FLOATS, TEXT), max_size=4),
        "seams": several(st.builds(SeamRow, step=COUNTS, node=TEXT, op=TEXT, reason=TEXT, path=TEXT, detail=TEXT)),
        "keys": several(
            st.builds(
                KeyBytes,
                key=TEXT,
                nbytes=COUNTS,
                hits=COUNTS,
                retained=COUNTS,
                bypassed=COUNTS,
                evicted=COUNTS,
                staged=COUNTS,
            )
        ),
        "equations": several(
            st.builds(
                Equation,
                name=TEXT,
                text=TEXT,
                relation=st.sampled_from(["==", "<=", ">="]),
                lhs=st.one_of(INTEGERS, FLOATS),
                rhs=st.one_of(INTEGERS, FLOATS),
                holds=st.booleans(),
            )
        ),
        "certificate": st.none() | CERTIFICATES,
        "peak_rss_bytes": st.none() | COUNTS,
        "started_at": TEXT,
        "ended_at": TEXT,
        "log_tail": TEXT,
        "flags": st.dictionaries(TEXT.filter(lambda text: ": " not in text), TEXT.filter(len)).map(
            lambda told: tuple(sorted(f"{place}: {fault}" for place, fault in told.items()))
        ),
    }
)


@FEW
@given(fields=RECORDS)
def test_any_record_comes_back_equal(store: Store, fields: dict[str, Any]) -> None:
    given_record, found = written(store, fields)
    assert found == given_record
    assert found.digest() == storable(given_record)[0].digest()
    kinds = {name: type(reading) for name, reading in given_record.counters.items()}
    assert {name: type(reading) for name, reading in found.counters.items()} == kinds


def test_the_strategy_covers_every_field() -> None:
    """A field that the property does not vary could be dropped unseen."""
    drawn = set(RunRecord.model_fields) - {"run_id", "attempt_id", "attempt_number"}
    example = {
        "exit_code", "signal", "error", "engine_digest", "module_path", "model_digest", "effective_config", "device",
        "generations", "counters", "metrics", "facts", "seams", "keys", "equations", "certificate", "peak_rss_bytes",
        "started_at", "ended_at", "log_tail", "flags",
    }  # fmt: skip
    assert drawn == example


# ---- hostile records ---------------------------------------------------------------------------------------------

WILD_FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308])
WILD_TEXT = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["\0", "\ud800", "a\udfff\0"])
WILD_READINGS = st.one_of(WILD_FLOATS, st.integers(-(2**70), 2**70), READINGS)


@FEW
@given(
    counters=st.dictionaries(NAMES, WILD_READINGS, max_size=6),
    facts=st.dictionaries(NAMES, st.one_of(WILD_FLOATS, WILD_TEXT), max_size=4),
    gaps=several(WILD_FLOATS),
    phase=st.dictionaries(NAMES, WILD_FLOATS, max_size=3),
    device=st.dictionaries(WILD_TEXT, st.one_of(WILD_FLOATS, WILD_TEXT), max_size=3),
    log_tail=WILD_TEXT,
    sides=st.tuples(WILD_FLOATS, WILD_FLOATS),
)
def test_no_record_is_refused_for_its_values(
    store: Store,
    counters: dict[str, Any],
    facts: dict[str, Any],
    gaps: tuple[float, ...],
    phase: dict[str, float],
    device: dict[str, Any],
    log_tail: str,
    sides: tuple[float, float],
) -> None:
    equation = Equation(name="W1", text="a == b", relation="==", lhs=sides[0], rhs=sides[1], holds=True)
    other = SequenceTokens(ids=(3,), stop_reason="eos", gaps=gaps)
    tokens: dict[str, Any] = {"ids": (1, 2), "stop_reason": "length", "gaps": gaps, "further": (other,)}
    one = Generation(index=0, warmup=False, **tokens, counters={"decode": phase})
    fields = {"counters": counters, "facts": facts, "device": device, "log_tail": log_tail}
    given_record, found = written(store, {"exit_code": 0, **fields, "generations": (one,), "equations": (equation,)})
    assert found == storable(given_record)[0]
    assert found.canonical()  # strict JSON: NaN would raise
    assert found.generations[0].ids == (1, 2) and found.generations[0].further[0].ids == (3,)
    assert set(found.counters) == set(given_record.counters)
    for name, reading in given_record.counters.items():
        if isinstance(reading, Missing) or (math.isfinite(reading) and abs(reading) < 2**63):
            assert found.counters[name] == reading
    assert found.equations[0].holds is all(map(math.isfinite, sides))


def test_field_67_bad_numbers_become_missing_with_a_flag_and_good_ones_stay(store: Store, store_url: str) -> None:
    counters = {
        "nan": math.nan,
        "up": math.inf,
        "down": -math.inf,
        "huge": 1e400,
        "wide": 2**63,
        "good": 7,
        "none": Missing(missing="not recorded"),
    }
    _, found = written(store, {"exit_code": 0, "counters": counters, "log_tail": "half \ud83d and NUL \0"})
    assert found.counters == {
        "nan": Missing(missing="not a storable number: nan"),
        "up": Missing(missing="not a storable number: inf"),
        "down": Missing(missing="not a storable number: -inf"),
        "huge": Missing(missing="not a storable number: inf"),
        "wide": Missing(missing="not a storable number: beyond 64 bits"),
        "good": 7,
        "none": Missing(missing="not recorded"),
    }
    assert found.log_tail == "half \ufffd and NUL \ufffd"
    assert "counters.nan: nan" in found.flags
    assert "log_tail: NUL or half a surrogate pair" in found.flags
    database = Database(store_url)
    with database.reading() as connection:
        wanted = select(series.c.name, value.c.flag).join(series, series.c.id == value.c.series_id)
        flags = {name: flag for name, flag in connection.execute(wanted) if flag is not None}
    database.close()
    assert flags == {"nan": "nan", "up": "inf", "down": "-inf", "huge": "inf", "wide": "beyond 64 bits"}


def test_flags_name_the_place() -> None:
    one = Generation(
        index=0,
        warmup=False,
        ids=(1,),
        stop_reason="eos",
        gaps=(0.5, math.nan),
        counters={"decode": {"x": math.inf, "y": 1}},
    )
    clean, flags = storable(
        RunRecord(
            run_id="r",
            attempt_id="a",
            attempt_number=1,
            exit_code=0,
            generations=(one,),
            facts={"f": math.nan},
            device={"name": ["ok", "\0"]},
            certificate=None,
            effective_config={"policy": {"value": math.nan, "source": "default"}},
        )
    )
    assert flags == {
        "generations.0.gaps": "not finite",
        "generations.0.counters.decode.x": "inf",
        "facts.f": "nan",
        "device.name.1": "NUL or half a surrogate pair",
        "effective_config.policy.value": "nan",
    }
    assert clean.flags == tuple(sorted(f"{place}: {fault}" for place, fault in flags.items()))
    assert storable(clean) == (clean, {})
    assert clean.generations[0].gaps == ()
    assert clean.generations[0].counters == {"decode": {"y": 1}}
    assert clean.facts == {"f": "not finite: nan"}
    assert clean.effective_config == {"policy": {"value": None, "source": "default"}}


def test_an_equation_with_an_unknown_side_never_holds() -> None:
    equation = Equation(name="W1", text="hits == touches", relation="==", lhs=math.nan, rhs=math.nan, holds=True)
    clean, _ = storable(RunRecord(run_id="r", attempt_id="a", attempt_number=1, exit_code=0, equations=(equation,)))
    assert not clean.equations[0].holds
    assert clean.equations[0].text == "hits == touches [a side was nan]"


@pytest.mark.parametrize(
    "fields",
    [
        {"generations": (Generation(index=0, warmup=False, ids=(2**63,), stop_reason="eos"),)},
        {"generations": (Generation(index=0, warmup=False, ids=(1,), stop_reason="eos", step_ns=(1, 2**64)),)},
        {"keys": (KeyBytes(key="k", nbytes=2**63),)},
        {"peak_rss_bytes": 2**63},
        {"seams": (SeamRow(step=-(2**63) - 1, node="n", op="o", reason="r", path="p"),)},
    ],
)
def test_a_typed_place_beyond_64_bits_is_refused_whole(store: Store, fields: dict[str, Any]) -> None:
    _, claim = begin(store)
    attempt = running(store, claim)
    with pytest.raises(StoreError, match="beyond 64 bits"):
        store.write_record(attempt.attempt_id, claim.fence, RunRecord(exit_code=0, **fields, **named(attempt)))
    assert store.record(attempt.attempt_id) is None
    store.move(attempt.attempt_id, claim.fence, "running", "failed", "the child spoke nonsense")


# ---- one transaction ---------------------------------------------------------------------------------------------


def test_a_record_is_written_whole_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_id, claim = begin(store)
    attempt = running(store, claim)
    seam = SeamRow(step=1, node="n", op="o", reason="r", path="p")
    record = RunRecord(exit_code=0, counters={"hits": 1}, seams=(seam,), **named(attempt))

    class Died(BaseException):
        """Not an Exception: nothing may catch it on the way."""

    def die(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(records, "_write_values", die)
        with pytest.raises(Died):
            store.write_record(attempt.attempt_id, claim.fence, record)
    assert store.record(attempt.attempt_id) is None
    assert store.pending(sweep_id).live_attempts == 1
    store.write_record(attempt.attempt_id, claim.fence, record)
    assert store.record(attempt.attempt_id) == record


# ---- series ------------------------------------------------------------------------------------------------------


def stored_series(store_url: str) -> list[Any]:
    database = Database(store_url)
    with database.reading() as connection:
        rows = list(connection.execute(select(series)).all())
    database.close()
    return rows


def certificate(card: str) -> Certificate:
    return Certificate(uuid="GPU-1", card=card, driver="570", verdict="clear", grade="pids")


def test_equal_runs_share_their_series(store: Store, store_url: str) -> None:
    same = {"exit_code": 0, "model_digest": "m", "certificate": certificate("H200"),
            "effective_config": {"policy": {"value": "lru", "source": "request"}}}  # fmt: skip
    written(store, {**same, "counters": {"hits": 1}, "metrics": {"hits": 2}})
    written(store, {**same, "counters": {"hits": 3}})
    assert sorted((row.family, row.name, row.card) for row in stored_series(store_url)) == [
        ("counter", "hits", "H200"), ("metric", "hits", "H200"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"model_digest": "other"},
        {"certificate": certificate("H100")},
        {"effective_config": {"policy": {"value": "stable", "source": "request"}}},
    ],
)
def test_what_differs_splits_a_series(store: Store, store_url: str, other: dict[str, Any]) -> None:
    same = {"exit_code": 0, "model_digest": "m", "certificate": certificate("H200"), "counters": {"hits": 1},
            "effective_config": {"policy": {"value": "lru", "source": "request"}}}  # fmt: skip
    written(store, same)
    written(store, {**same, **other})
    assert len(stored_series(store_url)) == 2


@pytest.mark.parametrize("unknown", ["model_digest", "certificate", "effective_config"])
def test_what_is_unknown_splits_and_never_merges(store: Store, store_url: str, unknown: str) -> None:
    known = {"model_digest": "m", "certificate": certificate("H200"), "effective_config": {"policy": {"value": "lru"}}}
    given_fields = {name: one for name, one in known.items() if name != unknown}
    for _ in range(2):
        written(store, {"exit_code": 0, "counters": {"hits": 1}, **given_fields})
    assert len(stored_series(store_url)) == 2


def test_a_program_without_settings_has_a_series_of_its_own(store: Store, store_url: str) -> None:
    fields = {"exit_code": 0, "model_digest": "m", "certificate": certificate("H200"), "counters": {"hits": 1}}
    for text in ("./bench", "./bench", "./other"):
        written(store, fields, BASE.model_copy(update={"adapter": "command", "command": ("bash", "-c", text)}))
    assert len(stored_series(store_url)) == 2


def test_where_a_value_came_from_does_not_split(store: Store, store_url: str) -> None:
    same = {"exit_code": 0, "model_digest": "m", "certificate": certificate("H200"), "counters": {"hits": 1}}
    for source in ("default", "request"):
        written(store, {**same, "effective_config": {"policy": {"value": "lru", "source": source}}})
    assert len(stored_series(store_url)) == 1


# ---- many --------------------------------------------------------------------------------------------------------


def test_records_are_fetched_in_parts_and_belong_to_their_runs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readback, "AT_ONCE", 3)
    sweep_id = store.submit(manifest(blocks=4), "harness", "0.1")
    expected: dict[str, RunRecord] = {}
    while (claim := store.claim_block(sweep_id, "w", 60)) is not None:
        for run in claim.pending:
            attempt = running(store, claim, run.position)
            ids = (claim.number, run.position)
            generations = tuple(
                Generation(index=i, warmup=i == 0, ids=(*ids, i), stop_reason="length", step_ns=ids) for i in range(3)
            )
            record = RunRecord(exit_code=0, generations=generations, counters={"hits": len(expected)}, **named(attempt))
            store.write_record(attempt.attempt_id, claim.fence, record)
            expected[attempt.run_id] = record
        store.release_block(claim.block_id, claim.fence)
    runs = store.judge_input(sweep_id).cells[0].runs
    assert [(run.block, run.position) for run in runs] == [(block, place) for block in range(4) for place in range(2)]
    assert {run.run_id: run.record for run in runs} == expected


def test_field_72_a_counter_that_was_not_there_is_not_there(store: Store) -> None:
    """A record of an older engine lacks a counter: absent, not 0."""
    _, found = written(store, {"exit_code": 0, "counters": {"hits": 1}})
    assert found.counters == {"hits": 1}
    assert found.metrics == {}
