"""The JSON API against what it publishes: schemathesis asks what fits its schema and what does not, seeded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.core.result import Ok

from reports.serve.app import application
from reports.serve.guard import Door
from tests.unit.served_store import Served

pytest_plugins = ("tests.unit.jobs_store_cases", "tests.unit.served_store")

POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
QUIET = tuple(hypothesis.HealthCheck)


def operations(served: Served) -> Iterator[APIOperation[Any, Any, Any, Any]]:
    app = application(served.reader, Door(frozenset({"testserver"})))  # the name that schemathesis asks by
    for found in schemathesis.openapi.from_asgi("/api/openapi.json", app).get_all_operations():
        assert isinstance(found, Ok)
        yield found.ok()


def ask(served: Served, examples: int) -> dict[int, int]:
    """Ask each route what its schema makes of it, of things that are there and of others; how often it said what."""
    said: dict[int, int] = {}
    [cell] = served.store.judge_input(served.sweeps["measured"]).cells
    there = {"sweep": served.sweeps["measured"], "run": cell.runs[0].run_id}

    def told(case: Case[Any]) -> None:
        if case.operation.path.endswith("/cell") and case.query and case.path_parameters.get("sweep") == there["sweep"]:
            case.query = {**case.query, "name": cell.plan.cell} if "name" in case.query else case.query
        answer = case.call()
        case.validate_response(answer, excluded_checks=[schemathesis.checks.negative_data_rejection])
        said[answer.status_code] = said.get(answer.status_code, 0) + 1
        if answer.status_code >= 400 and answer.status_code != 405:
            assert set(answer.json()) == {"error", "remedy"} and answer.json()["error"]

    for operation in operations(served):
        known = {name: there[name] for name in there if f"{{{name}}}" in operation.path}
        for mode, given in ((POSITIVE, known), (POSITIVE, {}), (NEGATIVE, known), (NEGATIVE, {})):
            fixed: dict[str, Any] = {"path_parameters": given} if given else {}
            asked = hypothesis.given(case=operation.as_strategy(generation_mode=mode, **fixed))(told)
            with (
                suppress(hypothesis.errors.Unsatisfiable) if mode is NEGATIVE else nullcontext()
            ):  # nothing to get wrong
                hypothesis.settings(
                    max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=QUIET
                )(asked)()
    return said


def test_the_schema_lists_reading_alone_and_loads_nothing(served_file: Served) -> None:
    document: dict[str, Any] = served_file.client().get("/api/openapi.json").json()
    assert {method for path in document["paths"].values() for method in path} == {"get"}
    assert len(document["paths"]) == 9 and all(path.startswith("/api/v1/") for path in document["paths"])
    assert "http" not in json.dumps(document["paths"])


def test_a_seeded_sample_of_requests_finds_no_fault(served_file: Served) -> None:
    said = ask(served_file, 2)
    assert {200, 404, 422} <= set(said) <= {200, 404, 405, 422}, said


@pytest.mark.slow
def test_many_requests_find_no_fault(served: Served) -> None:
    said = ask(served, 100)
    assert {200, 404, 422} <= set(said) <= {200, 404, 405, 422}, said
    assert sum(said.values()) > 500
