"""A sweep of base and variants without a head: what differs is what a variant costs, and no arm is called head."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Gate, JudgeInput, Missing
from jobs.verdict import Verdict
from reports.render import Form, render
from tests.unit import reports_samples as samples
from tests.unit.reports_parsing import Page, markdown

LOST = {"graph_nodes": None, "eager_launches": 99, "segments": 0, "seams": 0, "replays": 0, "captures": 0}
"""A run without a graph: it has no nodes to count, and launches more."""
FORMS: tuple[Form, ...] = ("comment", "html", "text")


def of_variant(documents: Any, name: str = "eager", **script: Any) -> JudgeInput:
    """Base, which captures, against a variant that does not, on purpose."""
    counted = {"graph_nodes": 11, "eager_launches": 70, "segments": 6, "seams": 5}
    doc = documents.sweep(
        base=documents.arm(changes=counted),
        null=documents.arm(changes=counted),
        head=documents.arm(
            config={"policy": "lru", "capture": False},
            effective={"capture": False},
            plan={"role": "variant"},
            **{"changes": LOST, **script},
        ),
        varies=("capture",),
    )
    text = doc.model_dump_json().replace('"head"', f'"{name}"').replace("_head", f"_{name}")
    read = JudgeInput.model_validate_json(text)
    return read.model_copy(update={"manifest_digest": read.manifest.digest()})


def verdict_of(doc: JudgeInput) -> Verdict:
    found = judge(doc)
    assert isinstance(found, Verdict)
    return found


def test_a_variant_that_passes_is_nowhere_called_worse(documents: Any) -> None:
    verdict = verdict_of(of_variant(documents))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    assert any(row.klass == "vanished" and not row.gating for row in verdict.cells[0].exact)
    page = markdown(render(verdict, "comment"))
    assert "no worse: 0 exact metrics worse or unsteady, 0 better; 1 that cannot gate" in page.text
    assert "no head here, so what differs is what a variant costs" in page.text
    assert "Rows that are worse or unknown" not in page.text
    assert "not captured: base 6 segments" in page.text


@pytest.mark.parametrize("form", FORMS)
def test_no_form_calls_it_head(documents: Any, form: Form) -> None:
    shown = render(verdict_of(of_variant(documents)), form)
    text = {"comment": markdown, "html": Page}[form](shown).text if form != "text" else shown
    assert "eager against base" in text and "head against base" not in text and "base against head" not in text
    assert "head unknown" not in " ".join(text.split())
    assert "eager checkout against base checkout" in " ".join(text.split())


def test_one_that_is_worse_where_the_gate_blocks_is_said_to_be(documents: Any) -> None:
    verdict = verdict_of(of_variant(documents, changes=LOST | {"step_kernels": 999}))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    assert "worse: 1 exact metric worse or unsteady" in markdown(render(verdict, "comment")).text


def test_where_the_gate_is_off_nothing_is_worse(documents: Any) -> None:
    doc = of_variant(documents, changes=LOST | {"step_kernels": 999})
    off = doc.manifest.model_copy(update={"gate": Gate(exact="off")})
    verdict = verdict_of(doc.model_copy(update={"manifest": off, "manifest_digest": off.digest()}))
    assert verdict.exit_code == 0
    assert "no worse: 0 exact metrics" in markdown(render(verdict, "comment")).text


def test_rows_of_several_variants_say_whose_they_are() -> None:
    """Each has its own rows against base; the words before its note say which."""
    arms = (samples.arms()[0], *(samples.arm(name, "variant", "lru", samples.LRU, 0, 0) for name in ("wide", "wider")))
    rows = tuple(
        samples.metric("segments", "count", 1, after, "regressed", note=note)
        for after, note in ((3, "arm wide"), (9, "arm wider; now non-zero"))
    )
    cell = samples.cell(arms=arms, exact=rows, outcome="REGRESSED", exit_code=1)
    page = markdown(render(samples.verdict(outcome="REGRESSED", exit_code=1, cells=(cell,)), "comment"))
    table = page.table("Rows that are worse or unknown")
    assert table.head == ["State", "Row", "base", "under test", "Change"]
    assert [row[1:4] for row in table.rows] == [["segments of wider", "1", "9"], ["segments of wide", "1", "3"]]


def test_a_head_that_no_longer_records_what_cannot_gate_is_unknown_there_and_not_worse() -> None:
    gone = samples.metric("graph_nodes", "count", 11, Missing(missing="not recorded"), "vanished", gating=False)
    cell = samples.cell(outcome="PASS", exact=(gone, samples.metric("segments", "count", 1, 1, "same")))
    page = markdown(render(samples.verdict(outcome="PASS", cells=(cell,)), "comment"))
    assert "no worse: 0 exact metrics worse or unsteady, 0 better; 1 that cannot gate unsteady or no" in page.text
    assert page.table("Rows that are worse or unknown").rows[0][:2] == ["🟡 vanished", "graph_nodes"]
