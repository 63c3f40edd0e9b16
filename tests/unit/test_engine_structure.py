"""Decoders that no config names: what is what follows from the nodes, or is refused with the list of names."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from engine import oracle
from engine.errors import UnsupportedModel
from engine.graph import CACHE_KINDS, Cache, Graph, Node, Value
from engine.layer_names import are_crossed, contradictions
from engine.model_config import Told
from engine.roles import bind_roles
from engine.structure import web_of
from tests.unit.engine_rig import Bench, traces
from tests.unit.engine_small import HEAD_SIZE, HEADS, MICROSOFT, VOCABULARY, Small

LAYERS = 12
NOTHING_TOLD = Told("model.onnx", {}, (), None, None, None, None, (), {})
Names = Callable[[int], tuple[str, str, str, str]]


def decoder(layers: int = LAYERS) -> Graph:
    """Layers one behind another, each with a cache of its own: a swap of two shows in the logits."""
    s = Small(layers=layers)
    x = s.embedded()
    for layer in range(layers):
        x = s.add("Add", x, s.add("Mul", s.attended(x, layer), s.constant(0.1, np.float32)))
    s.head(x)
    return s.graph()


def renamed(graph: Graph, names: Mapping[str, str], seed: int | None = None) -> Graph:
    """Other names for inputs and outputs, and the order of both shuffled."""

    def dressed(old: Mapping[str, Value]) -> dict[str, Value]:
        new = [(names.get(n, n), replace(v, name=names.get(n, n))) for n, v in old.items()]
        if seed is not None:
            random.Random(seed).shuffle(new)
        return dict(new)

    def also(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(n, n) for n in old)

    nodes = tuple(replace(n, inputs=also(n.inputs), outputs=also(n.outputs)) for n in graph.nodes)
    return replace(graph, nodes=nodes, inputs=dressed(graph.inputs), outputs=dressed(graph.outputs))


def by_structure(graph: Graph, told: Told = NOTHING_TOLD) -> Graph:
    """The graph with what the structure says of it, in place of what it was made with."""
    web = web_of(graph.nodes, graph.weights, graph.inputs, graph.outputs, {})
    return replace(graph, info=bind_roles(web, told))


def cache_names(graph: Graph, names: Names) -> dict[str, str]:
    """From the names of a graph's caches to those of a scheme."""
    pairs = ((c, Cache(*names(layer))) for layer, c in enumerate(graph.info.caches))
    return {getattr(old, kind): getattr(new, kind) for old, new in pairs for kind in CACHE_KINDS}


def logits_of(graph: Graph) -> bytes:
    """Of a prompt and two tokens that are fed."""
    bench = Bench(graph, rows=(4,), positions=8)
    bench.prefill([1, 5, 3, 2])
    made = [bench.prompt_logits(4)]
    for token in (7, 4):
        bench.force(token)
        made.append(bench.logits())
    return b"".join(row.tobytes() for row in made)


