"""The judge's questions, answered by real engines: a tie that goes the other way, a wrong head, a lost worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.adapters.model_files import ModelDigests
from jobs.adapters.native_forced import ForceOrder
from jobs.judge import judge
from jobs.model import ArmPlan, CellPlan, Limits, Lock, Manifest, RunSettings
from jobs.more_runs import FreshBlocks
from jobs.near_tie import Adjudication
from jobs.provenance import tree_digest
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.cards import CardName
from orchestrator.choose import simulated_cards
from orchestrator.conclude import judge_sweep
from orchestrator.dispatch import Dispatcher
from orchestrator.embedded import open_questions
from orchestrator.lost import HostLost, Stopped, WorkerLost
from orchestrator.place import InProcessPlacer, Ticket
from orchestrator.scheduler import Scheduler
from orchestrator.scripted import ScriptedProbe
from orchestrator.seat import Happening
from orchestrator.worker import GpuWorker, WorkerCard, WorkerSettings
from tests.unit.engine_rig import TINY_PROMPT
from tests.unit.engine_tied import (
    CHOICE,
    EMBEDDING,
    FIRST,
    NEXT,
    ROOT,
    ROWS,
    SAMPLING,
    TIES_UPWARDS,
    TOKENS,
    TWIN,
    WRONG_LOGITS,
    build_tied,
    tree,
)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The model, and what it emits."""
    return build_tied(tmp_path_factory.mktemp("tied"))


def arm(name: str, folder: Path) -> ArmPlan:
    role = "base" if name == "base" else "head"
    return ArmPlan(name=name, role=role, source="path", tree_digest=tree_digest(folder), python_path=str(folder))


class Sweep:
    """A sweep of base and one head on a simulated card, without Ray."""

    def __init__(self, root: Path, model: Path, head: Path, locks: tuple[Lock, ...] = ()) -> None:
        settings = RunSettings(tokens=TOKENS, generations=2, ignore_eos=True, device="sim")
        cell = CellPlan(
            cell="tied/short",
            model="tied",
            model_path=str(model),
            model_digest=ModelDigests()(model),
            prompt="short",
            prompt_ids=TINY_PROMPT,
            settings=settings,
            arms=("base", "head"),
            config={"weight_budget": "50%", "granule": 4096},
            locks=locks,
        )
        arms = (arm("base", tree(root / "base")), arm("head", head))
        self.manifest = Manifest(name="tied", arms=arms, cells=(cell,), limits=Limits(queue_timeout_s=20))
        self.store = Store.open(f"sqlite:///{root / 'store.db'}", lambda: datetime.now(UTC))
        self.sweep_id = self.store.submit(self.manifest, "h" * 64, "test")
        self.works = WorkerSettings(root / "spool", root / "scratch", root / "locks")
        self.heard: list[Happening] = []

    def make(self, worker: str, card: CardName, stopped: Callable[[], bool]) -> GpuWorker:
        probe = ScriptedProbe([card.uuid], time.monotonic, [])
        return GpuWorker(worker, card, self.works, probe, {"PATH": "/usr/bin:/bin"}, stopped)

    def is_at_the_oracle(self) -> bool:
        """Whether the oracle has been asked, after base ran again."""
        return any(h.kind == "asks" and "oracle" in h.text for h in self.heard)

    def run(self, placer: InProcessPlacer | None = None, stopped: Callable[[], bool] = lambda: False) -> Verdict:
        """All runs, then the judge's questions as `run_embedded` puts them, then the verdict."""
        placer = placer or InProcessPlacer(simulated_cards("test", 1), self.make)
        hellos = placer.open()
        try:
            dispatcher = Dispatcher(
                self.store, placer, "driver", self.sweep_id, stopped=stopped, tell=self.heard.append
            )
            dispatcher.seat(hellos)
            dispatcher.work()
            while asked := open_questions(self.store, self.sweep_id):
                dispatcher.ask(self.sweep_id, asked)
        finally:
            placer.close()
        return judge_sweep(self.store, self.sweep_id)


@pytest.fixture
def swept(tmp_path: Path, tied: tuple[Path, list[int]]) -> Iterator[Callable[..., Sweep]]:
    """A sweep whose head has lines planted."""
    made: list[Sweep] = []

    def with_head(*changes: tuple[str, str, str], locks: tuple[Lock, ...] = ()) -> Sweep:
        made.append(Sweep(tmp_path, tied[0], tree(tmp_path / "head", *changes), locks))
        return made[-1]

    yield with_head
    for sweep in made:
        sweep.store.close()


