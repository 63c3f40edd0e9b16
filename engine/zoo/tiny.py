"""`tiny`: a seeded llama decoder made in code, small enough for every test, with an answer that does not wobble.

Random weights give flat logits, whose near ties flip with the last bit, or streams that loop. So the head is made
after the body. Each id's row holds the embedding of the id before it on one long cycle, so that most prompts are
answered clearly. On top, 128 rows hold what the layers make of a chosen stream after `PROMPT_IDS`, just enough of it
for the layers to outvote the cycle there: the stream changes when a layer, or the past it attends to, is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import BadRequest
from engine.zoo.external import write_file
from engine.zoo.folder import ELSEWHERE, ModelFacts, Recipe, Written, install
from engine.zoo.forward import Held, final_hidden
from engine.zoo.genai import CONFIG_FILE, genai_config
from engine.zoo.quant import F32, F64, PackedLinear, dequantise, quantise_int4
from engine.zoo.tokenizer_json import TINY_SPECIALS, json_bytes, tiny_tokenizer
from engine.zoo.writer import DecoderGeometry, write_decoder

NAME = "tiny"
BUILDER_VERSION = 1
DEFAULT_SEED = 1234
PROMPT_IDS = (1, 17, 42, 99)
SHORTEST_STREAM = 64
SMALLEST_GAP = 0.5
DISTINCT_IDS_OF_48 = 20

TINY = DecoderGeometry(
    layers=2,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_size=32,
    ffn=256,
    vocabulary=512,
    context=256,
    rope_theta=10000.0,
    rms_epsilon=float(np.float32(1e-6)),
    tied=False,
    fused_qkv=True,
)

_RECIPE_SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocabulary", "context",
    "rope_theta", "rms_epsilon", "tied", "fused_qkv",
)  # fmt: skip
"""Fields of the geometry that a build may differ in; what the graph gained since is the same in every tiny model."""
_PATH_TOKENS = 128
_DRAWS = 16
_CYCLE_LOGIT = 12.0
_WANTED_GAP, _VOTE_ROUNDS = 2.0, 60
_QKV_GAIN, _O_GAIN, _MLP_GAIN = 2.0, 1.0, 1.1
"""Output deviation of a product per unit of input. Attention this sharp, and an MLP this strong, both decide: over
seeds 0 to 2, leaving out one attention block changed 56 to 64 of 64 ids, one MLP 17 to 55, and 16 wrong past tokens
changed 18 to 22 of 24; with gains near 1 attention changed next to none."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """One drawn model: packed weights to write, exact values to compute with, and what was measured on it."""

    linears: Mapping[str, PackedLinear]
    values: Mapping[str, F64]
    greedy_ids: list[int]
    gaps: list[float]
    changed_without: Mapping[str, int]

    @property
    def distinct_ids_of_48(self) -> int:
        return len(set(self.greedy_ids[:48]))

    @property
    def is_fit(self) -> bool:
        peaked = min(self.gaps) > SMALLEST_GAP and self.distinct_ids_of_48 >= DISTINCT_IDS_OF_48
        return peaked and all(self.changed_without.values())


def build_tiny(
    seed: int,
    out: Path,
    *,
    geometry: DecoderGeometry = TINY,
    asymmetric: bool = False,
    elsewhere: str = ELSEWHERE,
) -> ModelFacts:
    """Build the model of `seed` into `out`; the same arguments give the same bytes.

    `asymmetric` packs uint8 zero points instead of the implicit 8. Raises BadRequest for a negative seed, an occupied
    folder, or a geometry for which no draw is peaked enough.
    """
    if seed < 0:
        raise BadRequest(f"seed {seed} is negative", "pass --seed with 0 or more")
    sizes = {field: getattr(geometry, field) for field in _RECIPE_SIZES}
    options = {"seed": seed, "asymmetric": asymmetric, **sizes}
    recipe = Recipe(NAME, BUILDER_VERSION, {"made": "in code, from a seed", "licence": "Apache-2.0"}, options)
    return install(
        out, recipe, lambda folder: _write(folder, geometry, _fit_draw(seed, geometry, asymmetric), seed), elsewhere
    )


def _write(folder: Path, geometry: DecoderGeometry, draw: _Draw, seed: int) -> Written:
    files = write_decoder(folder, geometry, _DrawnWeights(draw), producer_version=str(BUILDER_VERSION))
    pad, bos, eos = range(len(TINY_SPECIALS))
    tokenizer_config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": False,
        **{f"{end}_token": TINY_SPECIALS[n] for end, n in (("bos", bos), ("eos", eos), ("pad", pad))},
        "clean_up_tokenization_spaces": False,
        "model_max_length": geometry.context,
    }
    config = genai_config(geometry, bos=bos, eos=eos, pad=pad, context=geometry.context)
    files += [
        write_file(folder / CONFIG_FILE, config),
        write_file(folder / "tokenizer.json", tiny_tokenizer(geometry.vocabulary)),
        write_file(folder / "tokenizer_config.json", json_bytes(tokenizer_config)),
    ]
    return Written(files, geometry, _facts(draw, seed))


def _facts(draw: _Draw, seed: int) -> dict[str, Any]:
    smallest = int(np.argmin(draw.gaps))
    return {
        "title": f"seeded random llama decoder, seed {seed}",
        "prompt_ids": list(PROMPT_IDS),
        "greedy_ids": draw.greedy_ids,
        "smallest_top2_gap": round(draw.gaps[smallest], 4),
        "smallest_top2_gap_at": smallest,
        "distinct_ids_of_48": draw.distinct_ids_of_48,
        "ids_changed_without": dict(draw.changed_without),
    }


class _DrawnWeights:
    """`DecoderWeights` over a draw."""

    def __init__(self, draw: _Draw) -> None:
        self._draw = draw

    def embedding(self) -> F32:
        return self._draw.values["embedding"].astype(np.float32)

    def norm(self, name: str) -> F32:
        return self._draw.values[name].astype(np.float32)

    def linear(self, name: str) -> PackedLinear:
        return self._draw.linears[name]

    def bias(self, name: str, width: int) -> F32:
        raise AssertionError("tiny has no biases")


def _fit_draw(seed: int, geometry: DecoderGeometry, asymmetric: bool) -> _Draw:
    for attempt in range(_DRAWS):
        # RandomState, because its streams are frozen for good: the same seed must give the same bytes in any release.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, attempt])))
        draw = _draw(random, geometry, asymmetric)
        if draw.is_fit:
            return draw
    raise BadRequest(
        f"none of {_DRAWS} draws from seed {seed} is peaked enough: a top-2 gap above {SMALLEST_GAP}"
        f" throughout, {DISTINCT_IDS_OF_48} distinct ids of 48, and a stream that changes without any one block",
        "pass another --seed",
    )


def _draw(random: np.random.RandomState, g: DecoderGeometry, asymmetric: bool) -> _Draw:
    linears = {
        name: quantise_int4(_uniform(random, rows, columns) * (_gain(name) / np.sqrt(columns)), asymmetric=asymmetric)
        for name, rows, columns in _body_shapes(g)
    }
    values = {name: dequantise(linear) for name, linear in linears.items()}
    for name in _norm_names(g):
        values[name] = _as_fp32(1 + 0.1 * _uniform(random, g.hidden))
    values["embedding"] = _as_fp32(_uniform(random, g.vocabulary, g.hidden))
    path = _choose_path(random, g)
    ids = [*PROMPT_IDS, *path[:-1]]
    first = len(PROMPT_IDS) - 1
    body, embedded = Held(values), values["embedding"][ids]
    hidden = final_hidden(g, body, embedded)[first:]
    rows = _head_rows(random, g, embedded[first:], values["embedding"], path, hidden)
    linears["lm_head"] = quantise_int4(rows, asymmetric=asymmetric)
    head = dequantise(linears["lm_head"])
    logits = hidden @ head.T
    greedy = logits.argmax(axis=1)
    ordered = np.sort(logits, axis=1)
    # Forced along the path, the logits are those of free-running greedy decode as long as greedy follows the path.
    follows = bool((greedy == path).all())
    blocks = [f"layers.{n}.{block}" for n in range(g.layers) for block in ("attn", "mlp")]
    changed = {
        block: int(((final_hidden(g, body, embedded, without=block)[first:] @ head.T).argmax(axis=1) != path).sum())
        for block in blocks
    }
    gaps = (ordered[:, -1] - ordered[:, -2]).tolist() if follows else [0.0]
    return _Draw(linears, values, greedy.tolist(), gaps, changed)


def _choose_path(random: np.random.RandomState, g: DecoderGeometry) -> list[int]:
    """Distinct ids, none of them special or in the prompt, as many as fit the context."""
    free = [n for n in range(len(TINY_SPECIALS), g.vocabulary) if n not in PROMPT_IDS]
    tokens = min(_PATH_TOKENS, g.context - len(PROMPT_IDS), len(free))
    if tokens < SHORTEST_STREAM:
        raise BadRequest(
            f"context {g.context} and vocabulary {g.vocabulary} leave no stream of {SHORTEST_STREAM} ids",
            "use larger ones",
        )
    chosen: list[int] = random.permutation(free)[:tokens].tolist()
    return chosen


def _head_rows(
    random: np.random.RandomState, g: DecoderGeometry, tokens: F64, embedding: F64, path: list[int], hidden: F64
) -> F64:
    """[vocabulary, hidden]: the cycle's embeddings, plus on the path's ids as much of the layers' own as wins.

    `tokens` are the embeddings of the ids read along the path, `hidden` the states there.
    """
    specials = len(TINY_SPECIALS)
    cycle = specials + random.permutation(g.vocabulary - specials)
    rows = np.zeros((g.vocabulary, g.hidden))
    rows[np.roll(cycle, -1)] = embedding[cycle]
    rows *= _CYCLE_LOGIT / float(np.median((hidden * tokens).sum(axis=1)))
    own = hidden - ((hidden * tokens).sum(axis=1) / (tokens * tokens).sum(axis=1))[:, None] * tokens
    own /= (own * own).sum(axis=1)[:, None]
    steps = np.arange(len(path))
    for _ in range(_VOTE_ROUNDS):
        logits = hidden @ rows.T
        wanted = logits[steps, path].copy()
        logits[steps, path] = -np.inf
        # own . hidden is 1, so this lifts each position's gap to the one wanted, but for what rows share.
        rows[path] += own * np.maximum(logits.max(axis=1) + _WANTED_GAP - wanted, 0)[:, None]
    return rows


def _gain(name: str) -> float:
    return _QKV_GAIN if name.endswith("qkv_proj") else _O_GAIN if name.endswith("o_proj") else _MLP_GAIN


def _body_shapes(g: DecoderGeometry) -> list[tuple[str, int, int]]:
    shapes: list[tuple[str, int, int]] = []
    for layer in range(g.layers):
        attention, mlp = f"layers.{layer}.attn", f"layers.{layer}.mlp"
        shapes += [(f"{attention}.{role}", rows, g.hidden) for role, rows in g.projections]
        shapes.append((f"{attention}.o_proj", g.hidden, g.heads * g.head_size))
        shapes += [(f"{mlp}.gate_proj", g.ffn, g.hidden), (f"{mlp}.up_proj", g.ffn, g.hidden)]
        shapes.append((f"{mlp}.down_proj", g.hidden, g.ffn))
    return shapes


def _norm_names(g: DecoderGeometry) -> list[str]:
    layers = [f"layers.{n}.{which}_layernorm" for n in range(g.layers) for which in ("input", "post_attention")]
    return [*layers, "final_norm"]


def _uniform(random: np.random.RandomState, *shape: int) -> F64:
    """Uniform numbers of mean 0 and variance 1."""
    drawn: F64 = (random.random_sample(shape) * 2 - 1) * np.sqrt(3.0)
    return drawn


def _as_fp32(values: F64) -> F64:
    """Values as the file will hold them."""
    return values.astype(np.float32).astype(np.float64)
