"""What a program that does not speak the child protocol is said to print: a mapping, declared in the sweep file.

Every figure names its unit; a count or a number of bytes must come out whole, or it was rounded and says too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from engine.counters import COUNTERS, Unit
from jobs.document import Document

UNITS: Mapping[Unit, Mapping[str, Fraction]] = MappingProxyType(
    {
        "count": {"count": Fraction(1)},
        "bytes": {
            **{unit: Fraction(1000**power) for power, unit in enumerate(("B", "kB", "MB", "GB"))},
            **{unit: Fraction(1024**power) for power, unit in enumerate(("KiB", "MiB", "GiB"), start=1)},
        },
        "ns": {unit: Fraction(1000**power) for power, unit in enumerate(("ns", "us", "ms", "s"))},
        "logit": {"logit": Fraction(1)},
    }
)
"""For the unit of a counter, those in which a program may print it, and how many of the first one each is."""


class Figure(Document):
    """One figure: where it stands (a path into the JSON, or a pattern for the text), and in which unit."""

    at: str
    unit: str


class Reads(Document):
    """Where ids, times and counters stand in a program's standard output.

    `json`: the output is one JSON document; `generations` is the path of the list of them (empty: the document is the
    only one), and `ids`, `stop`, `prefill` and `steps` are paths inside each. `text`: they are patterns with one group,
    and the k-th match is the k-th generation's. `counters` and `config` are of the whole run, each found once.
    """

    format: Literal["json", "text"]
    generations: str = ""
    ids: str = ""
    stop: str = ""
    prefill: Figure | None = None
    steps: Figure | None = None
    counters: dict[str, Figure] = {}  # noqa: RUF012 - frozen: defaults are copied
    config: dict[str, str] = {}  # noqa: RUF012


def units_of(counter: str) -> Mapping[str, Fraction]:
    """The units that a counter may be printed in."""
    return UNITS[COUNTERS[counter].unit]
