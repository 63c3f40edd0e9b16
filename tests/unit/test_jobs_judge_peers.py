"""Arms of other engines beside ours: one that is not there, and what is said of one that is."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Certificate, Gate
from jobs.verdict import Verdict
from orchestrator.summary import tables
from reports.render import render

ABSENT = "cannot_load: torch cannot be imported: No module named 'torch' (pip install torch)"


@pytest.mark.parametrize(
    ("adapter", "gate", "outcome", "code"),
    [
        ("torch", Gate(exact="off"), "CANNOT_LOAD", 3),
        ("torch", Gate(identity="advise", exact="off"), "CANNOT_LOAD", 0),
        ("native", Gate(), "REGRESSED", 1),  # the engine that base is: whoever changed it took away what it needs
    ],
)
def test_an_engine_that_is_not_on_the_host_is_a_label_and_no_slow_result(
    documents: Any, adapter: str, gate: Gate, outcome: str, code: int
) -> None:
    head = documents.stable_arm(plan={"adapter": adapter}, fact=documents.lost("failed", ABSENT))
    doc = documents.sweep(head=head)
    verdict = judge(doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"gate": gate})}))
    assert isinstance(verdict, Verdict)
    assert {finding.outcome for finding in verdict.findings} == {outcome}
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    assert "pip install torch" in verdict.headline
    (pair,) = [row for row in verdict.cells[0].identity if row.what == "pair"]
    assert (pair.klass, pair.note) == ("MISSING", ABSENT)
    assert not verdict.cells[0].time
    (table,) = tables(verdict)
    assert [row[2] for row in table.rows if row[0] == "head"] == [
        "CANNOT_LOAD" if outcome == "CANNOT_LOAD" else "MISSING"
    ]


def test_parity_stands_beside_every_ratio_of_another_engine(documents: Any) -> None:
    """Rates and ratios of ids that part say after how many, and those of equal ids that they are equal."""
    parted = (*documents.IDS[:5], documents.IDS[5] ^ 1, *documents.IDS[6:])
    gate = Gate(identity="advise", exact="off")
    for ids, told in ((documents.IDS, "identical"), (parted, "after 5 equal ids")):
        head = documents.arm(plan={"role": "variant", "adapter": "torch"}, ids=lambda _run, _generation, ids=ids: ids)
        verdict = judge(documents.sweep(head=head, varies=("program",), gate=gate))
        assert isinstance(verdict, Verdict)
        (cell,) = verdict.cells
        arms = tuple(arm.model_copy(update={"uuid": "GPU-1", "card": "H200"}) for arm in cell.arms)  # rates show there
        shown = render(verdict.model_copy(update={"cells": (cell.model_copy(update={"arms": arms}),)}), "comment")
        rows = [line for line in shown.splitlines() if line.startswith("| ")]
        beside = next(line for line in rows if line.startswith("| **head** |"))
        assert told in beside and "tokens/s" in beside
        ratios = [line for line in rows if "`decode_ms_per_token`" in line and "×" in line]
        assert ratios and all(told in line for line in ratios)


@pytest.mark.parametrize(
    ("varies", "outcome"),
    [((), "NOT_COMPARABLE"), (("program",), "NOT_COMPARABLE"), (("program", "device"), "PASS")],
)
def test_an_engine_beside_the_card_is_compared_where_the_sweep_says_so(
    documents: Any, varies: tuple[str, ...], outcome: str
) -> None:
    """A version that each has of its own is no difference to name once engines are compared, and a device is one."""
    seen = {"uuid": "SIM-0", "card": "a card", "driver": "sim 1", "verdict": "clear", "grade": "pids"}
    record = {"certificate": Certificate(**seen, **documents.WATCHED)}
    base = documents.arm(effective={"torch.version": "torch 1"}, device={"kind": "cuda"}, record=record)
    own = {"effective": {"torch.version": "torch 2"}, "device": {"kind": "cpu"}, "record": record}
    head = documents.arm(plan={"role": "variant", "adapter": "torch"}, **own)
    verdict = judge(documents.sweep(base=base, head=head, varies=varies, gate=Gate(exact="off")))
    assert isinstance(verdict, Verdict)
    told = " ".join(finding.message for finding in verdict.findings)
    assert verdict.outcome == outcome, told
    assert ("torch.version is" in told) is (varies == ())
    assert ("card's kind is" in told) is ("device" not in varies)


def test_versions_that_differ_inside_one_arm_are_never_compared(documents: Any) -> None:
    doc = documents.sweep(
        base=documents.arm(effective={"torch.version": "torch 1"}),
        head=documents.arm(effective={"torch.version": "torch 1"}, plan={"adapter": "torch"}),
        varies=("program",),
        gate=Gate(exact="off"),
    )

    def later(run: Any) -> Any:
        if run.arm != "head" or run.position != max(r.position for r in doc.cells[0].runs if r.arm == "head"):
            return run
        config = {**run.record.effective_config, "torch.version": {"value": "torch 2", "source": "request"}}
        return run.model_copy(update={"record": run.record.model_copy(update={"effective_config": config})})

    verdict = judge(documents.replace_runs(doc, later))
    assert isinstance(verdict, Verdict)
    assert verdict.outcome == "NOT_COMPARABLE"
