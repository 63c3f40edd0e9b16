"""Each run's request as the engine reads it: what it would refuse in every run is a mistake of the sweep file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config import parse_request
from engine.errors import BadRequest
from jobs.adapters.native import request_document
from jobs.errors import SpecError
from jobs.model import ArmPlan, CellPlan
from jobs.spec.faults import first_of
from jobs.spec.form import Scalar, SweepForm
from jobs.spec.yaml_lines import Path_, Source


def check_requests(form: SweepForm, source: Source, cells: Sequence[CellPlan], arms: Sequence[ArmPlan]) -> None:
    """Raise SpecError with each setting that the engine does not take beside the others of some run, at its line."""
    faults: dict[Path_, SpecError] = {}
    tried: set[tuple[object, ...]] = set()
    for cell in cells:
        for arm in arms:
            asked = request_document(cell, arm, None)
            alike = (*sorted(asked["config"].items()), *map(len, cell.prompts(arm)))
            if alike in tried:
                continue
            tried.add(alike)
            refusal = _refusal(asked)
            if refusal is not None:
                path = _place(form, cell, arm, asked)
                words = f"arm {arm.name!r} in cell {cell.cell}: {refusal.message}"
                faults.setdefault(path, source.error(path, words, refusal.remedy))
    if faults:
        raise first_of(faults.values())


def config_place(form: SweepForm, arm: str, name: str, value: Scalar) -> Path_:
    """Where the value of a config name is written: in the arm, in one that it is like, or in the matrix."""
    holder: str | None = arm
    while holder is not None:
        if name in form.arms[holder].config:
            return ("arms", holder, "config", name)
        holder = form.arms[holder].like
    return ("matrix", name, form.matrix[name].index(value))


def _refusal(asked: Mapping[str, Any]) -> BadRequest | None:
    try:
        parse_request(asked)
    except BadRequest as error:
        return error
    return None


def _place(form: SweepForm, cell: CellPlan, arm: ArmPlan, asked: Mapping[str, Any]) -> Path_:
    """The setting without which the request is taken; the run's own settings where there is none."""
    config: Mapping[str, Scalar] = asked["config"]
    for name in config:
        rest = {other: value for other, value in config.items() if other != name}
        if _refusal({**asked, "config": rest}) is None:
            return config_place(form, arm.name, name, cell.config.get(name))
    return ("run",)
