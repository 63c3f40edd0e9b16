"""Where the findings of one cell are collected; it knows the gate, so that whoever finds need not."""

from __future__ import annotations

from collections.abc import Iterable

from jobs import outcomes, wording
from jobs.model import Gate, GateAction
from jobs.verdict import Finding, Outcome

EVIDENCE: frozenset[Outcome] = frozenset({"MISSING", "VACUOUS", "NOT_COMPARABLE", "CONTAMINATED", "BUILD_FAILED"})
"""Outcomes that say "nothing is proven": they block wherever any gate blocks."""


class Docket:
    """Findings of one cell, each with the exit code that its gate gives it. A gate that is off drops its findings."""

    def __init__(self, cell: str, gate: Gate) -> None:
        self.cell = cell
        self._gate = gate
        self._findings: list[Finding] = []

    def add(
        self,
        outcome: Outcome,
        gate: outcomes.GateName,
        message: str,
        *,
        arm: str = "",
        remedy: str = "",
        run_ids: Iterable[str] = (),
        of_base: bool = False,
        note: bool = False,
        log: str = "",
        share: float | None = None,
    ) -> None:
        """Add a finding. `of_base`: the same of base leaves the question open; `note`: never costs anything."""
        action = self._action(outcome, gate)
        if action == "off":
            return
        self._findings.append(
            Finding(
                outcome=outcome,
                cell=self.cell,
                arm=arm,
                message=message,
                remedy=remedy or wording.REMEDY[outcome],
                exit_code=0 if note else outcomes.exit_for(outcome, action, of_base=of_base),
                gate=gate,
                run_ids=tuple(dict.fromkeys(run_ids)),
                log=log,
                share=share,
            )
        )

    def findings(self) -> tuple[Finding, ...]:
        """All findings, worst first."""
        return outcomes.worst_first(self._findings)

    def _action(self, outcome: Outcome, gate: outcomes.GateName) -> GateAction:
        if outcome == "INFRASTRUCTURE":
            return "block"
        if outcome in EVIDENCE and gate != "time":
            return outcomes.evidence_action(self._gate)
        return outcomes.action_of(self._gate, gate)
