"""Decoders at the sizes of models that people run, in the exporter's form, with weights from a seed.

Built whole (written to disk a chunk at a time) or hollow: graph, config and recipe, with a data file that is a hole of
the right size. A hollow folder loads, plans and runs plan-only like any other, at once and in no space; `fill` makes
its weights from the recipe, and the result is the very folder that a whole build gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import BadRequest, ModelFilesError
from engine.zoo import folder as folders
from engine.zoo.external import Layout, write_file
from engine.zoo.folder import ELSEWHERE, ModelFacts, Recipe, Written, install
from engine.zoo.genai import CONFIG_FILE, genai_config
from engine.zoo.hybrid import hybrid_model
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.seeded_weights import PROMPT_IDS, SeededDecoder, SeededHybrid
from engine.zoo.writer import DATA_FILE, MODEL_FILE, DecoderGeometry, decoder_model

BUILDER_VERSION = 2
MOST_SKEW = 4.0
_SOURCE = {"made": "in code, from a seed", "licence": "Apache-2.0"}


@dataclass(frozen=True, slots=True)
class Form:
    """What is built: the family by genai_config's word for it, its sizes, and whether weights have zero points."""

    family: str
    geometry: DecoderGeometry | HybridGeometry
    asymmetric: bool = False
    peaked: bool = True
    """Whether answers after one prompt are made clear, which takes a forward pass or more."""
    poured: bool = False
    """Whether weights are one pool of numbers over and over: at the disk's rate, and never peaked."""
    skew: float = 0.0
    """How unevenly routers choose: their rows, one an expert, differ in size by up to e^skew either way."""

    def with_layers(self, layers: int) -> Form:
        """The same in another depth. Raises BadRequest below 1."""
        if layers < 1:
            raise BadRequest(f"{layers} layers", "pass --layers with 1 or more")
        return replace(self, geometry=replace(self.geometry, layers=layers))


def build_geometry(
    name: str, form: Form, seed: int, out: Path, *, hollow: bool = False, elsewhere: str = ELSEWHERE
) -> ModelFacts:
    """Build `form` with the weights of `seed` into `out`; the same arguments give the same bytes.

    A folder that holds this build hollow is filled unless hollow is what is asked for. Raises BadRequest for a negative
    seed, an occupied folder, or a seed that leaves no clear answers.
    """
    if form.skew and not isinstance(form.geometry, HybridGeometry):
        raise BadRequest(f"{name} has no router to skew", "leave --skew out")
    if not 0 <= form.skew <= MOST_SKEW:
        raise BadRequest(f"skew {form.skew:g}", f"pass --skew from 0 to {MOST_SKEW:g}")
    if seed < 0:
        raise BadRequest(f"seed {seed} is negative", "pass --seed with 0 or more")
    recipe = _recipe(name, form, seed)
    facts = install(out, recipe, lambda scratch: _write(scratch, form, seed, hollow=hollow), elsewhere)
    return facts if hollow or facts.hollow_bytes is None else fill(facts.folder)


def fill(folder: Path) -> ModelFacts:
    """Make the weights of a hollow folder; one that has them is left alone. Raises ModelFilesError."""
    zoo = folders.read_zoo(folder)
    try:
        name, options = str(zoo["name"]), dict(zoo["options"])
        seed, family = int(options["seed"]), str(options["family"])
        asymmetric, peaked, poured = (bool(options.get(n)) for n in ("asymmetric", "peaked", "poured"))
        skew = float(options.get("skew", 0.0))
        kind = HybridGeometry if family == HYBRID else DecoderGeometry
        form = Form(family, kind(**options["geometry"]), asymmetric, peaked, poured, skew)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"{folder} holds no model with weights from a seed", "fill what was built so") from error
    recipe = _recipe(name, form, seed)
    if zoo.get("recipe_key") != recipe.key:
        raise ModelFilesError(f"{folder} was made by another version of the zoo", "build it again")
    return folders.fill(folder, recipe, lambda scratch: _write(scratch, form, seed, hollow=False))


def _recipe(name: str, form: Form, seed: int) -> Recipe:
    options = {"seed": seed, **asdict(form)}
    for option in ("poured", "skew"):  # as recipes were before there were any
        if not options[option]:
            del options[option]
    return Recipe(name, BUILDER_VERSION, _SOURCE, options)


