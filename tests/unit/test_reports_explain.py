"""From a cell to everything behind it, in text and on the cell's page; with secrets taken out."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.model import KeyBytes, RunFact
from jobs.provenance import SHELL
from jobs.redact import HIDDEN, redact
from reports.evidence.runs import rerun_command
from reports.explain import explain
from tests.unit import reports_runs as runs
from tests.unit import reports_samples as samples
from tests.unit.report_pages import write_html
from tests.unit.reports_parsing import Page

SECRETS = (
    ("ghp_0123456789abcdefghijABCDEFGHIJ0123", "ghp_0123456789"),
    ("github_pat_11ABCDEFG0123456789_abcdefghij", "11ABCDEFG"),
    ("postgresql://assay:hunter2secret@db.example/assay", "hunter2secret"),
    ("Authorization: Bearer abcdef0123456789abcdef", "abcdef0123456789"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
    ("password: correct-horse", "correct-horse"),
    ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("hf_abcdefghijklmnopqrstuv", "hf_abcdefgh"),
)


def shown(metric: str | None = None, log: str = "engine: loaded 211 keys\n") -> str:
    return explain(samples.broken(), runs.judge_input(log=log), samples.CELL, metric)


def test_a_cell_leads_to_runs_samples_order_certificates_host_log_and_command() -> None:
    text = shown()
    for needed in (
        "VIOLATION, exit 1: tokens differ",
        "order of arms: base head head base",
        "0 contaminated, 1 measured",
        "pid 4242 came up",
        "9,007,199,254,740,993 B",
        "60000000 67000021",
        "[46283] [1] [1] [1] [1]",
        "scripted",
        '"granule_bytes": 4096',
        '"lru" (from request)',
        "true (from derived: nothing stood against it)",
        "812.0 MB",
        "engine: loaded 211 keys",
        "--prompt-ids '504 3575 282 4649 314' --tokens 24",
    ):
        assert needed in text, needed


def test_each_key_tells_its_bytes_by_how_they_were_served_and_tables_what_was_gathered() -> None:
    lines = [line for line in shown().partition("Bytes by key of base, 3 keys in all")[2].splitlines() if line.strip()]
    rows = [[cell.strip() for cell in re.split(r"\s*│\s*|\s{2,}", line) if cell.strip()] for line in lines]
    found = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in ("head", "norm", "table")}
    assert found["head"] == ["1,000,000 B", "16.00 MB", "2.000 MB", "14.00 MB", "13.00 MB", "0 B", "14", "1"]
    assert found["norm"] == ["5,000 B", "80.00 kB", "80.00 kB", "0 B", "0 B", "0 B", "0", "0"]
    assert found["table"] == ["9,000,000 B", "0 B", "0 B", "0 B", "0 B", "4.096 kB", "0", "0"]
    assert list(found) == ["head", "norm", "table"], "what crossed the link stands first"
    assert "never read" not in shown()


def test_keys_alike_stand_in_the_order_of_their_layers_behind_a_fold(tmp_path: Path) -> None:
    """Models have hundreds of keys: unfolded, their tables would be most of a page."""
    names = [f"layers.{layer}.up" for layer in (10, 2, 0, 11, 1)]
    keys = tuple(KeyBytes(key=name, nbytes=100, bypassed=3) for name in names)
    doc = runs.judge_input()
    many = tuple(
        run.model_copy(update={"record": run.record and run.record.model_copy(update={"keys": keys})})
        for run in doc.cells[0].runs
    )
    doc = doc.model_copy(update={"cells": (doc.cells[0].model_copy(update={"runs": many}),)})
    write_html(samples.verdict(), tmp_path, doc=doc)
    [page] = (tmp_path / "cells").glob("*.html")
    folded = re.findall(r"<details><summary>Bytes by key of (\w+).*?</details>", page.read_text(), re.S)
    assert folded == ["base", "head"]
    tables = [table for table in Page(page.read_text()).tables if table.caption.startswith("Bytes by key of")]
    ordered = [f"layers.{layer}.up" for layer in (0, 1, 2, 10, 11)]
    assert [[row[0] for row in table.rows] for table in tables] == [ordered] * 2


def test_a_metric_narrows_to_its_values_by_generation_and_phase() -> None:
    text = shown("page_ins")
    assert "3,008" in text
    assert "By generation and phase" in text
    assert "Certificates" not in text
    with pytest.raises(SpecError, match="no run of this cell has a reading named page_inns"):
        shown("page_inns")


def test_a_cell_is_found_by_a_unique_part_and_a_typo_names_the_near_one() -> None:
    assert explain(samples.broken(), runs.judge_input(), "smollm2/cap").startswith(f"cell {samples.CELL}")
    with pytest.raises(SpecError, match="no cell is named smolm2/capitol") as caught:
        explain(samples.broken(), runs.judge_input(), "smolm2/capitol")
    assert samples.CELL in caught.value.remedy
    assert caught.value.exit_code == 2


def test_an_ambiguous_part_lists_the_candidates() -> None:
    doc = runs.judge_input()
    twin = doc.cells[0].model_copy(update={"plan": doc.cells[0].plan.model_copy(update={"cell": "smollm2/other"})})
    both = doc.model_copy(update={"cells": (*doc.cells, twin)})
    with pytest.raises(SpecError, match="names 2 cells") as caught:
        explain(samples.broken(), both, "smollm2")
    assert "smollm2/other" in caught.value.remedy


def test_a_program_is_run_again_in_its_tree_with_its_request(tmp_path: Path) -> None:
    """The command is what it says: run by a shell, it gives the lines of a run."""
    doc = runs.judge_input()
    told = "echo $ASSAY_TOKENS:$ASSAY_PROMPT_IDS:$PWD > $ASSAY_RESULT"
    changes = {"adapter": "command", "command": (*SHELL, told), "python_path": str(tmp_path)}
    arm, cell = doc.manifest.arms[1].model_copy(update=changes), doc.cells[0]
    done = subprocess.run(["sh", "-c", rerun_command(arm, cell)], check=True, capture_output=True, text=True)
    ids = " ".join(map(str, cell.plan.prompt_ids))
    assert done.stdout == f"{cell.plan.settings.tokens}:{ids}:{tmp_path}\n"


def test_the_rerun_command_survives_a_shell() -> None:
    doc = runs.judge_input()
    command = rerun_command(doc.manifest.arms[1], doc.cells[0])
    words = shlex.split(command)
    assert words[:6] == ["env", "PYTHONPATH=/tmp/some tree", "python", "-P", "-m", "engine"]
    assert words[words.index("--model") + 1] == "/models/smollm2; rm -rf x"
    assert words[words.index("--capture") + 1] == "on"
    assert words[words.index("--weight-budget") + 1] == "50%"
    assert words[words.index("--policy") + 1] == "stable"
    assert "--ignore-eos" in words


@pytest.mark.parametrize(("line", "secret"), SECRETS)
def test_secrets_in_logs_and_errors_never_appear(line: str, secret: str, tmp_path: Path) -> None:
    log = f"start\nenv {line} end\n"
    text = shown(log=log)
    assert secret not in text
    assert HIDDEN in text
    write_html(samples.broken(), tmp_path, doc=runs.judge_input(log=log))
    for path in tmp_path.rglob("*.html"):
        assert secret not in path.read_text()


def test_a_retracted_run_is_struck_through_and_named_as_such_in_every_table(tmp_path: Path) -> None:
    doc = runs.judge_input()
    cell = doc.cells[0]
    fallen = (cell.runs[0].model_copy(update={"retracted": "the fan was blocked"}), *cell.runs[1:])
    doc = doc.model_copy(update={"cells": (cell.model_copy(update={"runs": fallen}),)})
    write_html(samples.broken(), tmp_path, doc=doc)
    raw = next((tmp_path / "cells").iterdir()).read_text()
    assert f"<s>{fallen[0].run_id}</s>" in raw
    assert f"<s>{fallen[1].run_id}</s>" not in raw
    page = Page(raw)
    assert "retracted (the fan was blocked)" in page.text
    assert page.table("Readings by run").head[1:] == ["base 0.0 (retracted)", "head 0.1", "head 0.2", "base 0.3"]
    assert page.table("Time by generation").rows[0][0] == "base 0.0 (retracted)"


def test_counts_of_tokens_are_no_secrets() -> None:
    line = "emitted_tokens=32 tokens: 16 prompt_tokens=5 token@119 == 33803"
    assert redact(line) == line


def test_the_cell_page_holds_the_evidence(tmp_path: Path) -> None:
    write_html(samples.broken(), tmp_path, doc=runs.judge_input())
    page = Page(next((tmp_path / "cells").iterdir()).read_text())
    for needed in ("Runs in the order they ran", "Readings by run", "Time by generation", "Certificates by run"):
        assert page.table(needed).rows
    assert "[46283]" in page.text
    assert "60000000 67000021" in page.text


def test_a_cell_page_without_its_input_says_so(tmp_path: Path) -> None:
    write_html(samples.broken(), tmp_path, doc=runs.judge_input(word="another cell"))
    assert "does not hold this cell" in Page(next((tmp_path / "cells").iterdir()).read_text()).text


def test_what_gates_and_differs_stands_first_and_long_texts_on_lines_of_their_own() -> None:
    """A reading of 600 characters, as the sources of a model's names are, once made each line of a table that long."""
    doc = runs.judge_input()
    sources = ", ".join(f"tensor {place} by its name in the graph" for place in range(20))

    def told(run: RunFact, place: int) -> RunFact:
        assert run.record is not None
        counters = {**run.record.counters, "host_syncs": 5 + (run.arm == "head"), "aaa": 1, "zzz": place}
        facts = {**run.record.facts, "bound_by": sources}
        return run.model_copy(update={"record": run.record.model_copy(update={"counters": counters, "facts": facts})})

    cell = doc.cells[0].model_copy(update={"runs": tuple(told(r, i) for i, r in enumerate(doc.cells[0].runs))})
    text = explain(samples.broken(), doc.model_copy(update={"cells": (cell,)}), samples.CELL)
    readings = text.split("Readings by run:")[1].split("Samples")[0]
    assert max(map(len, readings.splitlines())) <= 125
    names = [words[0] for line in readings.splitlines() if (words := line.split())]
    assert names[:4] == ["Reading", names[1], "host_syncs", "byte_hit_rate"], "what gates and differs"
    assert names.index("htod_bytes") < names.index("+"), "what gates"
    assert names.index("zzz") < names.index("aaa"), "what differs"
    assert "tensor 19 by its name" in " ".join(readings.split())
    assert "bound_by of every run: tensor 0" in readings
