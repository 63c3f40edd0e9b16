"""From findings to exit codes: what each outcome costs, which is worst, how several fold into one.

The table is written for the reader in docs/verdicts.md; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import MappingProxyType
from typing import Literal

from jobs.model import Gate, GateAction
from jobs.verdict import Finding, Outcome

GateName = Literal["identity", "exact", "time", "infrastructure"]

EXIT_WHEN_BLOCKING = MappingProxyType[Outcome, int](
    {
        "VIOLATION": 1,
        "SHORT": 1,
        "LONG": 1,
        "UNADJUDICATED": 1,
        "NONDETERMINISTIC": 1,  # of head; of base 3, see `exit_for`
        "BROKEN_INVARIANT": 1,
        "BUILD_FAILED": 1,  # of head; of base 3, see `exit_for`
        "REGRESSED": 1,
        "NOT_AS_DECLARED": 1,
        "TIME_WORSE": 1,
        "INFRASTRUCTURE": 4,
        "RETRACTED": 3,
        "NOT_COMPARABLE": 3,
        "CANNOT_LOAD": 3,
        "MISSING": 3,
        "CONTAMINATED": 3,
        "VACUOUS": 3,
        "NEAR_TIE": 3,
        "WAIVED": 0,
        "DECLARED": 0,
        "IMPROVED": 0,
        "PASS": 0,
    }
)
"""Worst first within one code: the order in which findings are shown and an outcome is chosen."""

WAIVABLE: frozenset[Outcome] = frozenset(
    {outcome for outcome, code in EXIT_WHEN_BLOCKING.items() if code == 1} - {"BUILD_FAILED"} | {"NEAR_TIE"}
)
"""What a waiver may accept: a finding. That nothing was proven, or that a host failed, no file can make good."""

FOLD_ORDER = (2, 1, 4, 3, 0)
"""Exit codes, the one that wins first: a usage error, a finding, a fault of ours, no answer, pass."""

_SEVERITY = {outcome: rank for rank, outcome in enumerate(EXIT_WHEN_BLOCKING)}


def severity(outcome: Outcome, exit_code: int) -> tuple[int, int]:
    """By what the worst comes first: exit code, then outcome."""
    return FOLD_ORDER.index(exit_code), _SEVERITY[outcome]


def fold(codes: Iterable[int]) -> int:
    """The one exit code of several; 0 when there is none."""
    return min(codes, key=FOLD_ORDER.index, default=0)


def action_of(gate: Gate, name: GateName) -> GateAction:
    """What a kind of finding may do. Our own faults always block; so does missing evidence where any gate does."""
    if name == "infrastructure":
        return "block"
    return {"identity": gate.identity, "exact": gate.exact, "time": gate.time}[name]


def evidence_action(gate: Gate) -> GateAction:
    """The strictest of the three gates: what is missing is missing for each of them.

    Never off: where every gate is off nothing is judged at all, and that must not read as a pass.
    """
    actions = (gate.identity, gate.exact, gate.time)
    return "block" if "block" in actions or not judges(gate) else "advise"


def judges(gate: Gate) -> bool:
    """Whether any gate is on."""
    return any(action != "off" for action in (gate.identity, gate.exact, gate.time))


def exit_for(outcome: Outcome, action: GateAction, *, of_base: bool = False) -> int:
    """Exit code of one finding; a base that does not repeat itself, or does not build, leaves the question open (3)."""
    if action != "block":
        return 4 if outcome == "INFRASTRUCTURE" else 0
    if of_base and outcome in ("NONDETERMINISTIC", "BUILD_FAILED"):
        return 3
    return EXIT_WHEN_BLOCKING[outcome]


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in one fixed order, whatever order they came in; exact duplicates are dropped."""
    unique = {finding.canonical(): finding for finding in findings}
    return tuple(unique[key] for key in sorted(unique, key=lambda key: (*_rank(unique[key]), key)))


def leading(findings: Iterable[Finding]) -> Finding | None:
    """The finding that names the outcome: the worst that blocks, else the worst that advises; None when all is well.

    Time that advises and notes (`is_note`) never name an outcome.
    """
    ranked = [finding for finding in findings if not is_note(finding)]
    return min(ranked, key=lambda finding: (*_rank(finding), finding.canonical()), default=None)


def is_note(finding: Finding) -> bool:
    """Worth a line, but no part of the outcome: time that advises, and exact figures that do not gate."""
    return finding.exit_code == 0 and finding.gate in ("time", "exact") and finding.outcome in NOTE_OUTCOMES


NOTE_OUTCOMES: frozenset[Outcome] = frozenset({"TIME_WORSE", "NONDETERMINISTIC"})


def _rank(finding: Finding) -> tuple[int, int, float, str, str]:
    """By exit code, by outcome, then by how far the figure moved; without a figure, as a crash, before all."""
    moved = math.inf if finding.share is None else abs(finding.share)
    return (*severity(finding.outcome, finding.exit_code), -moved, finding.cell, finding.arm)
