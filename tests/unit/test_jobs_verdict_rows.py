"""Cells and findings of a verdict in rows of their own: the whole is what it was, in stores new and migrated."""

from __future__ import annotations

import hashlib

import pytest
from alembic import command
from sqlalchemy import Connection, text

from jobs.store import Store, revision, verdicts
from jobs.store.connect import Database
from jobs.verdict import Verdict
from tests.unit import reports_samples as samples
from tests.unit.store_sweeps import submitted

pytest_plugins = ("tests.unit.jobs_store_cases",)

WHOLES = (samples.many(7), samples.broken(), samples.hostile("".join(samples.HOSTILE)[:380]))
BARE = samples.verdict().model_copy(update={"cells": (), "findings": ()})


def written(store: Store, verdict: Verdict, key: str = "") -> tuple[str, Verdict]:
    """A verdict in the store under a sweep of its own."""
    sweep_id = submitted(store, key=key)
    own = verdict.model_copy(update={"stamp": verdict.stamp.model_copy(update={"sweep_id": sweep_id})})
    store.write_verdict(sweep_id, own, "i")
    return sweep_id, own


def moved(database: Database, to: str) -> None:
    way = command.downgrade if to == "0009" else command.upgrade
    database.write(lambda c: way(revision._config(c, None), to))


def digests(connection: Connection) -> list[str]:
    return list(connection.execute(text("SELECT digest FROM verdict ORDER BY id")).scalars())


def test_a_verdict_comes_back_whole_from_few_rows_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "AT_ONCE", 3)
    for number, verdict in enumerate((*WHOLES, BARE)):
        sweep_id, own = written(store, verdict, str(number))
        assert store.verdict(sweep_id) == own


def test_documents_of_before_are_taken_apart_and_put_together_byte_by_byte(store_url: str, store: Store) -> None:
    texts = [written(store, one, str(number))[1].canonical() for number, one in enumerate((*WHOLES, BARE))]
    database = Database(store_url)
    moved(database, "0009")
    with database.reading() as connection:
        assert connection.execute(text("SELECT document FROM verdict ORDER BY id")).scalars().all() == texts
        assert digests(connection) == [hashlib.sha256(one.encode()).hexdigest() for one in texts]
    moved(database, "head")
    assert [store.verdict(row.id) for row in reversed(store.sweeps())] == [
        Verdict.model_validate_json(one) for one in texts
    ]
    with database.reading() as connection:
        whole = [len(one.cells) for one in WHOLES]
        counted = "SELECT count(*) FROM cell_verdict GROUP BY verdict_id ORDER BY verdict_id"
        assert list(connection.execute(text(counted)).scalars()) == whole
        assert connection.execute(text("SELECT count(*) FROM finding WHERE document IS NULL")).scalar_one() == 0
    database.close()
