"""Steps asked for before the last tokens are read, and taken back where an end id came; one counter shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.ahead import Ahead
from engine.counters import COUNTERS
from engine.device.sim import SimDevice
from engine.errors import NonFiniteLogits
from tests.unit.engine_rig import TINY_PROMPT, Bench, Outcome, build_tiny, reconfigured, run
from tests.unit.test_engine_routing import mixture  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("ahead"))


def ending(model: Path, into: Path, at: int, prompt: Sequence[int] = TINY_PROMPT) -> tuple[Path, list[int]]:
    """The same model with the id that it gives at a place as its end id, and what it gives up to there."""
    ids = run(model, prompt_ids=list(prompt), tokens=at + 1, ignore_eos=True).streams[0][0]
    end = ids[at]
    return reconfigured(model, into, lambda c: c["model"].update(eos_token_id=end)), ids[: ids.index(end) + 1]


def test_steps_asked_for_ahead_change_neither_ids_nor_what_is_counted(tiny: Path) -> None:
    serial, bench = Bench(tiny, rows=(len(TINY_PROMPT),)), Bench(tiny, rows=(len(TINY_PROMPT),))
    bench.device.queues = True
    ahead = Ahead(bench.decoder)
    expected = [serial.prefill(TINY_PROMPT), *(serial.step() for _ in range(9))]
    found = [bench.prefill(TINY_PROMPT), *(ahead.step("yes" if n < 8 else "no")[0] for n in range(9))]
    assert found == expected and not ahead.is_under_way
    assert bench.decoder._cached[0].ids == serial.decoder._cached[0].ids
    for one, other in ((serial.tally, bench.tally), (serial.device.tally, bench.device.tally)):
        assert one.read() == other.read()
    assert bench.decoder._lengths == serial.decoder._lengths


@pytest.mark.parametrize(
    ("queues", "order"),
    [
        (True, ["replay", "fetch", "replay", "fetch", "fetched", "fetched"]),
        (False, ["replay", "fetch", "fetched"] * 2),  # asked ahead, it would be done, and timed, in the step before
    ],
)
def test_asking_ahead_is_one_replay_before_the_tokens_are_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, queues: bool, order: list[str]
) -> None:
    bench = Bench(tiny, rows=(len(TINY_PROMPT),))
    bench.prefill(TINY_PROMPT)
    bench.step()
    bench.step()
    monkeypatch.setattr(bench.device, "queues", queues)
    seen: list[str] = []
    for name in ("replay", "fetch", "fetched"):
        verb = getattr(bench.device, name)

        def told(*given: Any, verb: Any = verb, name: str = name) -> Any:
            seen.append(name)
            return verb(*given)

        monkeypatch.setattr(bench.device, name, told)
    ahead = Ahead(bench.decoder)
    ahead.step("yes")
    ahead.step("no")
    assert seen == order


@pytest.mark.parametrize("queues", [True, False])
@pytest.mark.parametrize("layout", ["seq-major", "head-major"])
def test_a_step_taken_back_leaves_the_decoder_as_it_was(tiny: Path, layout: str, queues: bool) -> None:
    serial, bench = (Bench(tiny, rows=(len(TINY_PROMPT),), layout=layout) for _ in range(2))
    bench.device.queues = queues
    ahead = Ahead(bench.decoder)
    expected = [serial.prefill(TINY_PROMPT), *(serial.step() for _ in range(5))]
    assert [bench.prefill(TINY_PROMPT), *(ahead.step("maybe")[0] for _ in range(5))] == expected
    under_way = [ahead.is_under_way]
    for _ in range(2):
        ahead.end()
        under_way.append(ahead.is_under_way)
    assert under_way == [True, False, False] and bench.length() == serial.length()
    assert bench.tally.read()["discarded_steps"] == 1
    assert bench.decoder._cached == serial.decoder._cached and bench.decoder._lengths == serial.decoder._lengths
    assert [bench.step() for _ in range(4)] == [serial.step() for _ in range(4)], "and it goes on from there"
    assert bench.logits().tobytes() == serial.logits().tobytes()


def both(monkeypatch: pytest.MonkeyPatch, model: Path, **how: Any) -> tuple[Outcome, Outcome]:
    """A run whose device is done with a step when it was asked for, and one whose device goes on beside the host."""
    waits = run(model, **how)
    with monkeypatch.context() as patch:
        patch.setattr(SimDevice, "queues", True)
        goes_on = run(model, **how)
    return waits, goes_on


def but_time(outcome: Outcome) -> dict[str, Any]:
    """All counters but the clock's."""
    return {n: v for n, v in outcome.counters.items() if COUNTERS[n].scope != "clock"}


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "resident": ({}, 1),
    "staging": ({"policy": "staging", "weight_budget": "60%", "granule": 4096, "kv_min_bucket": 64}, 1),
    "zero_copy": ({"policy": "zero_copy", "weight_budget": "60%"}, 1),
    "head-major": ({"kv_layout": "head-major"}, 1),
    "prefix_reuse": ({"prefix_reuse": True}, 1),
    "paged in eager seams": ({"policy": "lru", "weight_budget": "60%", "granule": 4096}, 0),
    "no capture": ({"capture": False}, 0),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_an_end_id_ends_as_without_and_the_step_too_many_has_a_counter(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    model, ids = ending(tiny, tmp_path / "m", 6)
    given, discarded = CONFIGS[config]
    assert len(ids) > 4, "warm, recorded, and replayed since"
    outcomes = both(monkeypatch, model, tokens=12, generations=2, warmups=1, config=given)
    for outcome in outcomes:
        lines = outcome.lines.of("generation")
        assert [(g["ids"], g["stop_reason"]) for g in lines] == [(ids, "eos")] * 3
        assert lines[0]["gaps"] == lines[1]["gaps"] == lines[2]["gaps"]
        assert [len(g["step_ns"]) for g in lines] == [len(ids) - 1] * 3
        assert outcome.broken_equations() == []
        assert outcome.counters["discarded_steps"] == 2 * discarded
        assert outcome.facts["steps_given"] == 3 * (len(ids) - 1)
        assert outcome.facts["steps_asked"] == 3 * (len(ids) - 1 + discarded)
        assert outcome.facts["measured_tokens"] == outcome.counters["emitted_tokens"] == 2 * len(ids)
    assert but_time(outcomes[0]) == but_time(outcomes[1])
    assert outcomes[0].facts == outcomes[1].facts


def test_where_no_end_id_comes_nothing_is_thrown_away(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reconfigured(tiny, tmp_path / "m", lambda c: c["model"].update(eos_token_id=511))
    free = run(tiny, tokens=12, ignore_eos=True)
    for outcome in both(monkeypatch, model, tokens=12):
        assert outcome.streams == free.streams and outcome.counters["discarded_steps"] == 0
        assert but_time(outcome) == but_time(free)


def test_a_step_that_may_be_in_vain_takes_no_room_in_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the end lies against buckets and granules of a few positions, the cache is as if it were the last."""
    discarded = [ended(tiny, tmp_path / str(at), monkeypatch, at) for at in range(4, 12)]
    assert set(discarded) == {0, 1}, "at the end of a bucket there is none"


def ended(tiny: Path, into: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> int:
    """A run that ends there, held against one of as many tokens; how many steps it threw away."""
    model, ids = ending(tiny, into, at)
    how: dict[str, Any] = {"tokens": 20, "config": {"kv_min_bucket": 8, "granule": 4096, "kv_layout": "head-major"}}
    exact = run(tiny, **{**how, "tokens": len(ids)}, ignore_eos=True)
    for outcome in both(monkeypatch, model, **how):
        assert outcome.streams == exact.streams and outcome.broken_equations() == []
        for name in ("kv_committed_bytes", "peak_kv_committed_bytes", "kv_growths", "invalidations", "captures"):
            assert outcome.counters[name] == exact.counters[name], name
        assert outcome.counters["decode_steps"] - outcome.counters["discarded_steps"] == len(ids) - 1
    return int(outcome.counters["discarded_steps"])


def test_a_batch_throws_away_one_step_when_its_last_sequence_stops(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = ending(tiny, tmp_path / "m", 6)
    for outcome in both(monkeypatch, model, tokens=12, generations=2, config={"batch": 3}):
        [line, _] = outcome.lines.of("generation")
        assert [g["ids"] for g in (line, *line["further"])] == [ids] * 3
        assert outcome.counters["discarded_steps"] == 2 and outcome.broken_equations() == []


def test_a_mixtures_choices_in_vain_are_counted_and_not_taken_down(
    mixture: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = ending(mixture, tmp_path / "m", 6)
    traces = []
    for n, queues in enumerate((False, True)):
        monkeypatch.setattr(SimDevice, "queues", queues)
        outcome = run(model, tokens=12, routing_out=str(tmp_path / f"{n}.json"))
        assert outcome.streams[0][0] == ids and outcome.broken_equations() == []
        assert outcome.counters["discarded_steps"] == 1
        traces.append((tmp_path / f"{n}.json").read_bytes())
    assert traces[0] == traces[1]
    told = run(model, tokens=len(ids), ignore_eos=True, routing_out=str(tmp_path / "exact.json"))
    assert traces[0] == (tmp_path / "exact.json").read_bytes()
    assert outcome.counters["routed_bytes"] > told.counters["routed_bytes"]


def test_numbers_of_a_step_in_vain_end_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would come after the end id is not finite: without it the run would have ended well, and it does."""
    model, ids = ending(tiny, tmp_path / "m", 6)
    monkeypatch.setattr(SimDevice, "queues", True)
    fetched, seen = SimDevice.fetched, [0]

    def spoilt(self: SimDevice, fetch: Any) -> bytes:
        seen[0] += 1
        raw = fetched(self, fetch)
        return b"\0\0\xc0\x7f" + raw[4:] if seen[0] == len(ids) + 1 else raw

    monkeypatch.setattr(SimDevice, "fetched", spoilt)
    outcome = run(model, tokens=12)
    assert outcome.code == 0 and outcome.streams[0][0] == ids and seen[0] == len(ids) + 1
    seen[0] = 1  # one earlier: now it is a token's own
    assert run(model, tokens=12).error["code"] == NonFiniteLogits.exit_code
