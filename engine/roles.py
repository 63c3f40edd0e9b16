"""Which input and output of a decoder is what: as its config names them, else by the nodes that use them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.errors import ModelFilesError, UnsupportedModel
from engine.graph import CACHE_KINDS, Cache, DecoderInfo, Node
from engine.model_config import GENAI, STANDARD, Told
from engine.structure import MICROSOFT, Web, head_geometry, paired_caches, paired_states, table_rows

STRUCTURE, CONVENTION = "structure", "its usual name"
_LENGTHS = {(MICROSOFT, "GroupQueryAttention"): (5, 6), (MICROSOFT, "MultiHeadAttention"): (4, 5),
            ("", "Attention"): (3, 6)}  # fmt: skip
"""Where attention reads what follows from a mask."""
_POSITIONS = {(MICROSOFT, "GroupQueryAttention"): (9,), (MICROSOFT, "RotaryEmbedding"): (1,),
              (MICROSOFT, "MRotaryEmbedding"): (1,), ("", "RotaryEmbedding"): (3,)}  # fmt: skip
"""Where an operator reads positions."""
_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "LayerNormalization",
          "SkipLayerNormalization", "RMSNormalization")  # fmt: skip
_ROWS = frozenset({"Identity", "Cast", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape"})
"""Operators that leave numbers as they are."""
_HIDDEN = ("hidden_states", "last_hidden_state")
"""What exporters call the output of a model without its head."""
_LOOKUPS = ("Gather", "GatherBlockQuantized")
_FLOATS = ("float32", "float16", "bfloat16")


def bind_roles(web: Web, told: Told) -> DecoderInfo:
    """What each input and output is, with the source of each answer.

    Raises ModelFilesError for names that a config gives and the graph lacks, UnsupportedModel where neither config nor
    graph leaves one answer.
    """
    bound: dict[str, str] = {}
    caches = _caches(web, told, bound)
    states = _states(web, told, caches, bound)
    carried = {n for c in caches for n in (c.past_key, c.past_value, c.present_key, c.present_value)}
    carried.update(name for pair in states for name in pair)
    logits = _logits(web, told, carried, bound)
    inputs = _counted(web, told, carried, logits, bound)
    kv_heads, head_size = told.heads or head_geometry(web, caches)
    bound["heads"] = GENAI if told.heads else STRUCTURE
    vocabulary = told.vocabulary or _embedding_rows(web, inputs["input_ids"])
    bound["vocabulary"] = told.sources.get("vocabulary", STRUCTURE)
    context, bound["context length"] = _context(web, told, inputs["position_ids"], caches)
    bound["end ids"] = told.sources.get("eos_ids", "nothing: a run ends at its length")
    return DecoderInfo(kv_heads, head_size, vocabulary, context, told.eos_ids, inputs["input_ids"],
                       inputs["attention_mask"], logits, caches, inputs["position_ids"], states, bound)  # fmt: skip


# -- caches and states


def _caches(web: Web, told: Told, bound: dict[str, str]) -> tuple[Cache, ...]:
    """By the config where it names all four; else by structure, which names that are given must fit."""
    if all(kind in told.names for kind in CACHE_KINDS):
        bound["caches"] = GENAI
        return _named(web, told)
    caches = paired_caches(web)
    for kind in (k for k in CACHE_KINDS if k in told.names):
        stray = [getattr(c, kind) for c in caches if _layer(told.names[kind], getattr(c, kind)) is None]
        if stray:
            raise web.refuse(f"{GENAI} names {kind}_names {told.names[kind]!r}, and attention's is {stray[0]!r}")
    bound["caches"] = STRUCTURE
    return caches


def _named(web: Web, told: Told) -> tuple[Cache, ...]:
    """Caches by the config's names, in numeric order. Every layer has one or states: else names or counts are wrong."""
    keys, values = (_layers(told.names[kind], web.inputs) for kind in ("past_key", "past_value"))
    of_states = {layer for pattern, _ in told.states for layer in _layers(pattern, web.inputs)}
    counted = list(range(min(told.layers or 0, len(web.inputs))))
    if not keys or keys != values or sorted(of_states.union(keys)) != counted:
        raise UnsupportedModel(
            f"cached keys {told.names['past_key']!r} are of layers {keys}, cached values "
            f"{told.names['past_value']!r} of {values}, states of {sorted(of_states)}, and num_hidden_layers is "
            f"{told.layers}; the graph's inputs: "
            f"{', '.join(map(repr, [*web.inputs][:8]))}{', ...' if len(web.inputs) > 8 else ''}",
            f"check the names and the count in {GENAI}",
        )
    return tuple(Cache(*(told.names[kind] % layer for kind in CACHE_KINDS)) for layer in keys)


