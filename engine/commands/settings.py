"""The engine's config as options of a command line: one table, from which every command takes what it serves."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from engine.capture_rules import RULES
from engine.config import CONFIG_NAMES, EXPERTS, POLICIES, EngineConfig
from engine.device.book import DEFAULT_GRANULE_BYTES
from engine.kv_layout import LAYOUTS
from engine.plan import TARGETS

_SWITCH = {"on": True, "off": False}


def _whole(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text  # a share, or refused as what else it is where the whole config is checked


_OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"type": int, "help": "sequences side by side; they take the prompts in turn"},
    "weight_budget": {"type": _whole, "help": 'bytes, or a share of all weights such as "50%%"'},
    "vram_limit": {
        "type": int,
        "help": "bytes for weights, KV cache and workspace together; given alone, it has the policy chosen",
    },
    "policy": {"help": f"one of {', '.join(POLICIES)}"},
    "capture": {"choices": tuple(_SWITCH), "help": "run steps from recorded graphs"},
    "capture_rules": {"help": f"capture rules in force: all, none, or some joined by + of {', '.join(RULES)}"},
    "granule": {"type": int, "help": "granule of the simulated device in bytes, a power of two"},
    "prefill_chunk": {"type": int, "help": "most prompt tokens in one forward pass"},
    "kv_capacity": {"type": int, "help": "positions that the KV cache may grow to"},
    "kv_layout": {"help": f"one of {', '.join(LAYOUTS)}"},
    "kv_min_bucket": {"type": int, "help": "positions of the smallest KV cache"},
    "target": {"help": f"one of {', '.join(TARGETS)}: a step an operator, or what one launch can do"},
    "prefix_reuse": {"choices": tuple(_SWITCH), "help": "keep what a prompt shares with what is cached"},
    "experts": {"help": f"one of {', '.join(EXPERTS)}: how banks of experts that do not all fit are read"},
    "hot_experts": {"metavar": "FILE", "help": "recorded routing whose most read experts policy stable_slot keeps"},
}


_UNSET = {
    "batch": "one a prompt",
    "weight_budget": "no bound",
    "vram_limit": "no bound",
    "granule": str(DEFAULT_GRANULE_BYTES),
    "kv_capacity": "what the run needs",
    "hot_experts": "the first experts of the first banks",
    "target": "what suits the device",
}
"""What stands in the place of a value that is None by default."""


def _default(name: str) -> str:
    value = getattr(EngineConfig(), name)
    if value is None:
        return _UNSET[name]
    return next((word for word, switch in _SWITCH.items() if value is switch), str(value))


def add_settings(
    parser: argparse.ArgumentParser, *, only: Collection[str] = CONFIG_NAMES, but: Collection[str] = ()
) -> None:
    """Add an option for each name of `config` that is in `only` and not in `but`."""
    for name, option in _OPTIONS.items():
        if name in only and name not in but:
            told = {**option, "help": f"{option['help']} (default: {_default(name)})"}
            parser.add_argument(f"--{name.replace('_', '-')}", **told)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given of `config`, by name, for `engine.config.check` to judge."""
    given = {name: value for name, value in vars(arguments).items() if name in _OPTIONS and value is not None}
    return {name: _SWITCH[value] if "choices" in _OPTIONS[name] else value for name, value in given.items()}
