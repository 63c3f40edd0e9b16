"""The noise of a scenario on a card, as an A/A sweep measured it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from jobs.document import Document

if TYPE_CHECKING:
    from jobs.model import ArmPlan, CellPlan


class Calibration(Document):
    """One metric of one cell on one card, base against itself.

    `sigma` is the standard deviation of the blocks' log ratios, `blocks` how many gave it. `smallest_detectable` is
    the slowdown, as a share, that `budget_blocks` planned blocks of one cell find with probability 0.8; None: beyond
    any use.
    """

    cell: str
    metric: str
    card: str
    uuid: str
    blocks: int
    sigma: float
    smallest_detectable: float | None
    budget_blocks: int
    sweep: str
    at: str  # UTC, ISO 8601


def scenario_digest(plan: CellPlan, base: ArmPlan) -> str:
    """What must be equal for noise to carry over: model, prompts, settings, base's config and program, not its code."""
    told: dict[str, object] = {
        "model": plan.model_digest,
        "prompts": [list(prompt) for prompt in (plan.prompt_ids, *plan.further_prompts)],
        "config": {**plan.config, **base.config},
        "settings": plan.settings.model_dump(mode="json"),
        "adapter": base.adapter,
        "command": list(base.command),
        **({"options": base.options} if base.options else {}),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