def _states(web: Web, told: Told, caches: Sequence[Cache], bound: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that the config names, in the order of its patterns and of layers, and then those that nodes carry on."""
    named = tuple((p % layer, out % layer) for p, out in told.states for layer in _layers(p, web.inputs))
    taken = frozenset(name for name, _ in named).union(*((c.past_key, c.past_value) for c in caches))
    found = paired_states(web, taken)
    if named or found:
        bound["states"] = " and ".join([GENAI] * bool(named) + [STRUCTURE] * bool(found))
    return named + found


def _layer(pattern: str, name: str) -> int | None:
    found = re.fullmatch(re.escape(pattern).replace("%d", r"(\d+)"), name)
    return int(found[1]) if found else None


def _layers(pattern: str, names: Iterable[str]) -> list[int]:
    """Layer numbers of the names that fit a pattern with %d, in numeric order; layers may be absent."""
    return sorted(layer for layer in (_layer(pattern, name) for name in names) if layer is not None)


# -- ids, mask, positions, logits


def _logits(web: Web, told: Told, carried: set[str], bound: dict[str, str]) -> str:
    """The float output that is no cache and that the others, such as hidden states, lead to."""
    given = _given(web.outputs, told, "logits", bound)
    if given:
        _check_head(web, given)
        return given
    floats = [n for n, v in web.outputs.items() if n not in carried and v.dtype in _FLOATS]
    last = [n for n in floats if set(floats) <= _behind(web, n)]
    if len(last) != 1:
        left = ", ".join(map(repr, floats)) or "none is left"
        raise web.refuse(f"which output holds the logits is not known: {left}")
    _check_convention(web, "logits", last[0], floats)
    _check_head(web, last[0], _HIDDEN)
    bound["logits"] = STRUCTURE
    return last[0]


def _check_head(web: Web, name: str, not_called: Sequence[str] = ()) -> None:
    """Refuse what a norm made, or what is called otherwise: a vocabulary as wide as the model tells neither apart."""
    maker = web.makers.get(web.origin(name, _ROWS))
    made = f", which {maker.op} makes," if maker is not None and maker.op in _NORMS else ""
    if made or name in not_called:
        raise UnsupportedModel(
            f"output {name!r}{made} holds hidden states and no logits", "export the model with its head"
        )


def _counted(web: Web, told: Told, carried: set[str], logits: str, bound: dict[str, str]) -> dict[str, str]:
    """Ids, mask and positions, "" where the graph has none: whole numbers, told apart by where they go."""
    wholes = [n for n, v in web.inputs.items() if n not in carried and v.dtype in ("int64", "int32")]
    goes = {name: _goes(web, name) for name in wholes}
    finders: dict[str, Callable[[str], bool]] = {
        "input_ids": lambda name: bool(_rows_looked_up(web, name)),
        "attention_mask": lambda name: _is_mask(goes[name]),
        "position_ids": lambda name: _is_positions(goes[name]),
    }
    roles = {role: _given(web.inputs, told, role, bound) for role in finders}
    for role, fits in finders.items():
        if roles[role]:
            continue
        free = [name for name in wholes if name not in roles.values()]
        found = _best(web, role, [name for name in free if fits(name)], goes, web.outputs[logits].shape[-1:])
        if len(found) > 1:
            raise web.refuse(f"which of {', '.join(map(repr, found))} holds the {_WORDS[role]} is not known")
        if found:
            _check_convention(web, role, found[0], free)
            roles[role], bound[_WORDS[role]] = found[0], STRUCTURE
        elif role in free and not any(f(role) for f in finders.values()):  # nothing reads it, or nothing tells
            roles[role], bound[_WORDS[role]] = role, CONVENTION
    if not roles["input_ids"]:
        raise web.refuse("no input of whole numbers looks up rows of an embedding")
    return roles


def _best(
    web: Web, role: str, found: list[str], goes: Mapping[str, frozenset[tuple[str, str]]], last: Sequence[int | str]
) -> list[str]:
    """Of several names that fit a role, those that fit it best."""
    if len(found) > 1 and role == "input_ids":
        wide = last[0] if last and isinstance(last[0], int) else 0  # a row for each logit: no table of positions
        found = [name for name in found if wide in _rows_looked_up(web, name)] or found
    if len(found) > 1 and role == "attention_mask":
        found = [name for name in found if _sums(goes[name])] or found
    return [role] if role in found else found


_WORDS = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions", "logits": "logits"}


def _given(there: Mapping[str, object], told: Told, role: str, bound: dict[str, str]) -> str:
    """The config's name of a role, "" where it gives none. Raises ModelFilesError where the graph lacks that name."""
    name = told.names.get(role)
    if name is None or (role == "position_ids" and name not in there):  # builders name it whether or not it is there
        return ""
    if name not in there:
        raise ModelFilesError(
            f"{GENAI} names {name!r}, which the graph does not have", "check that both come from one export"
        )
    bound[_WORDS[role]] = GENAI
    return name


def _check_convention(web: Web, role: str, found: str, others: Sequence[str]) -> None:
    """Refuse an answer where another name is what exporters call it."""
    if role != found and STANDARD[role] in others:
        raise web.refuse(f"the graph uses {found!r} as {_WORDS[role]}, and has {role!r} for something else")


def _behind(web: Web, name: str) -> set[str]:
    """Names on which an output depends, itself among them."""
    seen, todo = {name}, [name]
    while todo:
        node = web.makers.get(todo.pop())
        new = [n for n in node.inputs if n not in seen] if node is not None else []
        seen.update(new)
        todo += new
    return seen


def _goes(web: Web, name: str) -> frozenset[tuple[str, str]]:
    """What an input of whole numbers is to the nodes that it reaches, past arithmetic on it, each with its operator.

    "read" is an operator that reads the input itself, in whatever integer type.
    """
    seen, todo = {name}, [name]
    found: set[tuple[str, str]] = set()
    while todo:
        here = todo.pop()
        for node, index in web.readers.get(here, ()):
            what = _use(web, node, index)
            found.add((what, node.op))
            if web.origin(here, _NARROWED) == name:
                found.add(("read", node.op))
            if not what:
                new = [o for o in node.outputs if o and o not in seen]
                seen.update(new)
                todo += new
    return frozenset(found)


_NARROWED = frozenset({"Identity", "Cast"})


def _use(web: Web, node: Node, index: int) -> str:
    """What a value is to a node that reads it; "" for arithmetic, which is looked through."""
    op = (node.domain, node.op)
    if index in _LENGTHS.get(op, ()):
        return "lengths"
    if index in _POSITIONS.get(op, ()) or op in (("", "Cos"), ("", "Sin")):
        return "positions"
    if op in _LENGTHS or op in _POSITIONS:
        return "numbers"
    return "rows" if node.op in _LOOKUPS and index == 1 and web.stored(node.input(0)) is not None else ""


def _is_mask(goes: frozenset[tuple[str, str]]) -> bool:
    """Lengths follow from it, and by no maximum, which is how they follow from positions; or it is summed."""
    return _sums(goes) or (any(what == "lengths" for what, _ in goes) and ("read", "ReduceMax") not in goes)


def _sums(goes: frozenset[tuple[str, str]]) -> bool:
    return bool({("read", "ReduceSum"), ("read", "CumSum")} & goes)


def _is_positions(goes: frozenset[tuple[str, str]]) -> bool:
    return bool({"positions", "rows"} & {what for what, _ in goes})


def _rows_looked_up(web: Web, name: str) -> list[int]:
    """Rows of the tables in which a name looks up, itself or cast."""
    found = []
    for node in web.nodes:
        if node.op in _LOOKUPS and web.origin(node.input(1), _NARROWED) == name:
            shape = web.stored(node.input(0))
            found += list(shape[:1]) if shape else []
    return found


# -- sizes


def _embedding_rows(web: Web, ids: str) -> int:
    rows = _rows_looked_up(web, ids)
    if not rows:
        raise web.refuse("the vocabulary's size is not known (vocab_size in genai_config.json would say it)")
    return min(rows)


def _context(web: Web, told: Told, positions: str, caches: Sequence[Cache]) -> tuple[int | None, str]:
    """Positions that the config gives, else the graph's tables, else its caches, and which; None where none ends.

    Tables that are shorter than Hugging Face's config are what was exported.
    """
    source = told.sources.get("context_length", "")
    if source == GENAI:
        return told.context_length, source
    rows = table_rows(web, positions)
    if rows and (told.context_length is None or rows < told.context_length):
        return rows, "rotary or position tables"
    if told.context_length:
        return told.context_length, source
    extents = {shape[2] for c in caches for shape in [web.inputs[c.past_key].shape] if len(shape) == 4}
    static = [extent for extent in extents if isinstance(extent, int) and extent > 1]
    return (min(static), "the caches' shape") if static else (None, "nothing: what is asked decides")
