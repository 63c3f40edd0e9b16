"""Models of the zoo's geometries with weights poured from a pool of random bytes: as large, made at the disk's rate.

Their numbers mean nothing and are finite; how fast they decode is what a model with real weights of these sizes takes.

    python -m benchmarks.poured qwen2.5-7b FOLDER
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.graph import DTYPES, Weight
from engine.onnx_load import load
from engine.zoo import build
from engine.zoo.fetch import sha256_of
from engine.zoo.verify import model_digest

POOL_BYTES = 64 << 20
_CODE_DEVIATION = 4.6  # of a code less its zero point


def pour(name: str, folder: Path) -> Path:
    """Build a geometry into `folder` with poured weights. Raises BadRequest for an unknown name."""
    build(name, folder, hollow=True, cache_dir=folder.parent)
    random = np.random.default_rng(0)
    pool = random.integers(0, 256, POOL_BYTES, np.uint8)
    for weight in load(folder, hollow=True).weights.values():
        found = _place(weight)
        if found is not None:
            path_offset = found
            data = np.memmap(folder / "model.onnx.data", np.uint8, "r+", path_offset, weight.data.shape)
            made = _values(weight, random)
            if made is None:
                for start in range(0, data.size, POOL_BYTES):
                    data[start : start + POOL_BYTES] = pool[: min(POOL_BYTES, data.size - start)]
            else:
                data[:] = made.reshape(-1).view(np.uint8)
    recipe = folder / "zoo.json"
    zoo: dict[str, Any] = json.loads(recipe.read_text(encoding="utf-8"))
    del zoo["hollow_bytes"]
    for file in zoo["files"]:
        file["sha256"] = sha256_of(folder / file["name"])
    recipe.write_text(json.dumps(zoo), encoding="utf-8")
    zoo["model_digest"] = model_digest(folder)  # of the poured bytes: runs of a sweep are held to it
    recipe.write_text(json.dumps(zoo), encoding="utf-8")
    return folder


def _place(weight: Weight) -> int | None:
    """Where in the data file a weight's bytes start; None for one that stands in the graph file."""
    here: Any = weight.data
    while isinstance(here, np.ndarray):
        here = here.base
    if not isinstance(here, mmap.mmap):
        return None
    return int(weight.data.ctypes.data - np.frombuffer(here, np.uint8).ctypes.data)


def _values(weight: Weight, random: np.random.Generator) -> NDArray[Any] | None:
    """Numbers for a weight that is no codes, of a size that keeps activations about as large as they come in."""
    if DTYPES[weight.dtype].kind in "iu":
        return None
    columns = weight.shape[-1] if weight.shape else 1
    if "scale" in weight.name:
        made = random.uniform(0.5, 1.5, weight.shape) / (_CODE_DEVIATION * math.sqrt(32 * columns))
    elif "neg_exp_A" in weight.name:  # a state decays
        made = -random.uniform(0.25, 4.0, weight.shape)
    elif "norm" in weight.name:
        made = random.uniform(0.9, 1.1, weight.shape)
    else:
        made = random.normal(size=weight.shape) / math.sqrt(max(weight.shape or (1,)))
    return np.asarray(made.astype(DTYPES[weight.dtype]))


if __name__ == "__main__":
    pour(sys.argv[1], Path(sys.argv[2]))
