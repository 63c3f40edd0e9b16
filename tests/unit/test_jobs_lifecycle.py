"""Which state may follow which, how many tries a run has, and the order of a block."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import IllegalMove
from jobs.lifecycle import ENDS, LIVE, MOVES, Move, SweepState, Tried, advance, attempts_left
from jobs.model import AttemptState, Limits, Order, RunState
from jobs.order import arm_order

ATTEMPT = get_args(AttemptState)
RUN = get_args(RunState)


def test_the_way_of_a_measured_attempt() -> None:
    state = "claimed"
    for target in ("clearing", "running", "measured"):
        state = advance(state, target)
    assert state == "measured"


def test_the_whole_table() -> None:
    """Spelled out, so that a change of a rule is a change of this test."""
    legal = {(frm, to) for frm, targets in MOVES.items() for to in targets}
    assert legal == {
        ("claimed", "clearing"),
        *itertools.product(["claimed", "clearing", "running"], ["refused", "failed", "lost", "cancelled"]),
        ("clearing", "running"),
        ("clearing", "contaminated"),
        ("running", "contaminated"),
        ("running", "measured"),
        ("pending", "complete"),
        ("pending", "exhausted"),
        ("open", "judged"),
    }


@pytest.mark.parametrize("end", [*sorted(ENDS), "complete", "exhausted", "judged"])
def test_an_end_is_final(end: str) -> None:
    for target in (*ATTEMPT, *RUN, *SweepState):
        with pytest.raises(IllegalMove, match="it is final"):
            advance(end, target)


def test_no_machine_reaches_into_another() -> None:
    for machine in (ATTEMPT, RUN, SweepState):
        for state in machine:
            assert MOVES[state] <= set(machine)
    assert set(ATTEMPT) == LIVE | ENDS
    assert not LIVE & ENDS


def test_an_illegal_move_tells_the_history() -> None:
    history = [Move("", "claimed"), Move("claimed", "lost", "lease ended", "2026-11-30T05:00:00+00:00")]
    with pytest.raises(IllegalMove) as caught:
        advance("lost", "measured", lambda: history)
    said = str(caught.value)
    assert "lost cannot become measured" in said
    assert "new -> claimed; 2026-11-30T05:00:00+00:00 claimed -> lost: lease ended" in said
    assert caught.value.exit_code == 4


def test_a_legal_move_asks_for_no_history() -> None:
    asked: list[str] = []

    def history() -> list[Move]:
        asked.append("")
        return []

    assert advance("running", "measured", history) == "measured"
    assert asked == []


def test_an_unknown_state_is_no_state() -> None:
    with pytest.raises(IllegalMove, match="unknown state 'done'"):
        advance("done", "measured")
    with pytest.raises(IllegalMove, match="running cannot become done"):
        advance("running", "done")


@pytest.mark.parametrize(
    ("states", "is_left"),
    [
        ([], True),
        (["failed", "lost"], True),
        (["failed", "lost", "refused"], False),
        (["contaminated", "contaminated"], True),
        (["contaminated"] * 3, False),
        (["failed", "contaminated", "lost", "contaminated"], True),
        (["cancelled"] * 9, True),
        (["running"], True),
    ],
)
def test_how_many_tries_a_run_has(states: list[str], is_left: bool) -> None:
    limits = Limits(attempts=3, contamination_reruns=2)
    assert attempts_left([Tried(state) for state in states], limits) is is_left


@pytest.mark.parametrize(
    ("faults", "is_left"),
    [
        (["timeout"], False),  # no second try after one
        (["lost"] * 5, True),
        (["lost"] * 6, False),
        (["crash", "lost", "crash"], True),  # two of the shared bound, one of its own
        (["crash", "device", "crash"], False),  # three of the shared bound
        (["lost"] * 5 + ["crash"] * 2, True),
    ],
)
def test_a_class_of_error_may_have_a_bound_of_its_own(faults: list[str], is_left: bool) -> None:
    limits = Limits(attempts=3, retries={"timeout": 0, "lost": 5})
    tried = [Tried("lost" if fault == "lost" else "failed", fault) for fault in faults]
    assert attempts_left(tried, limits) is is_left


def test_limits_without_bounds_of_classes_are_written_as_before() -> None:
    assert "retries" not in Limits().model_dump()
    assert "start_timeout_s" not in Limits().model_dump()
    bounded = Limits(retries={"crash": 1}, start_timeout_s=30)
    assert Limits.model_validate(bounded.model_dump()) == bounded


ARMS = st.lists(st.sampled_from(["base", "null", "head", "calm", "wild"]), min_size=1, max_size=5, unique=True)


@given(ARMS, st.sampled_from(get_args(Order)), st.integers(1, 4), st.text(max_size=5))
def test_every_order_is_fair(arms: list[str], order: Order, repeats: int, seed: str) -> None:
    made = arm_order(arms, order, repeats, seed)
    assert Counter(made) == dict.fromkeys(arms, repeats if order == "once" else 2 * repeats)
    assert made == arm_order(arms, order, repeats, seed)


@given(ARMS, st.integers(1, 4))
def test_the_balanced_order_cancels_a_linear_drift(arms: list[str], repeats: int) -> None:
    made = arm_order(arms, "ABBA", repeats, "")
    centres = {arm: sum(i for i, one in enumerate(made) if one == arm) for arm in arms}
    assert len(set(centres.values())) == 1


def test_orders_by_example() -> None:
    arms = ("base", "null", "head")
    assert arm_order(arms, "ABBA", 1, "") == ("base", "null", "head", "head", "null", "base")
    assert arm_order(arms, "sequential", 1, "") == ("base", "base", "null", "null", "head", "head")
    assert arm_order(arms, "once", 2, "") == (*arms, *arms)
    shuffles = {arm_order(arms, "random", 2, f"cell#{block}") for block in range(20)}
    assert len(shuffles) > 15