def test_a_tie_that_goes_the_other_way_is_a_near_tie(swept: Callable[..., Sweep], tied: tuple[Path, list[int]]) -> None:
    sweep = swept(TIES_UPWARDS)
    verdict = sweep.run()
    assert (verdict.outcome, verdict.exit_code) == ("NEAR_TIE", 3), verdict.headline
    [answer] = sweep.store.judge_input(sweep.sweep_id).adjudications
    first, *rest = answer.positions
    assert (answer.asked.first, answer.asked.head_ids[FIRST], list(answer.asked.base_ids)) == (FIRST, TWIN, tied[1])
    assert first.base_behind == first.head_behind == 0
    assert 0 < first.base_error < 1e-4, "another computation, and the same numbers"
    assert len(rest) == len(answer.own) == TOKENS - FIRST - 1
    assert [(h.arm, h.text) for h in sweep.heard if h.kind == "asks"] == [
        ("base", "for 4 runs more, to see whether it repeats itself"),
        ("head", f"the oracle about index {FIRST} of base's ids"),
    ]
    runs = sweep.store.judge_input(sweep.sweep_id).cells[0].runs
    assert [run.arm for run in runs] == ["base", "head", "head", "base", *["base"] * 4]
    assert {run.state for run in runs} == {"complete"}
    assert [event.kind for event in sweep.store.events(sweep.sweep_id)].count("adjudication") == 1
    assert not list(sweep.works.scratch.iterdir()), "nothing of six children is left"


def test_locks_with_a_margin_are_held_against_the_oracle(
    swept: Callable[..., Sweep], tied: tuple[Path, list[int]]
) -> None:
    """At the tie the oracle's best and second are one number apart in nothing; elsewhere they are far apart."""
    clear = Lock(prompt="short", index=0, expected=tied[1][0], margin=(1e-3, 1e3))
    tie = Lock(prompt="short", index=FIRST, expected=tied[1][FIRST], allowed=(TWIN,), margin=(0.0, 1e-6))
    sweep = swept(locks=(clear, tie))
    assert sweep.run().outcome == "PASS"
    given = sweep.store.judge_input(sweep.sweep_id)
    assert [answer.asked.kind for answer in given.adjudications] == ["lock", "lock"]
    at, tied_at = (answer.positions[0] for answer in given.adjudications)
    assert at.oracle_margin is not None and at.oracle_margin > 1e-3 and tied_at.oracle_margin == 0
    assert len(given.cells[0].runs) == 4, "ids are equal, so that base is not run again"
    assert {h.text for h in sweep.heard if h.kind == "asks"} == {
        f"the oracle about index {index} of base's ids" for index in (0, FIRST)
    }


def test_wrong_logits_are_a_violation_however_small_the_gap(swept: Callable[..., Sweep]) -> None:
    """Base's gap is 0 there: only the oracle can tell the twin from the other."""
    sweep = swept(WRONG_LOGITS)
    verdict = sweep.run()
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert "by the oracle head's id is" in verdict.headline and f"id {NEXT} instead of" in verdict.headline
    [answer] = sweep.store.judge_input(sweep.sweep_id).adjudications
    assert 0.001 < answer.positions[0].head_behind < 0.15


@pytest.mark.slow
def test_a_choice_that_its_own_logits_do_not_bear_is_not_excused(
    swept: Callable[..., Sweep], tied: tuple[Path, list[int]]
) -> None:
    chosen = tied[1][FIRST]
    planted = f"best = int(np.argmax(row))\n    best = {NEXT} if best == {chosen} else best\n    a["
    verdict = swept((SAMPLING, CHOICE, planted)).run()
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert f"head, forced, chooses id {chosen} at index {FIRST} where it gave {NEXT}" in verdict.headline


@pytest.mark.slow
def test_a_head_that_cannot_be_forced_is_not_excused(swept: Callable[..., Sweep]) -> None:
    """Its runs are fine; its command for logits is not there."""
    sweep = swept(TIES_UPWARDS, ("engine/commands/logits.py", '"logits", help=', '"other", help='))
    verdict = sweep.run()
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert "the oracle could not be asked (head ends with exit" in verdict.headline


