"""What a run costs the store in statements, and the ids of series, which are put together in pieces to cost less."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from sqlalchemy import select
from sqlalchemy.event import listen

from jobs.store import Store
from jobs.tables import series
from tests.unit.store_sweeps import CARD, claimed, record_of, running, submitted

pytest_plugins = ("tests.unit.jobs_store_cases",)


def test_a_run_takes_few_statements_and_reads_no_manifest_again(store: Store) -> None:
    """The first of an arm asks what it was asked to be; the first of all makes its series."""
    claim = claimed(store, submitted(store))
    told: list[str] = []

    def heard(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        told.append(statement)

    listen(store._database._engine, "before_cursor_execute", heard)
    known = {"counters": {"n": 1}, "model_digest": "d", "device": {"name": "c"}, "effective_config": {"policy": "lru"}}
    counted = []
    for run in claim.pending:
        told.clear()
        attempt = store.start_attempt(run.run_id, claim.fence, "w", CARD)
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt).model_copy(update=known))
        counted.append(len(told))
        assert any("manifest" in statement for statement in told) is (run.position < 2)
    assert counted == [18, 17, 16, 16]


def test_the_id_of_a_series_is_the_digest_of_its_key(store: Store) -> None:
    """Whatever stands in a name or a card: the id is of one document, however it is put together."""
    claim = claimed(store, submitted(store))
    attempt = running(store, claim)
    names = {'a"b\\': 1, "é": 2, "plain": 3}
    record = record_of(attempt).model_copy(
        update={"counters": names, "metrics": {"plain": 0.5}, "device": {"name": 'x"y'}}
    )
    store.write_record(attempt.attempt_id, claim.fence, record)
    with store._database.reading() as connection:
        rows = connection.execute(select(series)).all()
    assert {(row.family, row.name) for row in rows} == {*(("counter", name) for name in names), ("metric", "plain")}
    for row in rows:
        text = json.dumps({**row._mapping, "id": 0}, sort_keys=True, separators=(",", ":"))
        assert row.id == "ser_" + sha256(text.replace('"id":0,', "").encode()).hexdigest()[:32]
