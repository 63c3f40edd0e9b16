"""Whether a run served the settings that it was asked for; one that cannot be read back was not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import parse_share
from engine.errors import BadRequest
from jobs.model import RunRecord


def effective(entry: Any) -> Any:
    """The value of one entry of an effective config: {"value", "source"}, or the bare value of a simpler adapter."""
    return entry.get("value") if isinstance(entry, dict) else entry


def setting_faults(asked: Mapping[str, Any], record: RunRecord) -> list[str]:
    """What was asked and is not known to have been served, one sentence each. Unknown is not served."""
    found = []
    for name, value in sorted(asked.items()):
        if name not in record.effective_config:
            found.append(f"{name} was asked as {value} and the run does not say how it ran")
            continue
        got = effective(record.effective_config[name])
        if name == "weight_budget" and value is not None:
            found += _budget_faults(value, got, record, bounded=asked.get("vram_limit") is not None)
        elif type(got) is not type(value) or got != value:
            found.append(f"{name} was asked as {value} and ran as {got}")
        elif name == "granule" and value is not None and record.device.get("granule_bytes") != value:
            found.append(f"granule was asked as {value} and the device has {record.device.get('granule_bytes')}")
    return found


def _budget_faults(asked: Any, got: Any, record: RunRecord, *, bounded: bool) -> list[str]:
    """A budget may come back as it was written or in bytes; the bytes that the run then held itself to must agree.

    `bounded`: a limit on all memory was asked too, which may leave less than the budget.
    """
    weights, budget = record.facts.get("weight_bytes"), record.facts.get("budget_bytes")
    if not isinstance(budget, int) or not isinstance(weights, int):
        return [f"weight_budget was asked as {asked} and the run does not say how many bytes that was"]
    try:
        due = int(parse_share(asked) * weights) if isinstance(asked, str) else asked
    except BadRequest as error:
        return [f"weight_budget was asked as {asked}: {error.message}"]
    in_bytes = got == due and type(got) is int
    as_written = got == asked and type(got) is type(asked)
    if not (in_bytes or as_written):
        return [f"weight_budget was asked as {asked} and ran as {got}"]
    if budget != due and not (bounded and budget < due):
        return [f"weight_budget was asked as {asked}, which is {due} bytes, and the run held itself to {budget}"]
    return []
