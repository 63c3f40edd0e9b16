"""The word, tone and gloss of every class a verdict can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from reports.blocks import State, Tone

OUTCOMES: Final[Mapping[str, tuple[Tone, str]]] = {
    "PASS": ("good", "same tokens, no exact counter worse"),
    "IMPROVED": ("good", "same tokens, an exact counter better"),
    "DECLARED": ("good", "same tokens, a counter changed as declared"),
    "WAIVED": ("warn", "a finding that a reviewed file accepts for a time"),
    "NEAR_TIE": ("warn", "tokens differ inside the oracle's band"),
    "VIOLATION": ("bad", "tokens differ"),
    "SHORT": ("bad", "head stops early"),
    "LONG": ("bad", "head goes on too long"),
    "UNADJUDICATED": ("bad", "tokens differ and nothing could decide why"),
    "NONDETERMINISTIC": ("bad", "an arm does not repeat itself"),
    "REGRESSED": ("bad", "an exact counter is worse"),
    "NOT_AS_DECLARED": ("bad", "a declared change did not come about"),
    "BUILD_FAILED": ("bad", "an arm could not be built"),
    "BROKEN_INVARIANT": ("bad", "the counters contradict each other"),
    "VACUOUS": ("warn", "the path under test never ran, so nothing is proven"),
    "NOT_COMPARABLE": ("warn", "the arms differ in more than what was meant to vary"),
    "CANNOT_LOAD": ("warn", "an engine is not on this host, so it was not compared"),
    "CONTAMINATED": ("warn", "the card was not clear"),
    "MISSING": ("warn", "a part of the answer was never measured"),
    "RETRACTED": ("warn", "what it rests on was retracted, so nothing is proven any more"),
    "TIME_WORSE": ("bad", "slower beyond noise"),
    "INFRASTRUCTURE": ("warn", "worker, store or host failed"),
}
"""Outcome -> tone and what it means in words."""

IDENTITIES: Final[Mapping[str, tuple[str, Tone]]] = {
    "IDENTICAL": ("identical", "good"),
    "SHORT": ("short", "bad"),
    "LONG": ("long", "bad"),
    "NEAR_TIE": ("near tie", "warn"),
    "VIOLATION": ("violation", "bad"),
    "UNADJUDICATED": ("unadjudicated", "bad"),
    "NONDETERMINISTIC": ("nondeterministic", "bad"),
    "VACUOUS": ("vacuous", "warn"),
    "NOT_COMPARABLE": ("not comparable", "warn"),
    "MISSING": ("missing", "warn"),
}
METRICS: Final[Mapping[str, tuple[str, Tone]]] = {
    "same": ("same", "quiet"),
    "improved": ("improved", "good"),
    "regressed": ("regressed", "bad"),
    "neutral": ("moved", "quiet"),
    "declared": ("declared", "good"),
    "new": ("new", "quiet"),
    "vanished": ("vanished", "warn"),
    "not_recorded": ("not recorded", "warn"),
    "varies": ("varies inside an arm", "warn"),
}
TIMES: Final[Mapping[str, tuple[str, Tone]]] = {
    "BETTER": ("better", "good"),
    "WORSE": ("worse", "bad"),
    "SAME": ("same within noise", "quiet"),
    "UNDECIDED": ("undecided", "warn"),
    "DIFFERENT_WORK": ("different work", "warn"),
    "THROTTLED_OUT": ("throttled out", "warn"),
    "NO_VALID_SAMPLE": ("no valid sample", "warn"),
    "NOT_MEASURED": ("not measured", "quiet"),
}
CERTIFICATES: Final[Mapping[str, Tone]] = {
    "clear": "good",
    "contended": "bad",
    "throttled": "bad",
    "unknown": "warn",
}


def outcome(name: str) -> State:
    """An outcome by its own name, the one the exit code and the JSON carry."""
    return State(name, OUTCOMES[name][0])


def gloss(name: str, gate: Mapping[str, str]) -> str:
    """What an outcome means, in words; of tokens that the gates did not judge it says no more than that."""
    meaning = OUTCOMES[name][1]
    return meaning.replace("same tokens", "tokens not judged") if gate.get("identity") == "off" else meaning


def held(holds: bool) -> State:
    """Whether an expression held."""
    return State("holds", "good") if holds else State("does not hold", "bad")