@pytest.mark.slow
def test_a_tree_that_changed_since_is_not_forced(swept: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = swept(TIES_UPWARDS)

    class Changing(InProcessPlacer):
        def adjudicate(self, worker: str, order: ForceOrder) -> Ticket:
            (tmp_path / "head" / SAMPLING).write_text((ROOT / SAMPLING).read_text())
            return super().adjudicate(worker, order)

    verdict = sweep.run(Changing(simulated_cards("test", 1), sweep.make))
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert "it changed since the sweep was submitted" in verdict.headline


def test_a_worker_that_is_lost_over_a_question_is_asked_again(swept: Callable[..., Sweep]) -> None:
    sweep = swept(TIES_UPWARDS)
    lost: list[str] = []

    class Losing(InProcessPlacer):
        def adjudication(self, ticket: Ticket) -> Adjudication:
            answer = super().adjudication(ticket)
            if len(lost) < 2:
                lost.append(ticket.worker)
                raise WorkerLost(ticket.worker, "gone")
            return answer

    assert sweep.run(Losing(simulated_cards("test", 1), sweep.make)).outcome == "NEAR_TIE"
    assert len(lost) == 2
    assert len(sweep.store.judge_input(sweep.sweep_id).adjudications) == 1


@pytest.mark.slow
def test_a_stop_in_a_question_leaves_it_open_and_a_resume_asks_again(swept: Callable[..., Sweep]) -> None:
    sweep = swept(TIES_UPWARDS)
    with pytest.raises(Stopped):
        sweep.run(stopped=sweep.is_at_the_oracle)
    assert sweep.store.judge_input(sweep.sweep_id).adjudications == ()
    assert sweep.store.pending(sweep.sweep_id).pending == 0
    assert isinstance(judge(sweep.store.judge_input(sweep.sweep_id)), tuple)
    assert sweep.run().outcome == "NEAR_TIE"


def test_judging_without_workers_says_that_nobody_was_asked(swept: Callable[..., Sweep]) -> None:
    """And does not stand in the way of an answer later."""
    sweep = swept(TIES_UPWARDS)
    with pytest.raises(Stopped):
        sweep.run(stopped=sweep.is_at_the_oracle)
    verdict = judge_sweep(sweep.store, sweep.sweep_id)
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert "the oracle could not be asked (no worker was there)" in verdict.headline
    assert len(open_questions(sweep.store, sweep.sweep_id)) == 1
    assert sweep.store.sweep(sweep.sweep_id).state == "open"
    assert sweep.run().outcome == "NEAR_TIE"
    assert sweep.store.sweep(sweep.sweep_id).state == "judged"


def test_a_head_that_is_wrong_after_the_tie_is_not_excused(swept: Callable[..., Sweep]) -> None:
    """Fed base's ids it is right: only its own ids show what it does behind its choice."""
    sweep = swept(TIES_UPWARDS, (EMBEDDING, ROWS, f'{ROWS}\n    a["y"][0][a["ids"][0] == {TWIN}] *= -3'))
    verdict = sweep.run()
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert "forced through its own ids" in verdict.headline


@pytest.mark.slow
def test_workers_lost_over_a_question_again_and_again_are_a_fault_of_the_host(swept: Callable[..., Sweep]) -> None:
    sweep = swept(TIES_UPWARDS)

    class Losing(InProcessPlacer):
        def adjudication(self, ticket: Ticket) -> Adjudication:
            raise WorkerLost(ticket.worker, "gone")

    with pytest.raises(HostLost, match="3 workers were lost over a question about tied/short"):
        sweep.run(Losing(simulated_cards("test", 1), sweep.make))
    assert sweep.run().outcome == "NEAR_TIE", "and a resume asks again"


class Loses(InProcessPlacer):
    """Every worker is lost over a question."""

    lives = True
    """Whether a lost worker can be had again."""

    def joined(self) -> tuple[WorkerCard, ...]:
        return ()

    def adjudication(self, ticket: Ticket) -> Adjudication:
        raise WorkerLost(ticket.worker, "gone")

    def replace(self, worker: str) -> WorkerCard:
        if not self.lives:
            raise WorkerLost(worker, "its node is gone")
        return super().replace(worker)


@pytest.mark.slow
def test_workers_lost_over_a_question_cost_a_scheduler_that_question_only(swept: Callable[..., Sweep]) -> None:
    sweep = swept(TIES_UPWARDS)
    placer = Loses(simulated_cards("test", 1), sweep.make)
    hellos = placer.open()
    try:
        scheduler = Scheduler(sweep.store, placer, "here/1", "h" * 64, tell=sweep.heard.append, keep_s=0.2)
        scheduler.serve(hellos, once=True)
    finally:
        placer.close()
    assert sweep.store.sweep(sweep.sweep_id).state == "judged"
    verdict = sweep.store.verdict(sweep.sweep_id)
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert "3 workers were lost over it, the last one: worker w0: gone" in verdict.headline


@pytest.mark.slow
def test_a_card_that_goes_with_a_question_leaves_the_sweep_open_and_says_so(swept: Callable[..., Sweep]) -> None:
    sweep = swept(TIES_UPWARDS)
    placer = Loses(simulated_cards("test", 2), sweep.make)
    placer.lives = False
    hellos = placer.open()
    try:
        Scheduler(sweep.store, placer, "here/1", "h" * 64, tell=sweep.heard.append, keep_s=0.2).serve(hellos, once=True)
    finally:
        placer.close()
    assert sweep.store.sweep(sweep.sweep_id).state == "open"
    [said] = [event.message for event in sweep.store.events(sweep.sweep_id) if event.kind == "waiting"]
    assert "on which base ran, is not here to ask about its ids" in said
    assert sweep.run().outcome == "NEAR_TIE"


@pytest.mark.slow
def test_a_model_that_changed_meanwhile_is_no_witness(
    swept: Callable[..., Sweep], tied: tuple[Path, list[int]]
) -> None:
    sweep = swept(TIES_UPWARDS)
    note = tied[0] / "genai_config.json"
    kept = note.read_text()

    class Changing(InProcessPlacer):
        def adjudicate(self, worker: str, order: ForceOrder) -> Ticket:
            note.write_text(kept + "\n")
            return super().adjudicate(worker, order)

    try:
        verdict = sweep.run(Changing(simulated_cards("test", 1), sweep.make))
    finally:
        note.write_text(kept)
    assert verdict.outcome == "UNADJUDICATED"
    assert "model tied has digest" in verdict.headline


def test_another_card_than_base_ran_on_is_not_asked(swept: Callable[..., Sweep]) -> None:
    sweep = swept(TIES_UPWARDS)
    with pytest.raises(Stopped):
        sweep.run(stopped=sweep.is_at_the_oracle)
    with pytest.raises(HostLost, match="on which base ran, is not here"):
        sweep.run(InProcessPlacer(simulated_cards("other", 1), sweep.make))


@pytest.mark.slow
def test_base_runs_again_on_no_other_card(swept: Callable[..., Sweep]) -> None:
    sweep = swept(WRONG_LOGITS)
    placer = InProcessPlacer(simulated_cards("test", 1), sweep.make)
    dispatcher = Dispatcher(sweep.store, placer, "driver", sweep.sweep_id)
    try:
        dispatcher.seat(placer.open())
        dispatcher.work()
    finally:
        placer.close()
    with pytest.raises(HostLost, match="on which base ran, is not here"):
        sweep.run(InProcessPlacer(simulated_cards("other", 1), sweep.make))
    assert sweep.store.pending(sweep.sweep_id).runs == 4, "none was added that nobody there could make"
    assert sweep.run().outcome == "VIOLATION"
    assert sweep.store.pending(sweep.sweep_id).runs == 8


def test_fresh_blocks_that_are_asked_for_are_run_in_their_order(swept: Callable[..., Sweep]) -> None:
    sweep = swept()
    placer = InProcessPlacer(simulated_cards("test", 1), sweep.make)
    dispatcher = Dispatcher(sweep.store, placer, "driver", sweep.sweep_id, tell=sweep.heard.append)
    try:
        dispatcher.seat(placer.open())
        dispatcher.work()
        dispatcher.ask(sweep.sweep_id, [FreshBlocks(cell="tied/short", first=1, count=2)])
    finally:
        placer.close()
    runs = sweep.store.judge_input(sweep.sweep_id).cells[0].runs
    assert [(run.block, run.state) for run in runs] == [(block, "complete") for block in (0, 1, 2) for _ in range(4)]
    assert [(h.arm, h.text) for h in sweep.heard if h.kind == "asks"] == [
        ("all", "for 2 fresh blocks, to decide on time")
    ]
    assert judge_sweep(sweep.store, sweep.sweep_id).outcome == "PASS"
