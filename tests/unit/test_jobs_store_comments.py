"""Where a verdict was posted, and events about one subject, in both stores."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.errors import StoreError
from jobs.store import Store
from orchestrator.conclude import judge_sweep
from tests.unit.store_sweeps import Clock
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)


def test_a_comment_shows_the_newest_verdict_and_stands_once(store: Store, clock: Clock, documents: Any) -> None:
    first, second = (put(store, documents.sweep(), key) for key in ("one", "two"))
    with pytest.raises(StoreError, match="no verdict"):
        store.write_comment(first, "octo/engine", 7, "1001", "d1")
    for sweep_id in (first, second):
        judge_sweep(store, sweep_id)
    for sweep_id, number in ((first, 7), (first, 7), (first, 8), (second, 7)):
        store.write_comment(sweep_id, "octo/engine", number, f"100{number}", "d")
        clock.pass_s(1)
    assert store.retract(first, "wrong model", "Ada").comments == ("octo/engine#8",), "7 shows the second one now"
    assert store.retract(second, "wrong model", "Ada").comments == ("octo/engine#7",)


def test_events_about_a_subject_come_in_order_from_all_sweeps(store: Store, documents: Any) -> None:
    first, second = (put(store, documents.sweep(), key) for key in ("one", "two"))
    for sweep_id, message in ((first, "a"), (second, "b"), (first, "c")):
        store.log_event(sweep_id, "check", message, subject="check:octo/engine")
    store.log_event(first, "other", "x", subject="check:octo/engine")
    store.log_event(first, "check", "x", subject="check:octo/other")
    told = [(one.sweep_id, one.message) for one in store.events_about("check:octo/engine", "check")]
    assert told == [(first, "a"), (second, "b"), (first, "c")]
