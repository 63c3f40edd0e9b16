"""The models of the self-test: made here from seeds in a second, with nothing from outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.onnx_load import load
from engine.zoo.folder import ZOO_FILE
from engine.zoo.geometries import GEOMETRIES, build_geometry
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.tiny import build_tiny
from engine.zoo.writer import DATA_FILE

SEED = 7
EXPERTS, LAYERS = 8, 4
TIED = ((0, 3, 6), (1, 4, 7), (2, 5))
"""Experts whose rows of a router are equal, so that which of them a token takes is the rule for ties alone."""
QUARTER = b"\x00\x34"
"""0.25 as float16."""


def make_tiny(folder: Path) -> Path:
    """The small decoder, its weights with packed zero points."""
    return build_tiny(SEED, folder, asymmetric=True).folder


def make_mixture(folder: Path) -> Path:
    """A hybrid with a bank of experts in each layer, whose routers hold ties.

    A row of a router takes one element of its input, times the same as the others of its group: no order of summing
    parts what is equal.
    """
    form = GEOMETRIES["35b-a3b"]
    assert isinstance(form.geometry, HybridGeometry)
    small = replace(
        form.geometry, layers=LAYERS, hidden=64, heads=2, kv_heads=1, head_size=32, rotary=8, key_heads=1,
        value_heads=2, state_size=32, ffn=32, shared_ffn=32, vocabulary=512, context=128, experts=EXPERTS, chosen=2,
    )  # fmt: skip
    made = build_geometry("35b-a3b", replace(form, geometry=small, peaked=False), SEED, folder).folder
    _tie_routers(made)
    return made


def _tie_routers(folder: Path) -> None:
    """Write the routers anew, in place; the folder is no build of the zoo any more, and says so."""
    weights = load(folder).weights
    path = folder / DATA_FILE
    content = path.read_bytes()
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.moe.router.MatMul.weight"
        codes, scales = (weights[f"{name}_{part}"].data.tobytes() for part in ("Q4", "scales"))
        width = len(codes) // EXPERTS
        rows = [bytearray(b"\x88" * width) for _ in range(EXPERTS)]  # 8 is a code's zero
        for element, group in enumerate(TIED):
            for expert in group:
                rows[expert][element] = 0x8F
        for old, new in ((codes, b"".join(rows)), (scales, QUARTER * (len(scales) // 2))):
            assert content.count(old) == 1 and len(old) == len(new), name
            content = content.replace(old, new)
    path.write_bytes(content)
    (folder / ZOO_FILE).unlink()
