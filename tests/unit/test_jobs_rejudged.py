"""A sweep judged again under other rules or on another input: what the later verdict says otherwise, and why."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from jobs import checks, gates
from jobs.judge import judge, stamped
from jobs.rejudged import compare
from jobs.store import Store
from jobs.store.connect import parse_url
from jobs.verdict import Verdict
from orchestrator import conclude
from orchestrator.cli import call
from tests.unit.store_sweeps import measured_sweep


def verdict_of(doc: Any, version: str = "1", digest: str = "a" * 64) -> Verdict:
    answer = judge(doc)
    assert isinstance(answer, Verdict)
    return stamped(answer, digest, version)


def test_the_same_rules_on_the_same_input_say_the_same(documents: Any) -> None:
    since = compare(verdict_of(documents.sweep()), verdict_of(documents.sweep()))
    assert since.is_same and since.because == "neither" and since.cells == ()


def test_a_metric_that_gates_no_more_is_named_with_its_cell_from_and_to(
    documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc = documents.sweep(head=documents.arm(changes={"htod_bytes": 1 + 96 * 84_934_656}), varies=())
    before = verdict_of(doc)
    listed = gates.ExactMetric("htod_bytes", "bytes", "neutral", gating=False)
    monkeypatch.setattr(gates, "EXACT", {**gates.EXACT, "htod_bytes": listed})
    monkeypatch.setattr(gates, "GATING", gates.GATING - {"htod_bytes"})
    after = verdict_of(doc, "2", "b" * 64)
    since = compare(before, after)
    assert since.because == "rules" and (since.frm_rules, since.to_rules) == ("1 (aaaaaaaaaaaa)", "2 (bbbbbbbbbbbb)")
    [cell] = since.cells
    assert "htod_bytes: regressed -> neutral" in cell.rows
    back = compare(after, before)
    assert "htod_bytes: neutral -> regressed" in back.cells[0].rows, "and the reverse"
    assert (back.cells[0].frm, back.cells[0].to) == (cell.to, cell.frm)


def test_a_cell_that_turns_clean_says_what_is_no_longer_found(documents: Any) -> None:
    wrong = documents.stable_arm(ids=lambda _r, _g: (*documents.IDS[:7], 1, *documents.IDS[8:]))
    before, after = verdict_of(documents.sweep(head=wrong)), verdict_of(documents.sweep())
    since = compare(before, after)
    [cell] = since.cells
    assert since.because == "input"
    assert (cell.frm, cell.to) == ("VIOLATION, exit 1", "IMPROVED, exit 0")
    assert cell.why.startswith("no longer found: ") and "id 1 instead of" in cell.why
    assert "ids of head against base: VIOLATION -> IDENTICAL" in cell.rows
    [turned] = compare(after, before).cells
    assert "id 1 instead of" in turned.why and not turned.why.startswith("no longer")


def test_what_is_found_of_the_sweep_as_a_whole_is_told(documents: Any) -> None:
    doc = documents.sweep()
    empty = doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"cells": ()}), "cells": ()})
    since = compare(verdict_of(empty), verdict_of(doc))
    assert since.lines == (
        "no longer found: MISSING: the manifest holds no cell: nothing was asked, so nothing is proven",
    )
    assert [(cell.frm, cell.to) for cell in since.cells] == [("absent", "IMPROVED, exit 0")]


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, documents: Any) -> tuple[str, str]:
    """A store with a measured sweep that improves; its URL and the sweep's id."""
    url = f"sqlite:///{tmp_path}/store.db"
    with Store.open(url, lambda: datetime.now(UTC)) as store:
        return url, measured_sweep(store, documents.sweep())


def test_judging_again_keeps_the_old_verdict_and_says_that_nothing_changed(
    stored: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, sweep_id = stored
    assert call(["judge", sweep_id, "--store", url]) == 0
    assert "before" not in capsys.readouterr().out, "a first verdict has none to be compared with"
    assert call(["judge", sweep_id, "--store", url]) == 0
    assert "The same verdict as before, on the same input by the same rules." in capsys.readouterr().out
    assert _numbers(url) == [1], "it is no second one"


def test_judging_again_under_new_rules_shows_the_difference(
    stored: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge of later finds every equation broken; both verdicts stand in the store, and the cell says why."""
    url, sweep_id = stored
    assert call(["judge", sweep_id, "--store", url]) == 0
    capsys.readouterr()
    monkeypatch.setattr(checks, "CLOSING", ("hits == 1 + hits",))
    monkeypatch.setattr(conclude, "harness_version", lambda: "9.9")
    assert call(["judge", sweep_id, "--store", url]) == 1
    said = capsys.readouterr().out
    assert "Before: IMPROVED (exit 0), now: BROKEN_INVARIANT (exit 1); the earlier verdict is kept: the rules" in said
    assert "-> 9.9 (" in said and "on the same input" in said
    assert "IMPROVED, exit 0 -> BROKEN_INVARIANT, exit 1; " in said and "breaks hits == 1 + hits" in said
    assert _numbers(url) == [1, 2]
    monkeypatch.undo()
    assert call(["judge", sweep_id, "--store", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["since"]["from"]["outcome"] == "BROKEN_INVARIANT" and told["since"]["to"]["outcome"] == "IMPROVED"
    assert told["since"]["cells"][0]["why"].startswith("no longer found: ")
    assert _numbers(url) == [1, 2, 3]


def test_judging_again_after_a_retraction_says_that_the_input_changed(
    stored: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, sweep_id = stored
    assert call(["judge", sweep_id, "--store", url]) == 0
    with Store.open(url, lambda: datetime.now(UTC)) as store:
        store.retract(store.judge_input(sweep_id).cells[0].runs[0].run_id, "the card was warm", "tests")
    capsys.readouterr()
    assert call(["judge", sweep_id, "--store", url]) == 3
    said = capsys.readouterr().out
    assert "the stored input changed, and the rules, " in said and "did not" in said
    assert "retracted: the card was warm" in said


def test_a_verdict_that_this_version_cannot_read_is_kept_and_said(
    stored: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url, sweep_id = stored
    assert call(["judge", sweep_id, "--store", url]) == 0
    engine = create_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(text("""UPDATE verdict SET document = '{"of": "another time"}', digest = 'x'"""))
    engine.dispose()
    capsys.readouterr()
    assert call(["judge", sweep_id, "--store", url]) == 0
    said = capsys.readouterr().out
    assert "an earlier verdict is kept, and cannot be compared with" in said
    assert _numbers(url) == [1, 2]


def _numbers(url: str) -> list[int]:
    engine = create_engine(parse_url(url))
    with engine.connect() as connection:
        found = [int(row.number) for row in connection.execute(text("SELECT number FROM verdict ORDER BY number"))]
    engine.dispose()
    return found
