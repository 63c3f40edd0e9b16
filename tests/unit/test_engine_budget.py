"""Whole runs under budgets: equations, refusals with both numbers, limits that hold, and failures that still report."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import run as engine_run
from engine.bind import lower
from engine.config import POLICIES
from engine.device.base import Granule
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure, EngineError, OutOfMemory
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from engine.plan import Plan
from tests.unit.engine_rig import COPYING, TINY_PROMPT, Outcome, build_tiny, over_the_link, run

G = 4096
LOOKUPS = ("hits", "retained", "bypassed", "staged", "in_place")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("budget"))


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    """Its decode step."""
    return lower(load(tiny), 1)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    share=st.integers(15, 100),
    policy=st.sampled_from(POLICIES),
    granule=st.sampled_from([4096, 8192, 32768, 65536]),
    capture=st.booleans(),
    chunk=st.integers(1, 5),
    tokens=st.integers(1, 7),
    generations=st.integers(1, 2),
    warmups=st.integers(0, 2),
    prompt=st.integers(1, 5),
)
def test_the_equations_hold_on_every_run_that_is_not_refused(
    tiny: Path,
    share: int,
    policy: str,
    granule: int,
    capture: bool,
    chunk: int,
    tokens: int,
    generations: int,
    warmups: int,
    prompt: int,
) -> None:
    config = {
        "weight_budget": f"{share}%",
        "policy": policy,
        "granule": granule,
        "capture": capture,
        "prefill_chunk": chunk,
    }
    ids = [1, 17, 42, 99, 7][:prompt]
    outcome = run(tiny, config=config, tokens=tokens, generations=generations, warmups=warmups, prompt_ids=ids)
    if outcome.code == 13:
        assert outcome.error["message"].count("bytes") >= 2 and "at least" in outcome.error["remedy"]
        return
    assert outcome.broken_equations() == []
    names = {e["name"] for e in outcome.result["equations"]}
    assert names >= {"W1", "W1p", "W2", "W3", "W4", "W6", "W7", "W10", "W11", "W12", "A8", "A8o", "A18", "L0", "L1"}
    assert ("C1" in names) is capture
    check_measured(outcome, tokens, generations, warmups)


def check_measured(outcome: Outcome, tokens: int, generations: int, warmups: int) -> None:
    """Counters of the result are the measured generations' own sums, warm-ups left out."""
    measured = [g for g in outcome.lines.of("generation") if not g["warmup"]]
    assert len(measured) == generations and len(outcome.lines.of("generation")) == generations + warmups
    for name in (
        "hits",
        "htod_bytes",
        "forward_steps",
        "emitted_tokens",
        "touches",
        "evictions",
        "captures",
        "replays",
    ):
        parts = [g["counters"][p].get(name, 0) for g in measured for p in ("warm", "prefill", "decode")]
        assert outcome.counters[name] == sum(parts), name
    assert outcome.counters["emitted_tokens"] == outcome.facts["measured_tokens"] == tokens * generations
    assert outcome.counters["min_logit_margin"] == min(min(g["gaps"]) for g in measured)
    touched = [k for k in outcome.result["keys"] if sum(k[way] for way in LOOKUPS)]
    assert sum(k["nbytes"] for k in touched) == outcome.facts["weight_bytes"], "no table that is gathered only"


@pytest.mark.parametrize("policy", POLICIES)
def test_w5_bytes_per_token_times_tokens_and_the_keys_that_moved(tiny: Path, policy: str) -> None:
    """Each key's traffic, times its bytes, adds up to what the link carried."""
    outcome = run(tiny, config={"weight_budget": "50%", "policy": policy, "granule": G}, generations=2)
    moved = sum(k["nbytes"] * (k["retained"] + k["bypassed"] + k["staged"]) for k in outcome.result["keys"])
    in_place = sum(k["nbytes"] * k["in_place"] for k in outcome.result["keys"])
    assert moved == outcome.counters["htod_bytes"] and in_place == outcome.counters["zero_copy_bytes"]
    assert moved + in_place > 0 and (moved == 0) is (policy == "zero_copy")
    assert outcome.counters["device_htod_bytes"] == moved
    requested = outcome.facts["requested_bytes_per_step"] * outcome.counters["forward_steps"]
    assert outcome.counters["hit_bytes"] + moved + in_place == requested


