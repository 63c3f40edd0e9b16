"""Simulated cards: a `CardProbe` that plays a written script instead of asking a driver.

A script is a list of timed states, `[{"at_s": 0, "used_bytes": 0}, {"at_s": 2.5, "processes": [{"pid": 99}]}]`: each
state changes the fields it names from that second on, counted from the probe's start. `{"error": "..."}` makes the
whole card unreadable, as a card that fell off the bus. Without a script the card is clear for ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from orchestrator.cards import CardName, CardProcess, CardSnapshot, ProbeError

State = Mapping[str, Any]

SIMULATED_CARD = "sim-h200"
SIMULATED_DRIVER = "sim 1"
SIMULATED_MEMORY_BYTES = 150_754_820_096
_CLEAR = CardSnapshot(
    uuid="",
    used_bytes=0,
    total_bytes=SIMULATED_MEMORY_BYTES,
    processes=(),
    utilisation_percent=0,
    sm_clock_mhz=1980,
    memory_clock_mhz=3201,
    max_sm_clock_mhz=1980,
    throttle_bits=0,
    temperature_c=40,
    power_mw=120_000,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    mig_enabled=False,
    persistence=True,
    pcie_generation=5,
    pcie_width=16,
    max_pcie_generation=5,
    max_pcie_width=16,
)
_FIELDS = {f.name for f in fields(CardSnapshot)} - {"uuid", "errors"}


def simulated_uuid(host: str, index: int) -> str:
    """UUID of simulated card `index` of a host: the same card in every process of that host."""
    return f"SIM-{hashlib.sha256(host.encode()).hexdigest()[:12]}-{index}"


class ScriptedProbe:
    """Plays `script` (states, or a JSON file of them) on each of `uuids`; `clock` gives seconds."""

    def __init__(
        self, uuids: Sequence[str], clock: Callable[[], float], script: Sequence[State] | Path = (), name: str = ""
    ) -> None:
        states = json.loads(script.read_text()) if isinstance(script, Path) else list(script)
        self._states = _checked(states)
        self._uuids = tuple(uuids)
        self._name = name or SIMULATED_CARD
        self._clock = clock
        self._start_s = clock()

    def cards(self) -> tuple[CardName, ...]:
        """The simulated cards."""
        return tuple(
            CardName(u, self._name, SIMULATED_DRIVER, i, simulated=True, memory_bytes=SIMULATED_MEMORY_BYTES)
            for i, u in enumerate(self._uuids)
        )

    def snapshot(self, uuid: str) -> CardSnapshot:
        """The state that the script has reached."""
        if uuid not in self._uuids:
            raise ProbeError(f"no simulated card {uuid}", f"cards are {', '.join(self._uuids)}")
        now_s = self._clock() - self._start_s
        merged: dict[str, Any] = {}
        for state in self._states:
            if state["at_s"] <= now_s:
                merged.update({k: v for k, v in state.items() if k != "at_s"})
        if error := merged.pop("error", None):
            return CardSnapshot(uuid, errors=(("card", str(error)),))
        return replace(_CLEAR, uuid=uuid, **merged)

    def close(self) -> None:
        """Nothing to let go."""


def _checked(states: Any) -> list[dict[str, Any]]:
    """Validate and convert: unknown fields are refused, lists become the snapshot's types."""
    out: list[dict[str, Any]] = []
    for number, state in enumerate(states):
        unknown = set(state) - _FIELDS - {"at_s", "error"}
        if unknown:
            raise ProbeError(f"card script, state {number}: unknown {sorted(unknown)}", f"known: {sorted(_FIELDS)}")
        entry = {"at_s": 0.0, **state}
        if entry.get("processes") is not None:
            entry["processes"] = tuple(CardProcess(**p) for p in entry["processes"])
        if "unsupported" in entry:
            entry["unsupported"] = frozenset(entry["unsupported"])
        out.append(entry)
    return sorted(out, key=lambda s: float(s["at_s"]))
