"""A connection that goes at a claim's commit: the claimer goes on with what it has claimed, and with nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from jobs.errors import Conflict
from jobs.store import Store
from jobs.store.connect import Database
from tests.unit.store_sweeps import CARD, LEASE_S, Clock, claimed, submitted

pytest_plugins = ("tests.unit.jobs_store_cases",)


@pytest.fixture(params=[True, False], ids=["behind-its-commit", "before-its-commit"])
def committed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def cut_off(
    store: Store, monkeypatch: pytest.MonkeyPatch, committed: bool, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """The connection of the store's next transaction goes; `meanwhile` happens before there is another one."""
    own, tries = Database._write_once, count()
    gone = OperationalError("commit", None, Exception("cut off"), connection_invalidated=True)

    def once(self: Database, action: Callable[[Connection], Any]) -> Any:
        if self is not store._database or next(tries):
            return own(self, action)

        def act(connection: Connection) -> None:
            action(connection)
            if not committed:
                raise gone

        try:
            own(self, act)
            raise gone
        finally:
            meanwhile()

    monkeypatch.setattr(Database, "_write_once", once)
    monkeypatch.setattr(store._database, "_sleep", lambda _seconds: None)


def test_a_claim_cut_off_is_gone_on_with_at_once(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """It waits for no lease, takes no second block, and the attempt that follows is under its fence."""
    sweep_id = submitted(store, blocks=2)
    cut_off(store, monkeypatch, committed, lambda: clock.pass_s(LEASE_S / 2))
    claim = claimed(store, sweep_id)
    assert (claim.number, claim.fence) == (0, 1)
    assert store.pending(sweep_id).leased_blocks == 1
    assert [event.message for event in store.events(sweep_id) if event.kind == "claimed"] == ["fence 1"]
    assert store.start_attempt(claim.runs[0].run_id, claim.fence, "w", CARD).number == 1
    assert claimed(store, sweep_id, "v").number == 1


def test_a_claim_cut_off_for_longer_than_its_lease_is_made_anew(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    sweep_id = submitted(store)
    cut_off(store, monkeypatch, committed, lambda: clock.pass_s(2 * LEASE_S))
    claim = claimed(store, sweep_id)
    assert (claim.number, claim.fence) == (0, 2 if committed else 1)
    assert store.heartbeat(claim.block_id, claim.fence, LEASE_S) > clock.now


def test_a_claim_cut_off_that_another_took_over_is_the_others(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """By the lease's end, or because nothing was committed: under the very fence that was to be ours."""
    sweep_id = submitted(store)

    def taken() -> None:
        clock.pass_s(2 * LEASE_S if committed else 0)
        assert claimed(store, sweep_id, "v").fence == (2 if committed else 1)

    cut_off(store, monkeypatch, committed, taken)
    assert store.claim_block(sweep_id, "w", LEASE_S) is None
    with pytest.raises(Conflict):
        store.start_attempt(store.judge_input(sweep_id).cells[0].runs[0].run_id, 3, "w", CARD)
