"""A store with sweeps of every kind that is served, on SQLite and on PostgreSQL, made once for a file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from starlette.testclient import TestClient

from jobs.store import Store
from jobs.store.reader import Reader
from jobs.verdict import Verdict
from orchestrator.conclude import judge_sweep
from reports.serve.app import application
from reports.serve.guard import Door
from tests.unit import reports_samples as samples
from tests.unit.conftest import Documents
from tests.unit.jobs_store_cases import fresh_database
from tests.unit.store_sweeps import Clock, claimed, measured_sweep, running, submitted

HOSTILE = "".join(samples.HOSTILE)[:380]
LARGE = 110


@dataclass(frozen=True, slots=True)
class Served:
    """The store with its sweeps by what they are."""

    url: str
    store: Store
    reader: Reader
    sweeps: dict[str, str]
    clients: dict[Door, TestClient] = field(default_factory=dict)

    def client(self, door: Door | None = None) -> TestClient:
        """A reader of its pages."""
        door = door or Door()
        if door not in self.clients:
            app = application(self.reader, door, store_words=" --store here")
            self.clients[door] = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        return self.clients[door]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """On both stores, for what a database answers."""
    with made(request.param, request, tmp_path_factory) as found:
        yield found


@pytest.fixture(scope="module")
def served_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """In a file, for what is made of the answers."""
    with made("sqlite", request, tmp_path_factory) as found:
        yield found


@contextmanager
def made(kind: str, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> Iterator[Served]:
    """A store of a kind with its sweeps in it."""
    with fresh_database(kind, request, folders.mktemp("served") / "store.sqlite") as url:
        clock = Clock()
        with Store.open(url, clock) as store:
            sweeps = filled(store, clock)
            reader = Reader(url, clock)
            yield Served(url, store, reader, sweeps)
            reader.close()


def filled(store: Store, clock: Clock) -> dict[str, str]:
    """Sweeps by what they are; the newest is the last."""
    found: dict[str, str] = {}
    whole = {
        "broken": samples.broken(),
        "large": samples.many(LARGE),
        "hostile": samples.hostile(HOSTILE),
        "retracted": samples.verdict(),
        "bare": samples.verdict().model_copy(update={"cells": (), "findings": ()}),
    }
    for name, verdict in whole.items():
        clock.pass_s(60)
        found[name] = submitted(store, name, key=name)
        put(store, found[name], verdict)
    store.retract(found["retracted"], "the fan had failed", "ada")
    clock.pass_s(60)
    found["measured"] = measured_sweep(store, Documents().sweep(name="measured"))
    judge_sweep(store, found["measured"], final=True)
    clock.pass_s(60)
    found["open"] = submitted(store, "nightly of decode", cells=3, key="open")
    running(store, claimed(store, found["open"]))
    return found


def put(store: Store, sweep_id: str, verdict: Verdict) -> None:
    """A verdict as that of a sweep."""
    own = verdict.model_copy(update={"stamp": verdict.stamp.model_copy(update={"sweep_id": sweep_id})})
    store.write_verdict(sweep_id, own, own.input_digest)
