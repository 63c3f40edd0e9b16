"""A sequence that is taken back, and prompts that keep what they share: every bit as if the cache had been empty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.bind import lower
from engine.errors import BadRequest, UnsupportedModel
from engine.graph import DTYPES, Graph, Value
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.prefix import Cached
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, run
from tests.unit.engine_small import CONTEXT, HEAD_SIZE, Small, branch
from tests.unit.test_engine_length_tables import decoder as long_rope
from tests.unit.test_engine_length_tables import moving, tables

SAMPLES = ("tiny", "qwen2-int4-cuda", "gemma2-int4-cpu", "phi3-int4-cuda")
STEPS = 4
Trace = list[tuple[int, float, bytes]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("prefix"))


@pytest.fixture(scope="module", params=SAMPLES)
def graph(request: pytest.FixtureRequest, tiny: Path, checkout: Path) -> Graph:
    """The seeded model and exported ones: float16, sliding windows, long rope."""
    if request.param == "tiny":
        return load(tiny)
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return load(folder / request.param)


def bench(graph: Graph, **changes: Any) -> Bench:
    """Plans for any prompt of up to 12 tokens."""
    return Bench(graph, rows=range(1, 13), least=4, **changes)


def go_on(b: Bench, emitted: Any, rows: int) -> Trace:
    """What a prompt whose last pass had `rows` rows gave, and the steps after it."""
    one = [(emitted.token, emitted.gap, b.prompt_logits(rows).tobytes())]
    for _ in range(STEPS):
        emitted = b.step()
        one.append((emitted.token, emitted.gap, b.logits().tobytes()))
    return one


def fresh(graph: Graph, prompt: Sequence[int], **changes: Any) -> Trace:
    """A prompt in an empty cache."""
    b = bench(graph, **changes)
    return go_on(b, b.prefill(prompt), len(prompt))


def again(b: Bench, prompt: Sequence[int]) -> tuple[int, Trace]:
    """A prompt in a cache that holds another sequence: positions kept, and what it gave."""
    kept, emitted = b.again(prompt)
    return kept, go_on(b, emitted, len(prompt) - kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capture", [True, False])
def test_field_35_a_prompt_in_a_warm_cache_equals_a_fresh_one(graph: Graph, layout: str, capture: bool) -> None:
    """After itself, after a longer one that begins with it, after one that shares only the first token, and on from
    its own answer; where the cached prompt is longer or equal, the last position is computed again."""
    ids = [int(i) for i in np.random.default_rng(3).choice(graph.info.vocabulary, 10, replace=False)]
    prompt, longer, other = ids[:6], ids[:9], [ids[0], *ids[9:4:-1]]
    expected = fresh(graph, prompt, capture=False)
    b = bench(graph, layout=layout, capture=capture)
    assert again(b, prompt) == (0, expected), "an empty cache has nothing to share"
    assert again(b, prompt) == (5, expected)
    again(b, longer)
    assert again(b, prompt) == (5, expected)
    assert again(b, longer)[1] == fresh(graph, longer, capture=False)
    assert again(b, other) == (1, fresh(graph, other, capture=False))
    assert again(b, prompt) == (1, expected)
    answered = [*prompt, *(token for token, _, _ in expected[:3])]
    assert again(b, answered) == (8, fresh(graph, answered, capture=False))
    read = b.tally.read()
    assert read["prefix_hit_tokens"] * b.plan.kv.bytes_per_token == read["prefix_hit_bytes"] > 0
    unrelated = [ids[9], *prompt[1:]]
    assert again(b, unrelated) == (0, fresh(graph, unrelated, capture=False))
    b.close()


def quantised(seed: int = 3) -> Graph:
    """A decoder with a cache of int8."""
    s = Small(cache="int8", layers=1, seed=seed)
    x = s.embedded()
    scales = {12 + i: s.weight(f"scale.{i}", np.asarray([0.02 + i / 100], np.float32)) for i in range(2)}
    kinds: dict[str, Any] = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    s.head(s.attended(x, more=scales, **kinds))
    return s.graph()


def plain(dtype: str, **attributes: Any) -> Graph:
    """A decoder with a cache of a float type."""
    s = Small(cache=dtype, seed=3)
    s.head(s.attended(s.embedded(), **attributes))
    return s.graph()


CACHES = {
    **{dtype: plain(dtype) for dtype in ("float32", "float16", "bfloat16")},
    "int8": quantised(),
    "window": plain("float16", local_window_size=3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("back", [1, 3, 5])
def test_field_54_rewound_by_one_and_by_odd_counts(cache: str, back: int, layout: str) -> None:
    """Other tokens go in, are taken back, and leave no trace: what follows is what followed the first time."""
    graph = CACHES[cache]
    name = {"window": "float16"}.get(cache, cache)
    assert (graph.inputs["past.0.key"].dtype, lower(graph, 1).kv.token_bytes) == (name, 8 * DTYPES[name].itemsize)
    b = bench(graph, layout=layout)
    b.prefill([1, 2, 3])
    fed = [4, 5, 6, 7, 8, 9, 10, 11]
    first = [(b.force(token), b.logits().tobytes()) for token in fed]
    b.decoder.rewind(b.length() - back)
    assert b.length() == 3 + len(fed) - back
    for token in (11, 1, 2, 3, 4, 5)[: back + 1]:
        b.force(token)
    b.decoder.rewind(3 + len(fed) - back)
    assert [(b.force(token), b.logits().tobytes()) for token in fed[-back:]] == first[-back:]
    b.close()


@pytest.mark.parametrize("dtype", ["uint8", "float8e4m3fn", "int4"])
def test_field_54_a_cache_of_a_type_that_is_not_served_is_refused_at_load(dtype: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        lower(plain(dtype), 1)
    assert f"KV cache of type {dtype} is not served" in " ".join((str(caught.value), *caught.value.reasons))


def test_field_54_types_that_differ_from_layer_to_layer_are_refused_at_load() -> None:
    """One type is never read as another: not keys as values, nor one layer as the next."""
    s = Small(cache="float16", layers=2, seed=3)
    s.inputs["past.1.value"] = Value("past.1.value", "int8", s.inputs["past.1.value"].shape)
    s.attended(s.embedded())
    s.head(s.attended("attended.0", layer=1))
    with pytest.raises(UnsupportedModel) as caught:
        lower(s.graph(), 1)
    assert "KV cache of type float16, int8" in " ".join((str(caught.value), *caught.value.reasons))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dead_positions_are_poison(tiny: Path, layout: str) -> None:
    """A cache that claimed more positions than were kept would show in the logits."""
    b = Bench(tiny, layout=layout, rows=(4,))
    b.prefill(TINY_PROMPT)
    b.decoder.rewind(2)
    b.decoder._lengths[0] = 4
    b.device.copy_in(b.decoder.memory.control, np.asarray([4], np.int64))
    with pytest.raises(Exception, match="not finite"):
        b.step()


def test_a_graph_outlives_a_rewind(tiny: Path) -> None:
    b = Bench(tiny, rows=(4,))
    b.prefill(TINY_PROMPT)
    for _ in range(4):
        b.step()
    b.decoder.rewind(5)
    for _ in range(4):
        b.step()
    read = b.tally.read()
    assert (read["captures"], read["replays"], read.get("invalidations", 0)) == (1, 6, 0)


@pytest.mark.parametrize("tokens", [-1, 9])
def test_more_positions_than_are_cached_cannot_be_kept(tiny: Path, tokens: int) -> None:
    b = Bench(tiny, rows=(4,))
    b.prefill(TINY_PROMPT)
    with pytest.raises(BadRequest, match=f"{tokens} positions are to be kept, 4 are cached"):
        b.decoder.rewind(tokens)


# -- what cannot be taken back


def test_a_recurrent_state_is_refused_by_name(checkout: Path) -> None:
    folder = checkout.parent / "shared" / "models" / "qwen35-int4-cuda"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    b = Bench(folder, rows=(4,))
    b.prefill(TINY_PROMPT)
    with pytest.raises(BadRequest, match=f"state '{b.plan.states[0].name}' holds all positions in one"):
        b.decoder.rewind(3)
    outcome = run(folder, config={"prefix_reuse": True}, warmups=1)
    assert outcome.code == 10 and b.plan.states[0].name in outcome.error["message"]


@pytest.mark.parametrize("form", ["chosen", "moved"])
def test_a_prompt_of_the_other_rotary_table_shares_nothing(form: str) -> None:
    """Keys of a prompt above the threshold were turned by the long table: the same ids below it have other keys."""
    random = np.random.default_rng(1)
    near, far = tables(random, 6), tables(random, CONTEXT)
    if form == "moved":
        graph = moving(6, far, near)
    else:
        graph = long_rope("shape", 6, branch(far, as_weights=True), branch(near, as_weights=True))
    assert near["cos"].shape == (6, HEAD_SIZE // 2)
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    b = bench(graph)
    b.prefill(ids[:7])
    with pytest.raises(BadRequest, match="rotated as one above 6 positions, 4 would be left"):
        b.decoder.rewind(4)
    assert again(b, ids[:5])[0] == 0
    b.decoder.rewind(3)
    b.decoder.rewind(1)
    assert again(b, ids) == (0, fresh(graph, ids))
    assert again(b, ids) == (7, fresh(graph, ids))
    assert again(b, ids[:7]) == (6, fresh(graph, ids[:7]))
    with pytest.raises(BadRequest, match="rotated as one above 6 positions, 6 would be left"):
        b.decoder.rewind(6)
    assert again(b, ids[:6]) == (0, fresh(graph, ids[:6])), "its answer went past the threshold, its keys did not"
    assert again(b, ids[:6]) == (5, fresh(graph, ids[:6]))


@pytest.mark.parametrize(
    ("cached", "prompt", "kept"),
    [([], [1], 0), ([1], [1], 0), ([1, 2], [1, 2], 1), ([1, 2, 3], [1, 2], 1), ([1, 2], [1, 2, 3], 2), ([2], [1], 0)],
)
def test_the_last_token_is_never_kept(cached: list[int], prompt: list[int], kept: int) -> None:
    assert Cached((), cached).shared(prompt) == kept


# -- runs


@pytest.mark.parametrize("arithmetic", ["full", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_computes_only_the_last_position_of_a_prompt_again(tiny: Path, layout: str, arithmetic: str) -> None:
    config = {"kv_layout": layout, "kv_min_bucket": 4, "granule": 4096}
    cold = run(tiny, config=config, warmups=1, generations=2)
    asked = {"warmups": 1, "generations": 2, "arithmetic": arithmetic}
    warm = run(tiny, config={**config, "prefix_reuse": True}, ignore_eos=arithmetic == "none", **asked)
    assert warm.broken_equations() == [] and cold.broken_equations() == []
    assert (cold.counters["prefix_hit_tokens"], warm.counters["prefix_hit_tokens"]) == (0, 2 * 3)
    first, *later = [line["counters"]["prefill"] for line in warm.lines.of("generation")]
    assert "prefix_hit_tokens" not in first
    assert [part["prefix_hit_tokens"] for part in later] == [3, 3]
    assert all(part["gather_bytes"] * 4 == first["gather_bytes"] for part in later)
    assert warm.counters["kv_growths"] == 0, "the warm-up's bucket is still there"
    if arithmetic == "full":
        assert warm.streams == cold.streams
    told = warm.lines.of("hello")[0]["effective_config"]["prefix_reuse"]
    assert told == {"value": True, "source": "request"}


def test_cold_and_warm_generations_are_not_measured_together(tiny: Path) -> None:
    with pytest.raises(BadRequest, match="give 1 warm-up"):
        run(tiny, config={"prefix_reuse": True}, generations=2)
