"""Audits of small models, their parts in reach, so that defects can be planted in the audited run alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.audit.pair import Audit
from engine.config import parse_request
from engine.device.base import Device
from engine.device.sim import SimDevice
from engine.graph import Graph
from engine.onnx_load import load
from engine.run import plans_for
from tests.unit.engine_rig import request

G = 4096
TOKENS = 12
GROWING: dict[str, Any] = {"kv_min_bucket": 4}
"""A prompt of four ids and twelve tokens fill 15 positions: buckets of 4, 8 and 16, so two growths a generation."""


def audited(
    model: Path | Graph,
    *,
    device: Device | None = None,
    every: int = 1,
    shadow: bool = True,
    tokens: int = TOKENS,
    generations: int = 3,
    further: list[list[int]] | None = None,
    **config: Any,
) -> Audit:
    """An audit of the tiny model's own prompt, on a simulated card of small granules unless another one is given."""
    graph = load(model) if isinstance(model, Path) else model
    own = {"granule": G, **config} if device is None else config
    asked = request(Path("model"), tokens=tokens, generations=generations, further_prompts=further or [], config=own)
    made = replace(parse_request(asked), ignore_eos=True)
    plans = plans_for(graph, made.prompts, made.config.prefill_chunk, made.config.target or "plain")
    where = device if device is not None else SimDevice(granule_bytes=G)
    return Audit(made, where, graph, plans, every=every, shadow=shadow)


def clean(model: Path, device: Device, **how: Any) -> dict[str, int]:
    """A whole audit without a difference, after which nothing is mapped; what was checked, and what ran."""
    audit = audited(model, device=device, **how)
    report = audit.run()
    assert report.found == [] and report.at is None
    counted = {**audit.counts, **audit.ran}
    audit.close()
    assert device.mapped_bytes == 0
    return counted


def parts(audit: Audit) -> Any:
    """The audited run's parts by the names that a bench has for them."""
    setup = audit.setup
    names = {"pager": setup.pager, "kv": setup.kv, "decoder": setup.decoder, "plan": setup.plan}
    return SimpleNamespace(device=audit.device, plans=setup.decoder._plans, **names)


def from_generation(audit: Audit, generation: int, plant: Callable[[Any], None]) -> None:
    """Plant a defect when that generation begins."""
    decoder, begun = audit.setup.decoder, [0]
    reset = decoder.reset

    def again() -> None:
        begun[0] += 1
        if begun[0] == generation:
            plant(parts(audit))
        reset()

    decoder.reset = again  # type: ignore[method-assign]
