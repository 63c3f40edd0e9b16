"""What a model's own config says of the prompts that it can take, read before anything is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "genai_config.json"


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Ids run from 0 to below `vocabulary`; prompt and new tokens together take at most `context` positions.

    None: the folder does not say, so that only the engine can tell.
    """

    vocabulary: int | None = None
    context: int | None = None


def model_bounds(folder: Path) -> ModelBounds:
    """The bounds of the model in `folder`; empty where it is not built yet or cannot be read: the engine says why."""
    try:
        document = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ModelBounds()
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        return ModelBounds()
    return ModelBounds(_whole(model.get("vocab_size")), _whole(model.get("context_length")))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
