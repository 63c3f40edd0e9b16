"""Makes a record storable without losing what is good in it.

PostgreSQL refuses NaN in JSON, NUL and lone surrogates; SQLite takes some of them; neither may differ from the other,
and nothing unknown may come back as a number. So: a reading that is no finite 64-bit number becomes Missing with the
reason, text loses NUL and surrogates, and each such place is flagged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jobs.column_types import clean_text
from jobs.errors import Unstorable
from jobs.model import RunRecord

LOW, HIGH = -(2**63), 2**63 - 1


def storable(record: RunRecord) -> tuple[RunRecord, dict[str, str]]:
    """The record as both stores can hold it, and what was replaced: place -> what stood there.

    The record carries them too, in `flags`, so that whoever reads it sees that it is not as it was measured. A clean
    record comes back equal, with no new ones. Raises Unstorable when a place that must hold a number does not.
    """
    flags: dict[str, str] = {}
    body = record.model_dump()
    for family in ("counters", "metrics"):
        body[family] = {name: _reading(value, f"{family}.{name}", flags) for name, value in body[family].items()}
    body["facts"] = {
        name: value
        if (fault := _fault(value)) is None
        else _flag(flags, f"facts.{name}", fault, f"not finite: {fault}")
        for name, value in body["facts"].items()
    }
    for index, generation in enumerate(body["generations"]):
        _generation(generation, f"generations.{index}", flags)
    body["equations"] = [_equation(row, f"equations.{i}", flags) for i, row in enumerate(body["equations"])]
    try:
        clean = RunRecord.model_validate(_scrubbed(body, "", flags))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Unstorable(f"the record of {record.attempt_id} cannot be stored: {place}: {first['msg']}") from error
    _require_64_bits(clean)
    told = dict.fromkeys((*clean.flags, *(flag_text(place, fault) for place, fault in flags.items())))
    return clean.model_copy(update={"flags": tuple(sorted(told))}), flags


def flag_text(place: str, fault: str) -> str:
    """A flag as a record carries it."""
    return f"{place}: {fault}" if fault else place


def flag_columns(told: tuple[str, ...]) -> dict[str, str]:
    """Flags of a record as the store keeps them: place -> fault."""
    return {place: fault for place, _, fault in (flag.partition(": ") for flag in told)}


def _reading(value: Any, place: str, flags: dict[str, str]) -> Any:
    fault = _fault(value) or _beyond(value)
    if fault is None:
        return value
    return _flag(flags, place, fault, {"missing": f"not a storable number: {fault}"})


def _generation(body: dict[str, Any], place: str, flags: dict[str, str]) -> None:
    further = body.get("further", ())
    for own, at in ((body, place), *((one, f"{place}.further.{i}") for i, one in enumerate(further))):
        if any(_fault(gap) for gap in own["gaps"]):
            # One gap cannot be left out, or all later ones would stand at another id.
            own["gaps"] = _flag(flags, f"{at}.gaps", "not finite", ())
    for phase, counters in body["counters"].items():
        for name in [name for name, value in counters.items() if _fault(value)]:
            _flag(flags, f"{place}.counters.{phase}.{name}", str(_fault(counters.pop(name))), None)


def _equation(body: dict[str, Any], place: str, flags: dict[str, str]) -> dict[str, Any]:
    fault = _fault(body["lhs"]) or _fault(body["rhs"])
    if fault is None:
        return body
    _flag(flags, place, fault, None)
    text = f"{body['text']} [a side was {fault}]"
    return {**body, "text": text, "relation": "==", "lhs": 0, "rhs": 1, "holds": False}


def _scrubbed(value: Any, place: str, flags: dict[str, str]) -> Any:
    """The rest: free-form parts lose non-finite numbers to null, all text loses what cannot be stored."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, str):
        clean = clean_text(value)
        return value if clean == value else _flag(flags, place, "NUL or half a surrogate pair", clean)
    if isinstance(value, Mapping):
        return {
            clean_text(str(key)): _scrubbed(item, f"{place}.{key}".strip("."), flags) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if {int}.issuperset(map(type, value)):  # ids and times of steps, most of a record
            return list(value)
        return [_scrubbed(item, f"{place}.{index}", flags) for index, item in enumerate(value)]
    fault = _fault(value)
    if fault is not None:
        return _flag(flags, place, fault, None)
    # SQLite keeps whole floats as integers, and so loses the sign of -0.0; then PostgreSQL shall lose it too.
    return 0.0 if isinstance(value, float) and value == 0 else value


def _require_64_bits(record: RunRecord) -> None:
    """Typed columns hold 64 bits; free-form JSON holds any integer."""
    places: dict[str, Any] = {
        "exit_code": record.exit_code,
        "signal": record.signal,
        "peak_rss_bytes": record.peak_rss_bytes,
    }
    for index, generation in enumerate(record.generations):
        ids = (token for sequence in generation.sequences for token in sequence.ids)
        numbers = (generation.index, generation.prefill_ns, *ids, *generation.step_ns)
        places[f"generations.{index}"] = max(numbers, key=abs)
    for index, seam in enumerate(record.seams):
        places[f"seams.{index}.step"] = seam.step
    for index, key in enumerate(record.keys):
        places[f"keys.{index}"] = max((value for value in key.model_dump().values() if isinstance(value, int)), key=abs)
    for place, value in places.items():
        if _beyond(value) is not None:
            raise Unstorable(f"the record of {record.attempt_id} cannot be stored: {place}: {value} is beyond 64 bits")


def _fault(value: Any) -> str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else None


def _beyond(value: Any) -> str | None:
    return "beyond 64 bits" if isinstance(value, int) and not LOW <= value <= HIGH else None


def _flag(flags: dict[str, str], place: str, fault: str, instead: Any) -> Any:
    flags[clean_text(place)] = fault
    return instead