def test_w14_traffic_falls_as_the_budget_grows_and_never_below_the_floor(tiny: Path) -> None:
    """The resident set stands still from the second generation on, so a step streams W less what is resident."""
    for share in (40, 55, 70, 85):
        config = {"weight_budget": f"{share}%", "policy": "stable_slot", "granule": G}
        outcome = run(tiny, config=config, warmups=1, generations=2)
        per_step = outcome.counters["htod_bytes"] / outcome.counters["forward_steps"]
        resident = outcome.counters["content_resident_bytes"]
        assert per_step == outcome.facts["weight_bytes"] - resident
        assert per_step >= outcome.facts["floor_bytes_per_token"] > 0


def test_everything_resident_pages_nothing_in(tiny: Path) -> None:
    outcome = run(tiny, generations=2)
    assert outcome.counters["page_ins"] == outcome.counters["htod_bytes"] == outcome.counters["evictions"] == 0
    loaded = outcome.lines.of("generation")[0]["counters"]["load"]
    assert loaded["loaded_keys"] == outcome.facts["keys"] and loaded["loaded_bytes"] == outcome.facts["weight_bytes"]
    assert outcome.facts["floor_bytes_per_token"] == 0
    assert outcome.counters["vmm_calls_steady"] == outcome.counters["alloc_calls_steady"] == 0


# -- refusals


def numbers(text: str) -> set[int]:
    """Whole numbers in a message."""
    return {int(n) for n in re.findall(r"\d+", text)}


@pytest.mark.parametrize("policy", COPYING)
def test_field_63_a_budget_below_the_largest_key_is_refused_with_both_numbers(
    tiny: Path, plan: Plan, policy: str
) -> None:
    largest = max(k.nbytes for k in plan.keys)
    for budget in (1, largest - 1):
        outcome = run(tiny, config={"weight_budget": budget, "policy": policy, "granule": G})
        assert (outcome.code, outcome.error["kind"]) == (13, "refused")
        assert {budget, largest} <= numbers(outcome.error["message"])
        assert "lm_head.MatMul.weight_Q4" in outcome.error["message"]
        assert outcome.error["counters"].get("htod_bytes", 0) == 0, "refused before anything moved"


@pytest.mark.parametrize("granule", [4096, 16384, 65536])
@pytest.mark.parametrize("policy", COPYING)
def test_field_63_the_remedys_number_works_and_a_byte_less_does_not(
    tiny: Path, plan: Plan, policy: str, granule: int
) -> None:
    largest = max(k.nbytes for k in plan.keys)
    refused = run(tiny, config={"weight_budget": largest, "policy": policy, "granule": granule})
    assert refused.code == 13, "the head's scales must fit beside its codes"
    [least] = numbers(refused.error["remedy"])
    assert least == minimum_budget(plan, granule) and least % granule == 0
    assert {largest, least} <= numbers(refused.error["message"])
    for short in (1, granule):
        assert run(tiny, config={"weight_budget": least - short, "policy": policy, "granule": granule}).code == 13
    works = run(tiny, config={"weight_budget": least, "policy": policy, "granule": granule})
    assert works.streams == run(tiny).streams
    assert works.facts["peak_weight_mapped_bytes"] <= least


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weight_budget": "50%"}, r"give a granule of (?P<granule>\d+) bytes on a simulated card"),
        (
            {"weight_budget": "50%", "policy": "staging"},
            r"give a granule of (?P<granule>\d+) bytes on a simulated card",
        ),
        ({"vram_limit": 220_000}, r"give a granule of (?P<granule>\d+) bytes on a simulated card"),
        (
            {"weight_budget": 1000},
            r"give at least (?P<weight_budget>\d+) bytes and a granule of (?P<granule>\d+) bytes on a simulated card",
        ),
        (
            {"weight_budget": "50%", "granule": 65536},
            r"give at least \d+ bytes, or a granule of (?P<granule>\d+) bytes on a simulated card",
        ),
    ],
)
def test_a_granule_that_leaves_nothing_to_stream_is_what_the_remedy_names(
    tiny: Path, plan: Plan, asked: dict[str, Any], said: str
) -> None:
    """Granules of 2 MiB hold all of this model in one: to give the bytes of one would have nothing stream."""
    refused = run(tiny, config=asked)
    assert refused.code == 13
    told = re.fullmatch(said, refused.error["remedy"])
    assert told, refused.error["remedy"]
    mended = {name: int(value) for name, value in told.groupdict().items()}
    outcome = run(tiny, config={**asked, **mended})
    assert outcome.code == 0 and outcome.counters["htod_bytes"] > plan.weight_bytes, "it streams"
    larger = {**asked, **mended, "granule": 2 * mended["granule"]}
    assert "weight_budget" in mended or run(tiny, config=larger).code == 13, "the largest granule that will do"