WORDS = ("zeta", "eta", "mu", "nu", "xi", "pi", "rho", "tau", "phi", "chi", "psi", "alpha")
GAPS = (0, 1, 3, 4, 8, 9, 10, 11, 20, 21, 100, 101)
SCHEMES: dict[str, Names] = {
    "optimum": lambda n: (f"past_key_values.{n}.key", f"past_key_values.{n}.value", f"p.{n}.key", f"p.{n}.value"),
    "underscores": lambda n: (f"past_key_{n}", f"past_value_{n}", f"present_key_{n}", f"present_value_{n}"),
    "letters": lambda n: (f"cache_k_{n}", f"cache_v_{n}", f"new_cache_k_{n}", f"new_cache_v_{n}"),
    "camel": lambda n: (f"kCache{n}", f"vCache{n}", f"kCacheOut{n}", f"vCacheOut{n}"),
    "counted on": lambda n: (f"past_{2 * n}", f"past_{2 * n + 1}", f"present_{2 * n}", f"present_{2 * n + 1}"),
    "no numbers": lambda n: (f"{WORDS[n]}.k", f"{WORDS[n]}.v", f"{WORDS[n]}.k_out", f"{WORDS[n]}.v_out"),
    "automatic outputs": lambda n: (f"past_key_{n}", f"past_value_{n}", f"getitem_{7 * n}", f"getitem_{90 - 2 * n}"),
    "gaps": lambda n: (f"k.{GAPS[n]}.past", f"v.{GAPS[n]}.past", f"k.{GAPS[n]}.present", f"v.{GAPS[n]}.present"),
    "two numbers": lambda n: (f"in.of12.{n}.key", f"in.of12.{n}.value", f"out.of12.{n}.key", f"out.of12.{n}.value"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_field_52_every_scheme_of_names_is_bound_by_structure_bit_for_bit(scheme: str) -> None:
    graph = decoder()
    expected = logits_of(graph)
    names = cache_names(graph, SCHEMES[scheme])
    for seed in range(3):
        found = by_structure(renamed(graph, names, seed))
        assert [c.past_key for c in found.info.caches] == [SCHEMES[scheme](n)[0] for n in range(LAYERS)]
        assert found.info.bound_by["caches"] == "structure"
    assert logits_of(found) == expected


def test_field_52_ids_and_mask_by_any_name_and_sizes_from_the_graph() -> None:
    graph = decoder()
    odd = {"input_ids": "tokens", "attention_mask": "keep", "logits": "scores"}
    info = by_structure(renamed(graph, odd, 1)).info
    assert (info.input_ids, info.attention_mask, info.position_ids, info.logits) == ("tokens", "keep", "", "scores")
    assert (info.kv_heads, info.head_size, info.vocabulary) == (1, HEAD_SIZE, VOCABULARY)
    assert info.context_length is None and info.eos_ids == ()
    assert "what is asked" in info.bound_by["context length"]
    assert logits_of(by_structure(renamed(graph, odd, 1))) == logits_of(graph)


def contradicted(change: Callable[[list[list[str]]], None]) -> dict[str, str]:
    """Names of the letters' scheme, some of them exchanged."""
    table = [list(SCHEMES["letters"](n)) for n in range(LAYERS)]
    change(table)
    return cache_names(decoder(), lambda n: tuple(table[n]))  # type: ignore[arg-type,return-value]


def _swap(rows: tuple[int, ...], columns: tuple[int, int]) -> Callable[[list[list[str]]], None]:
    def change(table: list[list[str]]) -> None:
        for row in rows:
            a, b = columns
            table[row][a], table[row][b] = table[row][b], table[row][a]

    return change


def _swap_layers(first: int, second: int, columns: tuple[int, ...]) -> Callable[[list[list[str]]], None]:
    def change(table: list[list[str]]) -> None:
        for c in columns:
            table[first][c], table[second][c] = table[second][c], table[first][c]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_swap((0,), (0, 1)), "cache_v_0 is used as the key"),
        (_swap(tuple(range(LAYERS)), (0, 1)), "cache_v_0 is used as the key"),
        (_swap(tuple(range(LAYERS)), (2, 3)), "new_cache_v_0 is used as the key"),
        (_swap_layers(1, 10, (0, 1, 2, 3)), "layers run in the order cache_k_0, cache_k_10"),
        (_swap_layers(0, 1, (1,)), "layers run in the order cache_v_1, cache_v_0"),
        (_swap_layers(2, 11, (2, 3)), "layers run in the order new_cache_k_0, new_cache_k_1, new_cache_k_11"),
    ],
)
def test_field_52_names_that_contradict_the_structure_are_refused_with_the_list(
    change: Callable[[list[list[str]]], None], says: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        by_structure(renamed(decoder(), contradicted(change), 2))
    assert says in caught.value.message
    assert "'cache_k_11'" in caught.value.message and "'new_cache_v_0'" in caught.value.message, "the names"
    assert "genai_config.json" in caught.value.remedy and "past_key_names" in caught.value.remedy


def test_field_52_numbers_check_names_and_never_more() -> None:
    assert not contradictions([["k0", "k2"], ["v0", "v2"]])
    assert contradictions([["k0", "k1"], ["v0", "v2"]]), "one layer has k1 and v2"
    assert contradictions([["past0", "past1"], ["past1", "past2"]]), "the same words may count on, not overlap"
    assert not contradictions([["getitem_9", "getitem_4"]]), "an automatic name's number is no layer"
    assert not are_crossed("past_key_values.0.key", "past_key_values.0.value")
    assert are_crossed("past_key_values.0.value", "past_key_values.0.key")
    assert are_crossed("vcache_0", "kcache_0") and not are_crossed("kcache_0", "vcache_0")
    assert not are_crossed("a", "b")


def _lost(graph: Graph) -> Graph:
    outputs = {n: v for n, v in graph.outputs.items() if n != "present.1.value"}
    return replace(graph, outputs=outputs)


def _shared(graph: Graph) -> Graph:
    swap = {"past.1.key": "past.0.key", "past.1.value": "past.0.value"}
    nodes = tuple(replace(n, inputs=tuple(swap.get(i, i) for i in n.inputs)) for n in graph.nodes)
    return replace(graph, nodes=nodes, inputs={n: v for n, v in graph.inputs.items() if n not in swap})


def _one_is_no_input(graph: Graph) -> Graph:
    nodes = tuple(
        replace(n, inputs=tuple("embedding" if i == "past.1.value" else i for i in n.inputs)) for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _side_by_side(_: Graph) -> Graph:
    s = Small(layers=2)
    x = s.embedded()
    s.head(s.add("Add", s.attended(x, 0), s.attended(x, 1)))
    return s.graph()


def _by_hand(graph: Graph) -> Graph:
    """Caches that a Concat carries on: no attention node says which are keys."""
    nodes = tuple(n for n in graph.nodes if n.op != "GroupQueryAttention")
    grown = [
        Node(name, "Concat", "", (name, name), (name.replace("past", "present"),), {"axis": 2})
        for name in graph.inputs
        if name.startswith("past")
    ]
    return replace(graph, nodes=(*nodes, *grown))


def _two_embeddings(graph: Graph) -> Graph:
    second = Node("again", "Gather", "", ("embedding", "types"), ("typed",), {})
    odd = renamed(graph, {"input_ids": "tokens"})
    types = Value("types", "int64", ("batch", "sequence"))
    return replace(odd, nodes=(second, *odd.nodes), inputs={**odd.inputs, "types": types})


def _two_heads(graph: Graph) -> Graph:
    other = Node("other", "MatMul", "", ("attended.0", "head"), ("scores",), {})
    outputs = {n: v for n, v in graph.outputs.items() if n != "logits"}
    both = {"scores": Value("scores", "float32", ()), "chances": Value("chances", "float32", ())}
    nodes = tuple(replace(n, outputs=tuple("chances" if o == "logits" else o for o in n.outputs)) for n in graph.nodes)
    return replace(graph, nodes=(*nodes, other), outputs={**outputs, **both})


def _ids_elsewhere(graph: Graph) -> Graph:
    odd = renamed(graph, {"input_ids": "tokens"})
    return replace(odd, inputs={**odd.inputs, "input_ids": Value("input_ids", "int64", ("batch", "sequence"))})


def _no_sizes(graph: Graph) -> Graph:
    free = {n: replace(v, shape=("b", "h", "p", "s")) if n.startswith("past") else v for n, v in graph.inputs.items()}
    nodes = tuple(replace(n, attributes={}) for n in graph.nodes)
    return replace(graph, inputs=free, nodes=nodes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_lost, "output 2 of GroupQueryAttention"),
        (_shared, "'past.0.key', 'past.0.value': read as more than one"),
        (_one_is_no_input, "which are not both inputs"),
        (_side_by_side, "do not follow one another"),
        (_by_hand, "no attention node reads cached keys and values"),
        (_two_embeddings, "which of 'tokens', 'types' holds the ids is not known"),
        (_two_heads, "which output holds the logits is not known: 'scores', 'chances'"),
        (_ids_elsewhere, "the graph uses 'tokens' as ids, and has 'input_ids' for something else"),
        (_no_sizes, "key heads: the graph does not say"),
    ],
    ids=lambda p: p.__name__.strip("_") if callable(p) else "",
)
def test_field_52_unsure_is_refused_with_the_names_and_the_way_out(change: Callable[[Graph], Graph], says: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        by_structure(change(decoder(2)))
    assert says in caught.value.message
    assert "the graph's inputs: " in caught.value.message and "'past.0.key'" in caught.value.message
    assert caught.value.exit_code == 12 and "genai_config.json" in caught.value.remedy


def test_field_52_a_hidden_state_beside_the_logits_is_not_taken_for_them() -> None:
    graph = renamed(decoder(2), {"logits": "scores"})
    hidden = next(n for n in graph.nodes if n.op == "Add").outputs[0]
    outputs = {hidden: Value(hidden, "float32", ()), **graph.outputs}
    assert by_structure(replace(graph, outputs=outputs)).info.logits == "scores"


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("last", ["norm", "norm in rows", "residual"])
def test_field_52_hidden_states_as_wide_as_the_vocabulary_are_not_taken_for_logits(last: str, given: bool) -> None:
    """As an export without its head has them: no width tells, and their ids would look like any others."""
    s = Small(hidden=VOCABULARY)
    x = s.add("MatMul", s.attended(s.embedded()), s.drawn("down", HEADS * HEAD_SIZE, VOCABULARY))
    name = "hidden_states" if last == "residual" else "scores"
    if last == "residual":
        s.add("Add", x, s.embedded(), outputs=(name,))
    else:
        made = (name,) if last == "norm" else None
        x = s.add("SimplifiedLayerNormalization", x, s.drawn("gamma", VOCABULARY), outputs=made, axis=-1)
        if last == "norm in rows":
            s.add("Cast", s.add("Unsqueeze", s.add("Gather", x, s.constant(-1), axis=1), s.constant([1])),
                  outputs=(name,), to=1)  # fmt: skip
    graph = s.graph()
    outputs = {name: Value(name, "float32", ()), **{n: v for n, v in graph.outputs.items() if n != "logits"}}
    told = replace(NOTHING_TOLD, names={"logits": name} if given else {})
    if last == "residual" and given:  # nothing contradicts who says so
        assert by_structure(replace(graph, outputs=outputs), told).info.logits == name
        return
    with pytest.raises(UnsupportedModel, match="holds hidden states and no logits") as caught:
        by_structure(replace(graph, outputs=outputs), told)
    assert caught.value.remedy == "export the model with its head"


def test_field_52_sizes_follow_from_the_products_where_shapes_are_symbols() -> None:
    graph = decoder(2)
    free = {n: replace(v, shape=("b", "h", "p", "s")) if n.startswith("past") else v for n, v in graph.inputs.items()}
    info = by_structure(replace(graph, inputs=free)).info
    assert (info.kv_heads, info.head_size) == (1, HEAD_SIZE)


def bare() -> Graph:
    """The standard's attention in a decoder that takes neither mask nor positions."""
    s = Small(seed=3)
    del s.inputs["attention_mask"]
    x = s.embedded()
    q, k, v = (s.add("MatMul", x, s.drawn(n, s.hidden, w)) for n, w in (("q", 16), ("k", 8), ("v", 8)))
    inputs = (q, k, v, "", "past.0.key", "past.0.value")
    outputs = ("attended", "present.0.key", "present.0.value")
    s.add("Attention", *inputs, outputs=outputs, q_num_heads=2, kv_num_heads=1, is_causal=1)
    s.head("attended")
    return by_structure(renamed(s.graph(), {"past.0.key": "a", "past.0.value": "b", "input_ids": "c"}))


def test_field_52_the_standards_attention_without_mask_or_positions() -> None:
    graph = bare()
    assert graph.info.caches == (Cache("a", "b", "present.0.key", "present.0.value"),)
    assert (graph.info.attention_mask, graph.info.position_ids) == ("", "")
    ids = [1, 5, 3, 2]
    bench = Bench(graph, rows=(4,), positions=8)
    bench.prefill(ids)
    exact = oracle.logits(graph, ids)[-1]
    np.testing.assert_allclose(bench.prompt_logits(4), exact, rtol=0, atol=2e-4 * float(np.abs(exact).max()))


@pytest.mark.parametrize("capture", [True, False])
def test_field_39_a_ragged_batch_needs_neither_mask_nor_positions(capture: bool) -> None:
    """Each sequence has a cache and a length of its own: nothing is padded, so that nothing has to be masked."""
    graph, prompts = bare(), [[4], [1, 5, 3, 2, 7, 9, 0], [11, 1, 2]]

    def bench(sequences: int) -> Bench:
        return Bench(graph, rows=(1, 3, 7), positions=16, sequences=sequences, capture=capture)

    assert traces(bench(3), prompts) == [traces(bench(1), [prompt])[0] for prompt in prompts]


def test_field_52_keys_and_values_in_one_tensor_are_refused_by_structure() -> None:
    s = Small()
    x = s.embedded()
    made = s.add("Attention", x, "", "", "", "past.0.key", domain=MICROSOFT, outputs=("attended", "present.0.key"))
    s.head(made)
    with pytest.raises(UnsupportedModel, match="no attention node reads cached keys and values"):
        by_structure(s.graph())


def with_positions(how: str) -> Graph:
    """A decoder whose positions are an input of their own, and are used in one of the ways that exporters have."""
    s = Small()
    s.inputs["position_ids"] = Value("position_ids", "int64", ("batch", "sequence"))
    x = s.embedded()
    s.add("Shape", "input_ids")
    where = s.add("Cast", "position_ids", to=7)
    if how == "learned":
        x = s.add("Add", x, s.add("Gather", s.drawn("places", 24, s.hidden), where))
    if how == "rotary":
        cos, sin = s.drawn("cos", 24, 4), s.drawn("sin", 24, 4)
        x = s.add("RotaryEmbedding", x, where, cos, sin, domain=MICROSOFT)
    if how == "angles":
        turns = s.add("MatMul", s.add("Cast", s.add("Unsqueeze", where, s.constant([2])), to=1), s.drawn("slow", 1, 4))
        x = s.add("Mul", x, s.add("Cos", turns))
    if how == "largest":  # lengths follow from the positions, as exports for WebGPU have it
        s.add("If", s.add("Greater", s.add("ReduceMax", where, keepdims=0), s.constant(8)), outputs=("unused",))
    s.head(s.attended(x, more={9: where} if how in ("attention", "largest") else None))
    graph = s.graph()
    return replace(graph, outputs={**graph.outputs, "logits": Value("logits", "float32", ("b", "s", VOCABULARY))})


@pytest.mark.parametrize("how", ["learned", "rotary", "angles", "attention", "largest"])
def test_field_52_positions_are_told_from_ids_and_mask_by_their_use(how: str) -> None:
    odd = {"input_ids": "x0", "attention_mask": "x1", "position_ids": "x2"}
    for seed in range(4):
        info = by_structure(renamed(with_positions(how), odd, seed)).info
        assert (info.input_ids, info.attention_mask, info.position_ids) == ("x0", "x1", "x2")
    assert info.context_length == (24 if how in ("learned", "rotary") else None)


def test_field_52_two_look_ups_and_no_width_of_logits_to_tell_them_are_refused() -> None:
    graph = with_positions("learned")
    free = replace(graph, outputs={**graph.outputs, "logits": Value("logits", "float32", ("b", "s", "v"))})
    with pytest.raises(UnsupportedModel, match="which of 'x0', 'x2' holds the ids is not known"):
        by_structure(renamed(free, {"input_ids": "x0", "position_ids": "x2"}))
    assert by_structure(free).info.input_ids == "input_ids", "its usual name, among those that fit"
    with pytest.raises(UnsupportedModel, match="has 'input_ids' for something else"):
        by_structure(renamed(graph, {"input_ids": "position_ids", "position_ids": "input_ids"}))


@pytest.mark.parametrize("op", ["ReduceSum", "CumSum"])
def test_field_52_a_mask_that_also_gives_positions_is_the_mask(op: str) -> None:
    s = Small()
    x = s.embedded()
    where = s.add("Sub", s.add(op, "attention_mask", s.constant(1)), s.constant(1))
    x = s.add("RotaryEmbedding", x, where, s.drawn("cos", 24, 4), s.drawn("sin", 24, 4), domain=MICROSOFT)
    s.head(s.attended(x))
    info = by_structure(renamed(s.graph(), {"input_ids": "x0", "attention_mask": "x1"})).info
    assert (info.input_ids, info.attention_mask, info.position_ids) == ("x0", "x1", "")
