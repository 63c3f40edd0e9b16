"""What a sweep's judge asks the oracle: the answers that it was given, and the questions that are open."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.identity import NO_ORACLE, Oracle, Stream, common_prefix
from jobs.judge_arm import ArmEvidence
from jobs.model import CellPlan, IdentityContract
from jobs.near_tie import Adjudication, FollowUp, ruled
from jobs.verdict import IdentityClass


class Inquiry:
    """Of one cell. `open_questions` are the differences that may be near ties and about which nobody was asked."""

    def __init__(self, plan: CellPlan, contract: IdentityContract, answers: Sequence[Adjudication]) -> None:
        self._plan = plan
        self._contract = contract
        self._answers = {answer.asked: answer for answer in answers}
        self.open_questions: list[FollowUp] = []

    def of(self, base: ArmEvidence, other: ArmEvidence) -> Oracle:
        """Whom `identity.pair_row` asks about two arms."""
        return lambda left, right: self._asked(self._question(base, other, left, right))

    def _question(self, base: ArmEvidence, other: ArmEvidence, left: Stream, right: Stream) -> FollowUp:
        first = common_prefix(left.ids, right.ids)
        prompts = self._plan.prompts(base.plan)
        record = next(record for record in base.records() if record.run_id == left.run_id)
        return FollowUp(
            cell=self._plan.cell,
            base=base.name,
            head=other.name,
            card=str(record.device.get("uuid") or ""),
            prompt_ids=prompts[left.place[1] % len(prompts)],
            base_ids=left.ids,
            head_id=right.ids[first],
            first=first,
        )

    def _asked(self, question: FollowUp) -> tuple[IdentityClass, str]:
        answer = self._answers.get(question)
        if answer is not None:
            return ruled(answer, self._contract.near_tie_cap)
        self.open_questions.append(question)
        return "UNADJUDICATED", NO_ORACLE