@pytest.mark.parametrize("less", [0, 1, G, 2 * G])
def test_field_63_budgets_of_all_weights_and_a_little_less(tiny: Path, plan: Plan, less: int) -> None:
    outcome = run(tiny, config={"weight_budget": plan.weight_bytes - less, "granule": G})
    assert outcome.streams == run(tiny).streams
    assert outcome.broken_equations() == []
    assert outcome.facts["peak_weight_mapped_bytes"] <= plan.weight_bytes - less


def test_field_63_a_limit_on_everything(tiny: Path) -> None:
    """Too small: refused with what weights would have and need; the remedy's number works, and is kept; less is not."""
    refused = run(tiny, config={"vram_limit": 100_000, "granule": G})
    assert refused.code == 13
    [least] = numbers(refused.error["remedy"])
    assert {100_000} <= numbers(refused.error["message"]) and "KV" in refused.error["message"]
    assert run(tiny, config={"vram_limit": least - 1, "granule": G}).code == 13
    for policy in POLICIES:
        outcome = run(tiny, config={"vram_limit": least, "granule": G, "policy": policy}, generations=2)
        assert outcome.streams == run(tiny, generations=2).streams
        assert over_the_link(outcome.counters) > 0, "so small a limit streams"
        tables = 2 * 256 * 16 * 4
        used = outcome.counters["peak_committed_bytes"] + outcome.facts["workspace_bytes"] + tables
        assert used <= least
        assert outcome.counters["oversubscribed_bytes"] == 0
        assert outcome.broken_equations() == []


def test_a_limit_counts_the_cache_that_the_run_will_need(tiny: Path) -> None:
    """Longer runs and larger granules need more; the minimum says so."""

    def least(tokens: int, granule: int) -> int:
        error = run(tiny, tokens=tokens, config={"vram_limit": 1000, "granule": granule}).error
        return numbers(error["remedy"]).pop()

    assert least(8, G) < least(100, G) < least(100, 4 * G)


def test_both_bounds_at_once_take_the_smaller(tiny: Path) -> None:
    unbounded = run(tiny, config={"granule": G})
    for config in ({"weight_budget": 120_000, "vram_limit": 10**9}, {"weight_budget": 10**9, "vram_limit": 250_000}):
        outcome = run(tiny, config={**config, "granule": G})
        assert outcome.facts["budget_bytes"] < unbounded.facts["weight_bytes"]
        assert outcome.streams == unbounded.streams and outcome.counters["page_ins"] > 0


# -- failures of the device


VERBS = (
    "reserve",
    "create",
    "map",
    "unmap",
    "unreserve",
    "destroy",
    "alloc",
    "free",
    "copy_in",
    "fetch",
    "fetched",
    "launch",
)


class Failing(SimDevice):
    """A device whose `verb` fails at its `at`-th call, and at every later one."""

    def __init__(self, verb: str, at: int, error: EngineError) -> None:
        super().__init__(granule_bytes=G)
        self.calls = 0
        real: Callable[..., Any] = getattr(self, verb)

        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls >= at:
                raise error
            return real(*args)

        setattr(self, verb, call)


