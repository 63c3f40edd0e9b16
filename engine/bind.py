"""A decoder's plan: bind its inputs (ids, mask, positions, caches, states), lower its nodes, close with argmax."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.errors import UnsupportedModel
from engine.graph import DTYPES, Graph, Node
from engine.kernels.sampling import ranked
from engine.lower import Lowering, walk
from engine.plan import KvGeometry, Operand, Plan, Ref, StateSpec
from engine.symbols import classify, disqualified
from engine.values import Ids, LoweredValue, Mask, Past, Positions, State, Tensor


def lower(graph: Graph, rows: int, *, all_logits: bool = False, target: str = "plain") -> Plan:
    """Plan of one forward pass of `rows` tokens (1 for decode) for a target; logits of the last row, or of all rows.

    Raises UnsupportedModel with every reason at once, by node and op.
    """
    info = graph.info
    unbound = dict(graph.unserved)
    kv = _kv_geometry(graph, unbound)
    states = _states(graph, unbound)
    values: dict[str, LoweredValue] = {info.input_ids: Ids()}
    if info.attention_mask:
        values[info.attention_mask] = Mask()
    for slot, cache in enumerate(info.caches if kv is not None else ()):
        values |= {cache.past_key: Past(slot, "key"), cache.past_value: Past(slot, "value")}
    for index, spec in enumerate(states):
        values[spec.name] = State(index, spec.shape)
    if info.position_ids in graph.inputs:
        rank = len(graph.inputs[info.position_ids].shape)
        values[info.position_ids] = Positions((1, rows) if rank == 2 else (3, 1, rows))
    for name in sorted(set(graph.inputs) - set(values) - set(unbound)):
        unbound[name] = f"graph input {name!r} is not served: export a plain text decoder"
    b = Lowering(graph.weights, values, frozenset({info.logits}), rows)
    b.info, b.kv, b.states, b.logit_chain = info, kv, states, frozenset() if all_logits else _logit_chain(graph)
    walk(b, graph.nodes, unbound=unbound)
    _check_present(b, graph, states)
    return _finish(b, graph, target)


def _finish(b: Lowering, graph: Graph, target: str) -> Plan:
    info = graph.info
    logits = b.peek(info.logits) if info.logits in graph.outputs else None
    if not isinstance(logits, Tensor):
        raise UnsupportedModel(
            f"output {info.logits!r} is produced by nothing that is served",
            "export the model with its head, or check genai_config.json",
        )
    if not logits.shape or logits.dtype != "float32" or math.prod(logits.shape[:-1]) not in (1, b.rows):
        raise UnsupportedModel(
            f"output {info.logits!r} is {logits.dtype}{list(logits.shape)}, not a row of logits for each token",
            "check genai_config.json",
        )
    if logits.shape[-1] != info.vocabulary:  # hidden states of an export without its head are fewer
        raise UnsupportedModel(
            f"output {info.logits!r} has {logits.shape[-1]} logits for a vocabulary of {info.vocabulary}",
            "export the model with its head, or check vocab_size in genai_config.json",
        )
    _choice(b, logits, target)
    p = b.close(target)
    assert b.kv is not None
    symbols = classify(graph)
    grows = disqualified(graph, symbols)
    steps = tuple(replace(s, grows=grows[s.node]) if s.node in grows else s for s in p.steps)
    parts = (steps, p.keys, p.constants, p.hosts, p.buffers, p.workspace_bytes)
    return Plan(b.rows, *parts, b.kv, b.states, logits.ref, symbols)


def _choice(b: Lowering, logits: Tensor, target: str) -> None:
    """The plan's end: the largest logit's id, the gap to the next, and one more cached position a row."""
    ids = Operand("ids", Ref("control", -1, "int64", (1,), "ids"), "w")
    gap = Operand("gap", Ref("control", -1, "float32", (1,), "gap"), "w")
    length = Operand("length", Ref("control", -1, "int64", (1,), "length"), "rw")
    tail, advance = (Node(op.lower(), op, "assay", (), (), {}) for op in ("ArgMax", "Advance"))
    if target == "plain":
        b.emit(tail, "argmax", (Operand("logits", logits.ref), ids, gap), {})
        b.emit(advance, "advance", (length,), {"rows": b.rows})
        return
    parts, each = ranked(logits.shape[-1])
    best, at = b.make("best", "float32", (parts, 2)).ref, b.make("best at", "int32", (parts,)).ref
    b.emit(
        tail, "rank", (Operand("logits", logits.ref), Operand("y", best, "w"), Operand("y1", at, "w")), {"each": each}
    )
    b.emit(advance, "choose", (Operand("a", best), Operand("b", at), ids, gap, length), {"rows": b.rows})


def _kv_geometry(graph: Graph, unbound: dict[str, str]) -> KvGeometry | None:
    """The cache's geometry; where its type is not served, the reason among `unbound`."""
    info = graph.info
    names = [name for cache in info.caches for name in (cache.past_key, cache.past_value)]
    dtypes = {graph.inputs[name].dtype for name in names}
    if len(dtypes) != 1 or not dtypes <= {"float32", "float16", "bfloat16", "int8"}:
        shown = f"KV cache of type {', '.join(sorted(dtypes))} is not served: export with a float or int8 KV cache"
        unbound.update(dict.fromkeys(names, shown))
        return None
    dtype = dtypes.pop()
    token_bytes = info.kv_heads * info.head_size * DTYPES[dtype].itemsize
    return KvGeometry(len(info.caches), info.kv_heads, info.head_size, dtype, token_bytes)


def _states(graph: Graph, unbound: dict[str, str]) -> tuple[StateSpec, ...]:
    """Convolution and recurrent states."""
    made: list[StateSpec] = []
    for past, present in graph.info.states:
        value = graph.inputs[past]
        shape = (1, *(d for d in value.shape[1:] if isinstance(d, int)))
        if len(shape) != len(value.shape):
            unbound[past] = f"state {past!r} of shape {list(value.shape)} is not served"
            continue
        made.append(StateSpec(past, present, shape))
    return tuple(made)


def _check_present(b: Lowering, graph: Graph, states: tuple[StateSpec, ...]) -> None:
    """Each cache and state must come out under the name that is paired with it; anything else would mispair."""
    expected: dict[str, LoweredValue] = {s.present: State(i, s.shape) for i, s in enumerate(states)}
    for slot, cache in enumerate(graph.info.caches):
        expected |= {cache.present_key: Past(slot, "key"), cache.present_value: Past(slot, "value")}
    wrong = [n for n, v in expected.items() if n not in graph.outputs or b.peek(n) != v]
    if wrong:
        raise UnsupportedModel(
            f"outputs do not carry on their cache or state: {', '.join(wrong[:4])}", "check names in genai_config.json"
        )


def _logit_chain(graph: Graph) -> frozenset[str]:
    """Names from which the logits follow row by row, element-wise, and which nothing else uses."""
    producers = {o: n for n in graph.nodes for o in n.outputs if o}
    uses: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.inputs:
            uses[name] = uses.get(name, 0) + 1
    chain = {graph.info.logits}
    here = graph.info.logits
    while here in producers and producers[here].op in _ROW_WISE and uses.get(producers[here].input(0), 0) == 1:
        here = producers[here].input(0)
        chain.add(here)
    return frozenset(chain)


_ROW_WISE = frozenset({"Cast", "Add", "Div", "Tanh", "Mul"})
