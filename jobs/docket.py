"""Where the findings of one cell are collected; it knows the gate, so that whoever finds need not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jobs import outcomes, wording
from jobs.model import Gate, GateAction
from jobs.redact import redact
from jobs.reviewed import Waiver
from jobs.verdict import Finding, Outcome

EVIDENCE: frozenset[Outcome] = frozenset(
    {"MISSING", "VACUOUS", "NOT_COMPARABLE", "CONTAMINATED", "BUILD_FAILED", "CANNOT_LOAD"}
)
"""Outcomes that say "nothing is proven": they block wherever any gate blocks."""


class Docket:
    """Findings of one cell, each with the exit code that its gate gives it. A gate that is off drops its findings.

    `waivers`: those in force. What one covers is kept as WAIVED and costs nothing.
    """

    def __init__(self, cell: str, gate: Gate, waivers: Sequence[Waiver] = ()) -> None:
        self.cell = cell
        self._gate = gate
        self._waivers = waivers
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
        metric: str = "",
    ) -> None:
        """Add a finding. `of_base`: the same of base leaves the question open; `note`: never costs anything."""
        action = self._action(outcome, gate)
        if action == "off":
            return
        finding = Finding(
            outcome=outcome,
            cell=self.cell,
            arm=arm,
            message=redact(message),
            remedy=remedy or wording.REMEDY[outcome],
            exit_code=0 if note else outcomes.exit_for(outcome, action, of_base=of_base),
            gate=gate,
            run_ids=tuple(dict.fromkeys(run_ids)),
            log=redact(log),
            share=share,
            metric=metric,
        )
        self._findings.append(self._waived(finding))

    def findings(self) -> tuple[Finding, ...]:
        """All findings, worst first."""
        return outcomes.worst_first(self._findings)

    def waives(self, outcomes_: Collection[str], arm: str) -> bool:
        """Whether a finding of an arm, of one of some classes, has been waived."""
        return any(finding.was in outcomes_ and finding.arm == arm for finding in self._findings)

    def _waived(self, finding: Finding) -> Finding:
        """The finding as its waiver leaves it. One that costs nothing needs none."""
        if finding.outcome not in outcomes.WAIVABLE or not finding.exit_code:
            return finding
        if finding.outcome == "NONDETERMINISTIC" and finding.exit_code != 1:  # of base: what it leaves open stays open
            return finding
        scope = (finding.cell, finding.outcome, finding.subject)
        waiver = next((one for one in self._waivers if one.covers(*scope)), None)
        if waiver is None:
            return finding
        why = f"waived as {finding.outcome} until {waiver.expires}: {waiver.reason} (evidence: {waiver.evidence})"
        return finding.model_copy(
            update={
                "outcome": "WAIVED",
                "was": finding.outcome,
                "waiver": waiver.id,
                "exit_code": 0,
                "message": f"{finding.message}; {why}",
                "remedy": f"{finding.remedy} The waiver ends on {waiver.expires}.",
            }
        )

    def _action(self, outcome: Outcome, gate: outcomes.GateName) -> GateAction:
        if outcome == "INFRASTRUCTURE":
            return "block"
        if outcome in EVIDENCE and gate != "time":
            return outcomes.evidence_action(self._gate)
        return outcomes.action_of(self._gate, gate)
