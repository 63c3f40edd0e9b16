"""Numbers as people read them: exact where exact matters, rounded for display only, never "-0.0 %".

Decimal units throughout (1 MB = 10**6 bytes), as link rates are; `bytes_binary` where a card's own sizes are meant.
A missing reading is shown as its reason, never as a zero or a blank.
"""

from __future__ import annotations

import math
from typing import Final

from jobs.model import Missing

Value = int | float | Missing

MINUS: Final = "\u2212"
NOT_RECORDED: Final = "not recorded"
UNIT_NOTE: Final = "1 MB = 1,000,000 bytes"
_DECIMAL: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHARES: Final = {"ratio", "fraction", "share", "rate", "percent"}


def revision(commit: str) -> str:
    """A commit short enough to read, and what was said of its tree: that it is dirty outlives the cut."""
    name, dash, state = commit.partition("-")
    return f"{name[:12]}{dash}{state}"


def integer(value: int) -> str:
    """An exact integer with separators."""
    return _minus(f"{value:,}")


def number(value: int | float, digits: int = 4) -> str:
    """An integer exactly; a float to `digits` significant digits, without an exponent."""
    if isinstance(value, int):
        return integer(value)
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return _minus(text.rstrip("0").rstrip(".") if "." in text else text)


def fixed(value: int | float, digits: int = 4) -> str:
    """`value` to `digits` significant digits with its trailing zeros, so that figures of a column line up."""
    if not math.isfinite(value):
        return "not finite"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else digits - 1
    return _minus(f"{value:,.{places}f}")


def bytes_exact(value: int | float) -> str:
    """Bytes as an exact integer: "2,349,010,944 B"."""
    return f"{integer(value) if isinstance(value, int) else number(value, 12)} B"


def bytes_decimal(value: int | float) -> str:
    """Bytes in decimal units to four digits: "2.349 GB"."""
    return _scaled(value, 1000, _DECIMAL)


def bytes_binary(value: int | float) -> str:
    """Bytes in binary units to four digits: "2.188 GiB"."""
    return _scaled(value, 1024, _BINARY)


def percent(share: float) -> str:
    """A share of one as a percentage: 0.70161 -> "70.16 %"; what is not 0 or 1 never shows as 0 or 100."""
    value = share * 100
    if share == 0 or share == 1:
        return f"{int(value)} %"
    text = f"{value:.2f}"
    if text in {"0.00", "-0.00"}:
        text = number(float(value), 2)
    elif text == "100.00":
        text = (
            f"{value:.6f}".rstrip("0").rstrip(".") if abs(value - 100) >= 1e-6 else ("<100" if value < 100 else ">100")
        )
    return _minus(text) + " %"


def times(ratio: float) -> str:
    """A ratio to four digits; what is not 1 never shows as 1: 1.00004 -> "1.00004"."""
    text = fixed(ratio)
    if ratio == 1 or text.strip("0") != "1.":
        return text
    return f"{ratio:.6f}".rstrip("0") if abs(ratio - 1) >= 1e-6 else "<1" if ratio < 1 else ">1"


def signed_percent(share: float) -> str:
    """A relative change with its sign: "+10.6 %"; a change too small for one decimal keeps two digits."""
    if share == 0:
        return "0 %"
    if not math.isfinite(share):
        return "not finite"
    value = abs(share) * 100
    text = f"{value:,.1f}" if value >= 0.05 else number(value, 2)
    return f"{'+' if share > 0 else MINUS}{text} %"


def points(difference: float) -> str:
    """A difference of two shares, in percentage points."""
    if difference == 0:
        return "0 pp"
    value = abs(difference) * 100
    text = f"{value:.2f}" if value >= 0.005 else number(value, 2)
    return f"{'+' if difference > 0 else MINUS}{text} pp"


def show(value: Value | None, unit: str) -> str:
    """A reading with its unit, or why there is none."""
    if value is None:
        return NOT_RECORDED
    if isinstance(value, Missing):
        return value.missing if value.missing == NOT_RECORDED else f"n/a: {value.missing}"
    if not math.isfinite(value):
        return "not finite"
    if unit in _SHARES:
        return percent(value)
    if is_bytes(unit):
        return bytes_decimal(value) + _per(unit)
    if unit == "ns":
        return f"{fixed(value / 1e6)} ms"
    if unit.startswith("ms"):
        return f"{fixed(value)} {unit}"
    if unit in {"", "count", "tokens"}:
        return number(value)
    if unit.startswith("count/"):
        return number(value) + unit[5:]
    if unit == "x":
        return f"{times(value)}×"
    return f"{number(value)} {unit}"


def step_of(largest: int | float, unit: str) -> tuple[int | float, str]:
    """What to divide figures up to `largest` by for an axis, and the unit that they then have."""
    if unit in _SHARES:
        return 0.01, "%"
    if unit == "ns":
        return 1_000_000, "ms"
    if not is_bytes(unit):
        return 1, "" if unit == "count" else unit
    scale = max((at for at in range(len(_DECIMAL)) if largest >= 1000**at), default=0)
    return 1000**scale, _DECIMAL[scale] + _per(unit)


def exact(value: Value | None, unit: str) -> str:
    """A reading with every digit it has: bytes and counts as integers with separators."""
    if isinstance(value, int) and is_bytes(unit):
        return bytes_exact(value) + _per(unit)
    if isinstance(value, int) and unit in {"count", ""}:
        return integer(value)
    return show(value, unit)


def change(base: Value | None, head: Value | None, unit: str) -> str:
    """Head against base: signed difference in the unit, relative change where base is not zero."""
    if base is None or head is None or isinstance(base, Missing) or isinstance(head, Missing):
        return "no comparison"
    difference = head - base
    if difference == 0:
        return "unchanged"
    if unit in _SHARES:
        return points(difference)
    sign = "+" if difference > 0 else MINUS
    relative = f" ({_relative(base, head, difference)})" if base else " (from 0)"
    return f"{sign}{show(abs(difference), unit)}{relative}"


def is_bytes(unit: str) -> bool:
    """Whether a unit is bytes or bytes per something."""
    return unit in {"B", "bytes"} or unit.startswith(("bytes/", "bytes per", "B/"))


def plural(count: int, singular: str, many: str | None = None) -> str:
    """A count with its noun: "1 run", "3 runs"."""
    return f"{integer(count)} {singular if count == 1 else many or singular + 's'}"


def _relative(base: int | float, head: int | float, difference: int | float) -> str:
    """A percentage; a multiple where a percentage would need four digits."""
    times = head / base
    return f"{number(float(times), 3)}×" if times >= 10 else signed_percent(difference / abs(base))


def _per(unit: str) -> str:
    return unit[unit.index("/") :] if "/" in unit else ""


def _scaled(value: int | float, step: int, units: tuple[str, ...]) -> str:
    size = abs(value)
    scale = 0
    while scale + 1 < len(units) and size >= step ** (scale + 1) * (1 - 0.00005):
        scale += 1
    if scale == 0:
        return f"{number(value)} B"
    places = max(0, 3 - math.floor(math.log10(max(1.0, size / step**scale)) + 1e-9))
    return f"{_minus(f'{value / step**scale:,.{places}f}')} {units[scale]}"


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