def _write(folder: Path, form: Form, seed: int, *, hollow: bool) -> Written:
    layout = Layout(DATA_FILE)
    weights: SeededDecoder | SeededHybrid
    if isinstance(form.geometry, HybridGeometry):
        weights = SeededHybrid(form.geometry, seed, peaked=form.peaked, poured=form.poured, skew=form.skew)
        model = hybrid_model(form.geometry, weights, layout, str(BUILDER_VERSION))
    else:
        weights = SeededDecoder(form.geometry, seed, asymmetric=form.asymmetric, peaked=form.peaked, poured=form.poured)
        model = decoder_model(form.geometry, weights, layout, str(BUILDER_VERSION))
    g = form.geometry
    pad, bos, eos = (g.vocabulary - n for n in (3, 2, 1))
    config = genai_config(g, bos=bos, eos=eos, pad=pad, context=g.context, family=form.family)
    files = [write_file(folder / MODEL_FILE, model), write_file(folder / CONFIG_FILE, config)]
    facts: dict[str, Any] = {"title": f"{form.family} decoder of {g.layers} layers, seed {seed}", "peaked": False}
    if hollow:
        layout.reserve(folder)
        return Written(files, g, facts, layout.size_bytes)
    files.append(layout.write(folder, durable=not form.poured))
    if form.peaked:
        facts |= {"peaked": True, **weights.peak.facts(PROMPT_IDS)}
    return Written(files, g, facts)


HYBRID = "qwen3_5_moe_text"
_ONE_MILLIONTH = 9.999999974752427e-07  # as float32 has it


def _qwen2(
    layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, ffn: int, vocabulary: int, *, tied: bool
) -> DecoderGeometry:
    return DecoderGeometry(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=ffn,
        vocabulary=vocabulary,
        context=32768,
        rope_theta=1e6,
        rms_epsilon=_ONE_MILLIONTH,
        tied=tied,
        fused_qkv=True,
        qkv_bias=True,
        half=True,
    )


GEOMETRIES: Mapping[str, Form] = MappingProxyType(
    {
        "qwen2.5-0.5b": Form("qwen2", _qwen2(24, 896, 14, 2, 64, 4864, 151936, tied=True)),
        "qwen2.5-1.5b": Form("qwen2", _qwen2(28, 1536, 12, 2, 128, 8960, 151936, tied=True)),
        "qwen2.5-7b": Form("qwen2", _qwen2(28, 3584, 28, 4, 128, 18944, 152064, tied=False)),
        "qwen2.5-14b-zp": Form("qwen2", _qwen2(48, 5120, 40, 8, 128, 13824, 152064, tied=False), asymmetric=True),
        "llama-3.2-1b": Form(
            "llama",
            DecoderGeometry(
                layers=16,
                hidden=2048,
                heads=32,
                kv_heads=8,
                head_size=64,
                ffn=8192,
                vocabulary=128256,
                context=131072,
                rope_theta=5e5,
                rms_epsilon=9.999999747378752e-06,
                tied=True,
                fused_qkv=True,
                half=True,
            ),
        ),
        "35b-a3b": Form(
            HYBRID,
            HybridGeometry(
                layers=40,
                hidden=2048,
                heads=16,
                kv_heads=2,
                head_size=256,
                rotary=64,
                key_heads=16,
                value_heads=32,
                state_size=128,
                taps=4,
                ffn=512,
                shared_ffn=512,
                experts=256,
                chosen=8,
                vocabulary=248320,
                context=262144,
                rope_theta=1e7,
                rms_epsilon=_ONE_MILLIONTH,
            ),
        ),
    }
)
"""Sizes of the models of these names; rotary tables are plain, without any scaling of long contexts."""

_SMALL = replace(_qwen2(4, 256, 4, 2, 64, 512, 4096, tied=True), context=4096)
SMALL: Mapping[str, Form] = MappingProxyType(
    {
        "qwen2-small": Form("qwen2", _SMALL),
        "qwen2-small-zp": Form("qwen2", replace(_SMALL, tied=False), asymmetric=True),
        "hybrid-small": Form(
            HYBRID,
            HybridGeometry(
                layers=8,
                hidden=128,
                heads=4,
                kv_heads=2,
                head_size=32,
                rotary=16,
                key_heads=2,
                value_heads=4,
                state_size=32,
                taps=4,
                ffn=64,
                shared_ffn=64,
                experts=16,
                chosen=2,
                vocabulary=1024,
                context=4096,
                rope_theta=1e7,
                rms_epsilon=_ONE_MILLIONTH,
            ),
        ),
    }
)
"""The same families in sizes that a host runs in a second: what sweeps stand for where there is no card."""

FORMS: Mapping[str, Form] = MappingProxyType({**GEOMETRIES, **SMALL})
"""All that can be built by a name."""
