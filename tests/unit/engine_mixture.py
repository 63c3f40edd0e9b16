"""A small hybrid whose layers each have a bank of experts, and runs of it under budgets."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.zoo.geometries import GEOMETRIES, build_geometry
from engine.zoo.hybrid_geometry import HybridGeometry
from tests.unit.engine_rig import Outcome, run

PROMPT = [1, 17, 42, 99, 7, 8, 9]
TOKENS, BANKS, CHOSEN, EXPERTS = 6, 4, 2, 8
GRANULE = 4096
SIZES: dict[str, Any] = {
    "layers": BANKS, "hidden": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "rotary": 8, "key_heads": 1,
    "value_heads": 2, "state_size": 32, "ffn": 32, "shared_ffn": 32, "vocabulary": 256, "context": 128,
    "experts": EXPERTS, "chosen": CHOSEN,
}  # fmt: skip


def built(folder: Path, *, seed: int = 5, hollow: bool = False, **sizes: Any) -> Path:
    """The hybrid, of these sizes where they differ."""
    form = GEOMETRIES["35b-a3b"]
    assert isinstance(form.geometry, HybridGeometry)
    form = replace(form, geometry=replace(form.geometry, **{**SIZES, **sizes}), peaked=False)
    return build_geometry("35b-a3b", form, seed, folder, hollow=hollow).folder


def asked(model: Path, /, **changes: Any) -> Outcome:
    """A run of this file's prompt."""
    config = {"granule": GRANULE, **changes.pop("config", {})}
    return run(model, **{"prompt_ids": PROMPT, "tokens": TOKENS, "ignore_eos": True, "config": config, **changes})


def planned(model: Path, routing: str | Path | None, **changes: Any) -> Outcome:
    """The same without arithmetic."""
    return asked(model, arithmetic="none", routing=None if routing is None else str(routing), **changes)


def choices(path: Path, sequence: int = 0) -> NDArray[Any]:
    """[positions, banks, chosen], read from the file without the engine."""
    entry = json.loads(path.read_text())["sequences"][sequence]
    raw = zlib.decompress(base64.b64decode(entry["experts"]))
    return np.frombuffer(raw, "<u2").reshape(entry["positions"], BANKS, CHOSEN)
