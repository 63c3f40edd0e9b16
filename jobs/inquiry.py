"""What a sweep's judge asks the oracle: the answers that it was given, and the questions that are open."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.contract import IdentityContract
from jobs.identity import NO_ORACLE, Oracle, Stream, common_prefix
from jobs.judge_arm import ArmEvidence
from jobs.model import CellPlan, RunRecord
from jobs.more_runs import BaseAgain, FreshBlocks
from jobs.near_tie import Adjudication, FollowUp, ruled
from jobs.verdict import IdentityClass

NO_ROOM = "limits.follow_ups allows no more questions"
NOBODY = "no worker was there"
USED_UP = "the oracle was not asked, since limits.follow_ups allows no more questions, so it counts as VIOLATION"


class Inquiry:
    """Of one cell; `room` is how many questions the sweep may still ask.

    `open_questions` are the differences that may be near ties and about which nobody was asked, or the runs that must
    be made first. `runs_more`: whether there is anybody to make them.
    """

    def __init__(
        self,
        plan: CellPlan,
        contract: IdentityContract,
        answers: Sequence[Adjudication],
        room: int = 0,
        *,
        runs_more: bool = False,
    ) -> None:
        self._plan = plan
        self._contract = contract
        self._answers = {answer.asked: answer for answer in answers}
        self._room = room
        self._runs_more = runs_more
        self.open_questions: list[FollowUp | BaseAgain | FreshBlocks] = []

    def ask_for(self, runs: BaseAgain | FreshBlocks) -> str:
        """Ask for further runs, and for nothing else before they are made; why that cannot be, or nothing."""
        if not self._runs_more:
            return NOBODY
        if self._room <= 0:
            return NO_ROOM
        self.open_questions = [runs]
        return ""

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
            head_ids=right.ids,
            first=first,
            base_target=target_of(record),
            head_target=target_of(next(record for record in other.records() if record.run_id == right.run_id)),
        )

    def answer(self, question: FollowUp) -> tuple[Adjudication | None, str]:
        """The answer to a question; where there is none it is asked, or cannot be: why."""
        answer = self._answers.get(question)
        if answer is not None:
            return answer, ""
        if self._room <= 0:
            return None, NO_ROOM
        self.open_questions.append(question)
        return None, "the oracle was not asked yet"

    def _asked(self, question: FollowUp) -> tuple[IdentityClass, str]:
        answer, why = self.answer(question)
        if answer is not None:
            return ruled(answer, self._contract.near_tie_cap)
        return "UNADJUDICATED", USED_UP if why == NO_ROOM else NO_ORACLE


def target_of(record: RunRecord) -> str:
    """What a run's plans were made for, where it says so."""
    told = record.effective_config.get("target")
    return str(told["value"]) if isinstance(told, dict) and told.get("value") else ""
