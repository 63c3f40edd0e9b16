"""Arms of other engines beside ours: one that is not there, and what is said of one that is."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Gate
from jobs.verdict import Verdict

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
