"""A model with two rows of its head alike, so that ids are as good as each other, and engines with lines planted."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx

from tests.unit.engine_rig import TINY_PROMPT, build_tiny, run

ROOT = Path(__file__).parents[2]
TWIN, NEXT = 500, 501
"""Ids whose rows are made like those of one that base chooses: alike, and a hundredth less. Base never chooses them."""
FIRST, TOKENS = 2, 6
SAMPLING, NBITS = "engine/kernels/sampling.py", "engine/kernels/nbits.py"
EMBEDDING, ROWS = "engine/kernels/embedding.py", 'a["y"][0] = a["table"][a["ids"][0]]'
CHOICE = "best = int(np.argmax(row))\n    a["
TIES_UPWARDS = (SAMPLING, CHOICE, "best = row.size - 1 - int(np.argmax(row[::-1]))\n    a[")
WRONG_LOGITS = (NBITS, "y[r] = made\n", f"y[r] = made\n                if y.shape[1] > {NEXT}: y[r, {NEXT}] += 0.15\n")


def build_tied(into: Path) -> tuple[Path, list[int]]:
    """A model in which the third id that it emits has a twin, and what it emits."""
    folder = build_tiny(into)
    [(ids, _), *_] = run(folder, prompt_ids=list(TINY_PROMPT), tokens=TOKENS, ignore_eos=True).streams
    chosen = ids[FIRST]
    assert ids.index(chosen) == FIRST and chosen < TWIN and not {TWIN, NEXT} & set(ids)
    data = bytearray((folder / "model.onnx.data").read_bytes())
    for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer:
        if tensor.name.startswith(("lm_head.", "model.embed_tokens.")):
            at = {entry.key: entry.value for entry in tensor.external_data}
            start, size = int(at["offset"]), int(at["length"]) // tensor.dims[0]
            row = bytes(data[start + chosen * size : start + (chosen + 1) * size])
            less = (np.frombuffer(row, np.float32) * np.float32(0.99)).tobytes() if "scales" in tensor.name else row
            data[start + TWIN * size : start + (NEXT + 1) * size] = row + less
    (folder / "model.onnx.data").write_bytes(data)
    (folder / "zoo.json").unlink()  # it holds the digest of the model as it was built
    return folder, ids


def tree(into: Path, *changes: tuple[str, str, str]) -> Path:
    """The engine as it is, with some lines planted."""
    shutil.copytree(ROOT / "engine", into / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in changes:
        text = (into / name).read_text()
        assert old in text, (name, old)
        (into / name).write_text(text.replace(old, new))
    return into
