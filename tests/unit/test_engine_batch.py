"""Batches: each sequence is itself alone bit for bit, whatever stands beside it, and weights are read once a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.__main__ import main
from engine.batch import Spread, chunk_rows, fixed_bytes, parts
from engine.config import POLICIES, parse_request
from engine.device.base import Launch
from engine.errors import BadRequest, NonFiniteLogits
from engine.graph import Graph
from engine.kv_layout import LAYOUTS, Placement
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from tests.unit.engine_rig import TINY_PROMPT, Bench, Trace, build_tiny, over_the_link, reconfigured, run, traces

G = 4096
LENGTHS = (1, 7, 64, 20)
STEPS = 6
CHUNK = 64
SAMPLES = {
    "dense": "llama-int4-cuda",
    "states": "qwen35-int4-cuda",
    "experts": "qwen35moe-int4raw-cuda",
    "window": "gemma2-int4-cpu",
    "packed": "phi3-int4-cuda",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("batch"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Graph:
    """The same, loaded once."""
    return load(folder)


def sample(checkout: Path, kind: str) -> Graph:
    """One of the exporter's models."""
    models = checkout.parent / "shared" / "models"
    if not models.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return load(models / SAMPLES[kind])


def ragged(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Prompts of these lengths, from all over the vocabulary."""
    drawn = np.random.default_rng(39)
    return [[int(i) for i in drawn.integers(0, vocabulary, n)] for n in lengths]


def bench_of(graph: Graph, prompts: Sequence[Sequence[int]], chunk: int = CHUNK, **settings: Any) -> Bench:
    return Bench(graph, rows=sorted(chunk_rows(prompts, chunk)), sequences=len(prompts), **settings)


def alone(graph: Graph, prompts: Sequence[Sequence[int]], steps: int = STEPS) -> list[Trace]:
    """Each prompt by itself: all weights in, no capture."""
    return [traces(bench_of(graph, [p], capture=False), [p], steps=steps)[0] for p in prompts]


# ---- a sequence is itself alone


def test_field_39_each_sequence_of_a_ragged_batch_is_the_one_alone(tiny: Graph) -> None:
    """Logits bit for bit, in three generations of one process, under every policy, half budget and capture."""
    prompts = ragged(tiny.info.vocabulary)
    expected = alone(tiny, prompts)
    half = Bench(tiny).plan.weight_bytes // 2
    for policy, capture, budget in product(POLICIES, (True, False), (None, half)):
        bench = bench_of(tiny, prompts, policy=policy, capture=capture, budget=budget)
        for _ in range(3):
            assert traces(bench, prompts) == expected, (policy, capture, budget)
        assert bool(over_the_link(bench.tally.read())) == (budget is not None)
        bench.close()


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_grows_through_the_buckets_of_its_longest(tiny: Graph, layout: str, *, capture: bool) -> None:
    """In two generations, with heads that move in one layout: no bit feels it, and every copy is counted."""
    prompts = ragged(tiny.info.vocabulary, (1, 7, 14, 3))
    expected = alone(tiny, prompts, steps=20)
    bench = bench_of(tiny, prompts, capture=capture, layout=layout, least=8)
    for _ in range(2):
        assert traces(bench, prompts, steps=20) == expected
    counters = bench.tally.read()
    assert counters["kv_growths"] == 2 * 2, "16 to 32 to 64, a generation"
    positions = sum(sum(map(len, prompts)) + steps * len(prompts) for steps in (2, 18))  # with 16 and 32 in the longest
    copied = 2 * positions * bench.plan.kv.bytes_per_token if layout == "head-major" else 0
    assert counters.get("kv_growth_dtod_bytes", 0) == copied == bench.device.tally.read().get("device_dtod_bytes", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_that_share_with_what_is_cached_are_as_fresh(folder: Path, layout: str) -> None:
    """Each keeps all but its last token, or nothing where it has but one; the totals hold."""
    settings: dict[str, Any] = {"prompt_ids": [1], "further_prompts": ragged(512)[1:], "generations": 2, "warmups": 1}
    config = {"kv_layout": layout, "kv_min_bucket": 8, "granule": G}
    fresh, kept = (run(folder, config={**config, "prefix_reuse": reuse}, **settings) for reuse in (False, True))
    streams = [[(g["ids"], g["gaps"], g["further"]) for g in o.lines.of("generation")] for o in (fresh, kept)]
    assert streams[0] == streams[1]
    assert kept.counters["prefix_hit_tokens"] == 2 * sum(n - 1 for n in LENGTHS)
    assert kept.broken_equations() == fresh.broken_equations() == []


def test_one_sequence_is_taken_back_and_its_neighbours_are_not(tiny: Graph) -> None:
    prompts = ragged(tiny.info.vocabulary, (7, 5, 9))
    bench = bench_of(tiny, prompts)
    first = traces(bench, prompts, steps=3)
    for _ in range(2):
        bench.decoder.rewind(5 + 1, 1)
        bench.decoder.feed([first[0][3][0], first[1][1][0], first[2][3][0]])
        emitted = bench.decoder.step()
        assert (emitted[1].token, emitted[1].gap) == first[1][2][:2]
    assert bench.decoder._lengths == [7 + 3 + 2, 5 + 1 + 1, 9 + 3 + 2], "the neighbours went on"


@pytest.mark.parametrize("chunk", [1, 7, 10])
def test_prompts_in_chunks_and_in_any_order_of_sequences(tiny: Graph, chunk: int) -> None:
    prompts = ragged(tiny.info.vocabulary)
    expected = alone(tiny, prompts)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        turned = [prompts[s] for s in order]
        found = traces(bench_of(tiny, turned, chunk), turned, chunk)
        assert found == [expected[s] for s in order]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("kind", SAMPLES)
def test_field_39_a_ragged_batch_of_every_kind_of_decoder(checkout: Path, kind: str, capture: bool) -> None:
    """States, experts' choices and windows are each sequence's own; resident, then half under each policy."""
    graph = sample(checkout, kind)
    prompts = ragged(graph.info.vocabulary)
    expected = alone(graph, prompts, steps=3)
    plan, granule = Bench(graph).plan, 16384
    half = max(plan.weight_bytes // 2, minimum_budget(plan, granule))
    for policy, budget in (("stable", None), *((policy, half) for policy in POLICIES)):
        bench = bench_of(graph, prompts, policy=policy, capture=capture, budget=budget, granule=granule)
        assert traces(bench, prompts, steps=3) == expected, (policy, budget)
        bench.close()


def test_field_39_an_id_that_pads_elsewhere_is_a_token_here(folder: Path, tiny: Graph, tmp_path: Path) -> None:
    """The pad id in front of, inside and behind a prompt counts as any other; which id is named pad changes nothing."""
    pad = 99
    named = load(reconfigured(folder, tmp_path / "m", lambda c: c["model"].update(pad_token_id=pad)))
    prompts = [[pad, pad, 1, 17], [1, 17, 42], [1, pad, 17, 42, pad], [pad]]
    expected = alone(tiny, prompts)
    assert traces(bench_of(named, prompts), prompts) == expected
    bare = alone(tiny, [[i for i in prompt if i != pad] or [1] for prompt in prompts])
    assert [a == b for a, b in zip(expected, bare, strict=True)] == [False, True, False, False]


def test_a_length_taken_from_a_neighbour_would_show(tiny: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The field's own defect, planted: positions counted from the longest prompt are right for that one alone."""
    prompts = ragged(tiny.info.vocabulary, (7, 12))  # in one granule, so that nothing but numbers can tell
    expected = alone(tiny, prompts)
    own = Launch.alone

    def from_the_longest(launch: Launch, sequence: int) -> Launch:
        made = own(launch, sequence)
        if launch.step.kernel == "advance":
            return made
        longest = own(launch, 1)
        mixed = [b if b.operand.name == "length" else a for a, b in zip(made.placed, longest.placed, strict=True)]
        return replace(made, placed=tuple(mixed))

    bench = bench_of(tiny, prompts)
    bench.decoder.reset()
    bench.decoder.prefill(prompts, CHUNK)
    monkeypatch.setattr(Launch, "alone", from_the_longest)
    bench.device._bound.clear()  # type: ignore[attr-defined]
    token = bench.kv.geometry.token_bytes
    for layer, what in product(range(bench.kv.geometry.layers), ("key", "value")):  # never written: read as numbers
        bench.device.fill(bench.kv.address(layer, what) + 7 * token, 6 * token, 0)
    found = bench.decoder.step()
    assert found[1].token == expected[1][1][0] and found[1].gap == expected[1][1][1]
    assert found[0].gap != expected[0][1][1]


# ---- weights are read once a step


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("policy", ["lru", "stable_slot"])
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_bytes_per_token_fall_as_one_over_the_batch(folder: Path, policy: str, batch: int, capture: bool) -> None:
    """Under a cyclic scan: totals of a generation are those of one sequence, prompts of one length included."""
    config = {"policy": policy, "weight_budget": "50%", "granule": G, "capture": capture}
    one, many = (run(folder, config={**config, "batch": n}, ignore_eos=True, tokens=16) for n in (1, batch))
    for name in ("htod_bytes", "page_ins", "touches", "forward_steps", "step_kernels", "kernel_runs", "host_syncs"):
        assert many.counters[name] == one.counters[name] > 0, name
    assert many.facts["measured_tokens"] == batch * one.facts["measured_tokens"] == batch * 16
    for name in ("gather_bytes", "kv_committed_bytes", "emitted_tokens"):
        assert many.counters[name] == batch * one.counters[name], name
    assert many.counters.get("graph_nodes") == one.counters.get("graph_nodes")
    assert many.broken_equations() == one.broken_equations() == []
    assert many.facts["floor_bytes_per_token"] * batch == one.facts["floor_bytes_per_token"] > 0


def test_ragged_prompts_share_a_decode_step_too(folder: Path) -> None:
    config = {"policy": "lru", "weight_budget": "50%", "granule": G}
    one = run(folder, config=config, prompt_ids=[1], ignore_eos=True)
    many = run(folder, config=config, prompt_ids=[1], further_prompts=ragged(512)[1:], ignore_eos=True, generations=3)
    for g in many.lines.of("generation"):
        decode, alone_ = g["counters"]["decode"], one.lines.of("generation")[0]["counters"]["decode"]
        assert decode["htod_bytes"] / decode["emitted_tokens"] * 4 == alone_["htod_bytes"] / alone_["emitted_tokens"]
    assert many.broken_equations() == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_of_a_batch_hold_with_and_without_arithmetic(folder: Path, policy: str, layout: str) -> None:
    config = {"policy": policy, "weight_budget": "60%", "granule": G, "prefill_chunk": 16}
    settings: dict[str, Any] = {
        "config": {**config, "kv_layout": layout, "kv_min_bucket": 8},
        "further_prompts": ragged(512)[1:],
        "generations": 2,
        "warmups": 1,
        "ignore_eos": True,
    }
    full, bare = run(folder, **settings), run(folder, arithmetic="none", **settings)
    assert full.broken_equations() == [] and len(full.result["equations"]) >= 20
    assert bare.result["equations"] == full.result["equations"] and bare.facts == full.facts
    drop = ("prefill_ns", "decode_ns", "min_logit_margin")
    assert [{k: v for k, v in x.counters.items() if k not in drop} for x in (full, bare)] == [
        {k: v for k, v in full.counters.items() if k not in drop}
    ] * 2
    assert full.facts["batch"] == 4 and full.facts["measured_tokens"] == 2 * 4 * 8


# ---- ends


def test_a_sequence_that_stopped_ends_there_and_the_others_go_on(folder: Path, tmp_path: Path) -> None:
    prompts = [list(TINY_PROMPT), [7], [5, 6]]
    free = [run(folder, prompt_ids=p, tokens=8, ignore_eos=True).streams[0] for p in prompts]
    end = free[1][0][2]
    ended = reconfigured(folder, tmp_path / "m", lambda c: c["model"].update(eos_token_id=end))
    single = [run(ended, prompt_ids=p, tokens=8).lines.of("generation")[0] for p in prompts]
    assert {g["stop_reason"] for g in single} == {"eos", "length"}, "one must stop and one go on"
    both = run(ended, prompt_ids=prompts[0], further_prompts=prompts[1:], tokens=8, generations=2)
    for line in both.lines.of("generation"):
        for own, g in zip([line, *line["further"]], single, strict=True):
            assert (own["ids"], own["gaps"], own["stop_reason"]) == (g["ids"], g["gaps"], g["stop_reason"])
    given = sum(len(g["ids"]) for g in single)
    assert both.facts["measured_tokens"] == both.counters["emitted_tokens"] == 2 * given
    assert both.broken_equations() == []
    early = run(ended, prompt_ids=[7], config={"batch": 3}, tokens=8)
    assert len(early.lines.of("generation")[0]["step_ns"]) == 2, "a batch ends when all its sequences have"


def test_numbers_of_a_stopped_sequence_end_nothing(tiny: Graph) -> None:
    prompts = ragged(tiny.info.vocabulary, (7, 5, 9))
    expected = alone(tiny, prompts)
    for stopped in (True, False):
        bench = bench_of(tiny, prompts)
        bench.decoder.reset()
        bench.decoder.prefill(prompts, CHUNK)
        bench.device.fill(bench.kv.address(0, "value") + bench.kv.stride, 5 * bench.kv.geometry.token_bytes, 0xFF)
        if not stopped:
            with pytest.raises(NonFiniteLogits, match="sequence 2 at position 5 "):
                bench.decoder.step()
            continue
        bench.decoder.stop(1)
        for at in range(1, STEPS + 1):
            emitted = bench.decoder.step()
            assert np.isnan(emitted[1].gap)
            assert [(emitted[s].token, emitted[s].gap) for s in (0, 2)] == [expected[s][at][:2] for s in (0, 2)]


# ---- the command


def test_prompts_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prompt a sequence; told one after another, with tokens and rate of all together."""
    words = [
        "run",
        "--model",
        str(folder),
        "--tokens",
        "4",
        "--ignore-eos",
        "--prompt-ids",
        "1 17 42",
        "--prompt-ids",
        "7",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    ids = [run(folder, prompt_ids=p, tokens=4, ignore_eos=True).streams[0][0] for p in ([1, 17, 42], [7])]
    lines = [line for line in printed.splitlines() if line.startswith(("sequence", "generated_token_ids"))]
    assert [line.partition(" min_gap")[0] for line in lines] == [
        "sequence 1 of 2: tokens=4 stop=length",
        f"generated_token_ids: {' '.join(map(str, ids[0]))}",
        "sequence 2 of 2: tokens=4 stop=length",
        f"generated_token_ids: {' '.join(map(str, ids[1]))}",
    ]
    assert "config: batch=2 source=derived" in printed and " tokens=8\n" in printed and "BROKEN" not in printed
    assert main([*words, "--batch", "3"]) == 0
    assert "sequence 3 of 3: tokens=4 stop=length" in (third := capsys.readouterr().out)
    assert third.count(f"generated_token_ids: {' '.join(map(str, ids[0]))}") == 2
    assert main([*words, "--batch", "1"]) == 10
    assert "there are 2 prompts" in capsys.readouterr().err
    assert main([*words, "--prompt-ids", "-4"]) == 10


def test_text_prompts_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "run",
        "--model",
        str(folder),
        "--tokens",
        "2",
        "--ignore-eos",
        "--json",
        "--prompt",
        "ab",
        "--prompt",
        "b",
    ]
    assert main(words) == 0
    [line] = [one for one in map(json.loads, capsys.readouterr().out.splitlines()) if one["type"] == "generation"]
    assert len(line["further"]) == 1 and len(line["further"][0]["ids"]) == 2
    assert main([*words[:-1], ""]) == 10


# ---- memory


@pytest.mark.parametrize("batch", [1, 3])
def test_every_sequence_is_charged_to_the_limit(folder: Path, batch: int) -> None:
    """One byte below what weights, caches, control, workspace and tables of all sequences need is refused."""
    bench = Bench(folder, rows=(4,))
    plan = bench.plan
    fixed = fixed_bytes(bench.plans, batch)
    cached = batch * Placement(plan.kv, "seq-major", 256).committed_bytes(len(TINY_PROMPT) + 8 - 1, G)
    least = fixed + cached + minimum_budget(plan, G)
    assert run(folder, config={"vram_limit": least - 1, "granule": G, "batch": batch}).code == 13
    fits = run(folder, config={"vram_limit": least, "granule": G, "batch": batch})
    assert fits.broken_equations() == []
    assert fits.counters["kv_committed_bytes"] == cached
    assert fits.counters["oversubscribed_bytes"] == 0


def test_one_sequence_takes_its_own_bytes_and_no_more() -> None:
    assert Spread(1000, 1).total_bytes == 1000
    assert (Spread(1000, 3).stride, Spread(1000, 3).total_bytes) == (1024, 2 * 1024 + 1000)


def test_states_of_all_sequences_are_charged(checkout: Path) -> None:
    bench = Bench(sample(checkout, "states"))
    one, two, three = (fixed_bytes(bench.plans, n) for n in (1, 2, 3))
    assert three - two == two - one >= sum(s.nbytes for s in bench.plan.states) + bench.plan.workspace_bytes > 0


# ---- prompts


def test_chunks_of_one_length_go_in_together() -> None:
    given = [(p.sequences, p.ids, p.ahead) for p in parts([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 2)]
    assert given == [
        ((0, 1, 2), ((1, 2), (4, 5), (6, 7)), (1, 0, 2)),
        ((0,), ((3,),), (0,)),
        ((2,), ((8, 9),), (0,)),
    ]


def test_a_batch_takes_its_prompts_in_turn() -> None:
    base: dict[str, Any] = {"protocol": 1, "model": "m", "prompt_ids": [1], "tokens": 1}
    assert parse_request(base).prompts == ((1,),)
    two = {**base, "further_prompts": [[2, 3]]}
    assert parse_request(two).prompts == ((1,), (2, 3))
    assert parse_request({**two, "config": {"batch": 5}}).prompts == ((1,), (2, 3), (1,), (2, 3), (1,))
    with pytest.raises(BadRequest, match="batch is 1 and there are 2 prompts"):
        parse_request({**two, "config": {"batch": 1}})
    prompts: tuple[Any, ...] = ([2], [[]], "2", [[-1]], {"a": 1}, [[True]])
    for wrong in prompts:
        with pytest.raises(BadRequest):
            parse_request({**base, "further_prompts": wrong})
    for number in (0, -1, 1.5, True, "2"):
        with pytest.raises(BadRequest, match="batch is"):
            parse_request({**base, "config": {"batch": number}})
