"""Answers of the oracle: kept once, in order, and part of what the judge reads; on both stores."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from jobs.errors import SpecError
from jobs.model import ArmPlan, CellPlan, Manifest, RunSettings
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition
from jobs.store import Store

pytest_plugins = ("tests.unit.jobs_store_cases",)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store.open(store_url, lambda: datetime(2026, 11, 30, tzinfo=UTC))
    yield opened
    opened.close()


def submitted(store: Store) -> str:
    settings = RunSettings(tokens=2, generations=1)
    plan = CellPlan(
        cell="c", model="m", model_path="/m", model_digest="d", prompt="p", prompt_ids=(1,), settings=settings,
        arms=("base", "head"),
    )  # fmt: skip
    arms = (ArmPlan(name="base", role="base", source="path"), ArmPlan(name="head", role="head", source="path"))
    return store.submit(Manifest(name="s", arms=arms, cells=(plan,)), "h" * 64, "test")


def answer(head_id: int = 9, error: float = 0.1, failure: str = "") -> Adjudication:
    asked = FollowUp(
        cell="c",
        base="base",
        head="head",
        card="SIM-0",
        prompt_ids=(1,),
        base_ids=(5, 6),
        head_ids=(5, head_id),
        first=1,
    )
    at = ForcedPosition(
        index=1, base_error=error, base_id=6, base_behind=0.0, head_id=head_id, head_behind=1 / 3, oracle_id=6
    )
    return Adjudication(asked=asked, positions=() if failure else (at,), failure=failure)


def test_answers_come_back_equal_and_in_order(store: Store) -> None:
    sweep_id = submitted(store)
    given = [answer(9), answer(8, failure="no\x00 engine"), answer(7, error=1e-300)]
    for one in given:
        store.write_adjudication(sweep_id, one)
    kept = store.judge_input(sweep_id).adjudications
    assert kept[0] == given[0] and kept[2] == given[2]
    assert kept[1].asked == given[1].asked and "engine" in kept[1].failure
    said = [event.message for event in store.events(sweep_id) if event.kind == "adjudication"]
    assert said[0] == "head of c at index 1: answered at 1 indices"


def test_of_several_answers_to_one_question_the_first_stands(store: Store) -> None:
    """A resend, and what another driver found out meanwhile."""
    sweep_id = submitted(store)
    for one in (answer(), answer(), answer(error=0.2)):
        store.write_adjudication(sweep_id, one)
    assert store.judge_input(sweep_id).adjudications == (answer(),)
    assert [event.kind for event in store.events(sweep_id)].count("adjudication") == 1


def test_answers_are_those_of_their_sweep(store: Store) -> None:
    first = submitted(store)
    store.write_adjudication(first, answer())
    with pytest.raises(SpecError):
        store.write_adjudication("swp_nobody", answer())
    assert store.judge_input(first).adjudications == (answer(),)