def run_on(device: SimDevice, tiny: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Outcome:
    """A run on that very device, under half the weights."""
    monkeypatch.setattr(engine_run, "make_device", lambda _: device)
    return run(tiny, config={"weight_budget": "50%", "granule": G, **config}, generations=2)


@pytest.mark.parametrize("policy", ["stable", "stable_slot"])
@pytest.mark.parametrize("verb", VERBS)
def test_field_59_a_verb_that_fails_ends_in_an_error_line_with_what_was_counted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, verb: str, policy: str
) -> None:
    """At the first call, in the middle and at the last: an error line, exit code of its class, no other ending."""
    stray: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", stray.append)
    whole = Failing(verb, 1 << 30, DeviceFailure("never"))
    expected = run_on(whole, tiny, monkeypatch, policy=policy)
    assert expected.code == 0 and whole.calls > 0
    for at in sorted({1, whole.calls // 2, whole.calls} - {0}):
        error = OutOfMemory("no room left") if verb == "create" else DeviceFailure("driver call failed", "check it")
        outcome = run_on(Failing(verb, at, error), tiny, monkeypatch, policy=policy)
        assert outcome.code == error.exit_code
        line, counters = outcome.error, outcome.error["counters"]
        assert (line["kind"], line["message"]) == (error.kind, error.message)
        assert not outcome.lines.of("result"), "exactly one ending"
        done = [g["ids"] for g in outcome.lines.of("generation")]
        assert done == [ids for ids, _ in expected.streams][: len(done)]
        flight = line["ids"] if len(done) < 2 and len(line["ids"]) < 8 else []
        assert counters.get("emitted_tokens", 0) == 8 * len(done) + len(flight)
        assert flight == expected.streams[0][0][: len(flight)]
        assert counters.get("device_htod_bytes", 0) <= counters.get("htod_bytes", 0)
    gc.collect()
    assert not stray, "nothing raises in a finalizer"


def test_a_device_without_room_is_out_of_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(SimDevice):
        """Ten granules and no more."""

        left = 10

        def create(self) -> Granule:
            if self.left == 0:
                raise OutOfMemory("no granule left of 10", "use a smaller weight budget")
            self.left -= 1
            return super().create()

    outcome = run_on(Small(granule_bytes=G), tiny, monkeypatch)
    assert (outcome.code, outcome.error["kind"]) == (14, "out_of_memory")
    assert outcome.error["remedy"] and outcome.error["counters"]["pool_creates"] == 10


def test_the_hosts_own_memory_running_out_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hungry(SimDevice):
        """Fails as numpy does when the host has no memory."""

        def alloc(self, nbytes: int, what: str) -> int:
            raise MemoryError(f"Unable to allocate {nbytes} bytes")

    outcome = run_on(Hungry(granule_bytes=G), tiny, monkeypatch)
    assert outcome.code == 14 and "host" in outcome.error["message"]


@pytest.mark.parametrize("part", ["_Q4", "_scales"])
def test_a_dropped_copy_is_seen(tiny: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The device counts at its own verb: a copy that the engine counted and nobody made breaks W10, if the poison that
    was read in its place did not end the run."""
    gate = next(k.index for k in plan.keys if k.name == "model.layers.1.mlp.gate_proj.MatMul.weight" + part)
    dropped: list[int] = []
    whole = run(tiny, generations=2).streams

    class Dropping(SimDevice):
        """Makes no copy of one key."""

        def host_range(self, key: int, source: Any, offset_bytes: int = 0) -> None:
            super().host_range(key, source, offset_bytes)
            if key == gate:
                self.spared = source.ctypes.data

        def copy_in(self, address: int, source: Any) -> None:
            if source.ctypes.data == self.spared:
                dropped.append(address)
            else:
                super().copy_in(address, source)

    outcome = run_on(Dropping(granule_bytes=G), tiny, monkeypatch)
    assert dropped
    if part == "_scales":
        assert outcome.code == 15, "poisoned scales are no numbers"
    else:
        assert [e["name"] for e in outcome.broken_equations()] == ["W10"]
        assert outcome.streams != whole


def test_the_prompt_must_fit(tiny: Path) -> None:
    for changes, says in (
        ({"prompt_ids": [512]}, "512"),
        ({"prompt_ids": [10**30]}, "vocabulary"),
        ({"tokens": 253}, "257"),
        ({"prompt_ids": [1] * 256}, "264"),
    ):
        outcome = run(tiny, **changes)
        assert outcome.code == 10 and says in outcome.error["message"] and outcome.error["remedy"]
    assert run(tiny, tokens=256 - len(TINY_PROMPT), ignore_eos=True).code == 0
