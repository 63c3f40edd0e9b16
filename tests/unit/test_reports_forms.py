"""One verdict, many forms: outcome, exit code, counts and worst rows are the same in each."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from junitparser import Error, Failure, JUnitXml, TestSuite

from jobs.verdict import Verdict
from reports import schema
from reports.blocks import words
from reports.escape import slug
from reports.junit import SWEEP_CASE
from reports.render import COMMENT_FLOOR, Form, comment_length, remove_pages, render
from reports.sections import headline
from reports.text import inline
from reports.view import SweepView
from tests.unit import reports_samples as samples
from tests.unit.report_pages import write_html
from tests.unit.reports_parsing import Page, Table, markdown

VERDICTS = {
    "improved": samples.verdict(),
    "broken": samples.broken(),
    "many": samples.many(12),
    "clean": samples.verdict(outcome="PASS", cells=(samples.cell(outcome="PASS", exact=()),)),
    "absent": samples.verdict(outcome="MISSING", exit_code=3, cells=(), cells_expected=4, cells_judged=0),
}
EACH = pytest.mark.parametrize("name", VERDICTS)


def worst(view: SweepView) -> list[tuple[str, str, str]]:
    """Worst rows as (state, row, change), from the view that all forms share."""
    rows = [row for row in view.ranked if row.is_worse] or [row for row in view.ranked if not row.is_usual]
    return [(row.state.word, row.subject, row.change) for row in rows]


def read(tables: list[Table]) -> list[tuple[str, str, str]]:
    """Worst rows as a parsed form shows them."""
    for table in tables:
        if table.caption in {"Rows that moved", "Rows that are worse or unknown"}:
            place = table.head.index("Row")
            return [(re.sub(r"^\W+ ", "", row[0]), row[place], row[-1]) for row in table.rows]
    return []


def suite_of(verdict: Verdict) -> TestSuite:
    """The one suite of a verdict's JUnit XML, read back."""
    (suite,) = JUnitXml.fromstring(render(verdict, "junit"))
    assert isinstance(suite, TestSuite)
    return suite


@EACH
def test_outcome_exit_code_and_counts_agree(name: str, tmp_path: Path) -> None:
    verdict = VERDICTS[name]
    counts = inline(headline.counts(SweepView(verdict)))
    assert f"Exit code {verdict.exit_code}." in counts
    raw = json.loads(render(verdict, "json"))
    assert (raw["outcome"], raw["exit_code"], raw["cells_judged"]) == (
        verdict.outcome,
        verdict.exit_code,
        verdict.cells_judged,
    )
    junit = suite_of(verdict)
    forms = {
        "JUnit XML": " ".join(str(told.value) for told in junit.properties()),
        "comment": markdown(render(verdict, "comment")).text,
        "one page": Page(render(verdict, "html")).text,
        "folder": Page(write_html(verdict, tmp_path).read_text()).text,
        "text": render(verdict, "text"),
    }
    for form, shown in forms.items():
        assert counts in " ".join(shown.split()), form
        assert re.search(rf"\b{verdict.outcome}\b", shown), form
        assert verdict.headline in " ".join(shown.split()), form
        assert verdict.next_step in " ".join(shown.split()), form


@EACH
def test_cells_and_exit_codes_of_junit_fold_to_the_verdicts(name: str) -> None:
    """A CI system reads its cases alone: none may look passed that is not, and what fails is what blocks."""
    verdict = VERDICTS[name]
    junit = suite_of(verdict)
    told = {case.name: tuple(type(result).__name__ for result in case.result) for case in junit}
    cells = {cell.cell: () if not cell.exit_code else ("Failure",) for cell in verdict.cells}
    assert told == (cells or {SWEEP_CASE: ("Error",)})
    assert (junit.failures + junit.errors > 0) == (verdict.exit_code != 0)
    types = {case.name: case.result[0].type for case in junit if case.result}
    assert types == ({cell.cell: cell.outcome for cell in verdict.cells if cell.exit_code} or types)
    assert (types == {}) == (verdict.exit_code == 0)


@pytest.mark.parametrize(
    ("code", "kinds"), [(0, []), (1, [Failure]), (2, [Error]), (3, [Error]), (4, [Error])], ids=str
)
def test_an_answer_that_is_missing_is_an_error_of_junit_and_no_skip(code: int, kinds: list[type]) -> None:
    junit = suite_of(samples.verdict(cells=(samples.cell(exit_code=code),), exit_code=code))
    (case,) = junit
    assert [type(result) for result in case.result] == kinds
    assert (junit.tests, junit.skipped, junit.failures + junit.errors) == (1, 0, int(code != 0))


def test_what_no_cell_shows_is_a_case_of_its_own() -> None:
    """An absent cell, or a retraction: all cells of the document pass, and the suite must not."""
    junit = suite_of(samples.verdict(outcome="MISSING", exit_code=3, cells_expected=2, headline="One cell is absent."))
    assert [(case.name, [type(one) for one in case.result]) for case in junit] == [
        (SWEEP_CASE, [Error]),
        (samples.CELL, []),
    ]
    assert next(iter(junit)).result[0].message == "MISSING: One cell is absent."
    whole = samples.broken()
    stray = whole.findings[0].model_copy(update={"cell": "", "message": "the store broke"})
    cases = {case.name: case for case in suite_of(whole.model_copy(update={"findings": (stray, *whole.findings)}))}
    assert list(cases) == [SWEEP_CASE, samples.CELL] and "the store broke" in cases[SWEEP_CASE].result[0].text


@EACH
def test_worst_rows_agree_in_content_and_order(name: str, tmp_path: Path) -> None:
    verdict = VERDICTS[name]
    expected = worst(SweepView(verdict))
    assert read(markdown(render(verdict, "comment")).tables) == expected
    assert read(Page(render(verdict, "html")).tables) == expected
    assert read(Page(write_html(verdict, tmp_path).read_text()).tables) == expected
    assert worst(SweepView(Verdict.model_validate_json(render(verdict, "json")))) == expected
    cases = "\n".join(case.result[0].text if case.result else case.system_out for case in suite_of(verdict))
    parts = [line.split(": ") for line in cases.splitlines() if " -> " in line]
    rows = [(line[0], line[1], line[-1]) for line in parts]
    in_order = [row for row in rows if row in expected]
    assert in_order == (expected if len(verdict.cells) == 1 else sorted(expected, key=in_order.index))
    flat = re.sub(r"\s+", "", render(verdict, "text"))
    if len(verdict.cells) <= 1 and name != "broken":  # wrapped cells of a wide table interleave in plain text
        start = 0
        for row in expected:
            for word in row:
                start = flat.index(re.sub(r"\s+", "", word), start)


def test_findings_keep_the_order_of_the_verdict() -> None:
    table = markdown(render(samples.broken(), "comment")).table("Findings")
    assert [row[0].split()[-1] for row in table.rows] == ["VIOLATION", "REGRESSED", "TIME_WORSE"]
    assert [row[-1] for row in table.rows] == ["1", "1", "0, advice"]


def test_the_published_schema_is_the_models_own_and_every_verdict_fits_it() -> None:
    """What changes it is either one more field or another version; the file changes in the same commit."""
    assert schema.published() == schema.written()
    document = json.loads(schema.published())
    Draft202012Validator.check_schema(document)
    validator = Draft202012Validator(document)
    for verdict in (*VERDICTS.values(), *(samples.hostile(word) for word in samples.HOSTILE)):
        validator.validate(json.loads(render(verdict, "json")))
    told = json.loads(render(samples.broken(), "json"))
    assert told["schema"] == "assay.verdict/1"
    spoilt: tuple[dict[str, Any], ...] = (
        {"schema": "assay.verdict/2"},
        {"outcome": "FINE"},
        {"exit_code": "0"},
        {"cells": [{}]},
        {"further": 1},
    )
    for spoiled in spoilt:
        assert not validator.is_valid(told | spoiled), spoiled
    assert not validator.is_valid({key: told[key] for key in told if key != "schema"})


def test_json_is_the_canonical_verdict() -> None:
    verdict = samples.broken()
    shown = render(verdict, "json")
    assert shown == verdict.canonical()
    assert Verdict.model_validate_json(shown) == verdict


def test_rendering_is_a_pure_function() -> None:
    forms: tuple[Form, ...] = ("comment", "html", "junit", "text")
    for form in forms:
        assert render(samples.broken(), form) == render(samples.broken(), form)


def test_worst_rows_come_in_order_of_severity() -> None:
    ranked = SweepView(samples.broken()).ranked
    assert [row.state.word for row in ranked] == [
        "violation",
        "violation",
        "regressed",
        "regressed",
        "not met",
        "varies inside an arm",
    ]
    assert [row.subject for row in ranked[2:4]] == ["segments", "htod_bytes_per_token"]  # 31 times outranks 1.7 times


def test_several_cells_are_ordered_as_their_exit_codes_fold() -> None:
    codes = {"a": 0, "b": 3, "c": 4, "d": 1, "e": 2}
    cells = tuple(samples.cell(cell=name, exit_code=code) for name, code in codes.items())
    assert [cell.cell for cell in SweepView(samples.verdict(cells=cells)).cells] == ["e", "d", "c", "b", "a"]


def test_an_absent_cell_is_said_not_to_pass() -> None:
    view = SweepView(samples.verdict(cells_expected=3))
    assert "2 cells absent, which is no pass" in inline(headline.counts(view))


def test_a_cell_that_measured_nothing_renders_everywhere(tmp_path: Path) -> None:
    bare = samples.cell(
        arms=(), identity=(), witnesses=(), invariants=(), exact=(), time=(), outcome="INFRASTRUCTURE", exit_code=4
    )
    verdict = samples.verdict(
        outcome="INFRASTRUCTURE", exit_code=4, cells=(bare,), blind_spots=(), stamp=samples.stamp(cards=())
    )
    pages = [markdown(render(verdict, "comment")), Page(write_html(verdict, tmp_path).read_text())]
    for page in pages:
        assert page.unbalanced == []
        assert "nothing is known about identity" in page.text
        assert "unknown: no arm was measured" in page.text
        assert "unknown: no exact metric was compared" in page.text
        assert "the sweep names none, so nothing proves that the changed path ran" in page.text
    assert "INFRASTRUCTURE" in render(verdict, "text")


def test_words_take_strings_and_pieces() -> None:
    assert inline(words("a ", "b")) == "a b"


def test_an_earlier_sweeps_pages_are_removed_and_no_file_of_a_users(tmp_path: Path) -> None:
    write_html(samples.many(3), tmp_path)
    mine = [tmp_path / "cells" / "notes.html", tmp_path / "cells" / "data.csv", tmp_path / "notes.html"]
    for path in mine:
        path.write_text("<p>kept</p>")
    write_html(samples.verdict(), tmp_path)
    pages = {path.name for path in (tmp_path / "cells").iterdir()}
    assert pages == {f"{slug(samples.CELL)}.html", "notes.html", "data.csv"}
    assert [path.read_text() for path in mine] == ["<p>kept</p>"] * 3
    remove_pages(tmp_path)
    assert {path.name for path in tmp_path.rglob("*.html")} == {"notes.html"}
    assert not (tmp_path / "assets").exists(), "nothing is left that reads as a report"
    for path in mine:
        path.unlink()
    write_html(samples.verdict(), tmp_path)
    remove_pages(tmp_path)
    assert not list(tmp_path.iterdir())
    remove_pages(tmp_path / "nowhere")
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/report.css").write_text("mine")
    remove_pages(tmp_path)
    assert (tmp_path / "assets/report.css").read_text() == "mine", "no page of ours used it"


FORMS: tuple[Form, ...] = ("comment", "html", "text")


@pytest.mark.parametrize("form", FORMS)
def test_a_dirty_tree_is_told_wherever_its_commit_is(form: Form) -> None:
    """Base and head stand at one commit here: only that head's tree is dirty tells them apart."""
    commit = "0123456789abcdef" * 2 + "01234567"
    told = {"base": commit, "null": commit, "head": f"{commit}-dirty"}
    arms = tuple(arm.model_copy(update={"commit": told[arm.arm]}) for arm in samples.arms())
    shown = render(samples.verdict(cells=(samples.cell(arms=arms),)), form)
    flat = " ".join(re.sub(r"<[^>]+>|`", "", shown).split())
    told_at = re.findall(f"{commit[:12]}[0-9a-f]*(?:-dirty)?", flat)
    compared, origin = [False, False, True], [True, False]  # the stamp's first line names head before base
    assert [place.endswith("-dirty") for place in told_at] == [*compared, *origin, *compared]


@pytest.mark.parametrize("form", FORMS)
def test_the_stamp_tells_the_rate_of_false_alarms_of_time_where_one_was_kept(form: Form) -> None:
    told = "of sweeps without a change, 1 % at most show one in a time row"
    plain = samples.verdict()
    assert told in render(plain.model_copy(update={"time_false_alarms": 0.01}), form)
    assert "of sweeps without a change" not in render(plain, form)


@pytest.mark.parametrize("form", FORMS)
def test_commands_name_a_store_that_is_not_the_default_one(form: Form, tmp_path: Path) -> None:
    def commands(shown: str) -> set[str]:
        flat = html.unescape(re.sub(r"<[^>]+>", "", shown))
        return {match.strip(" `") for match in re.findall(r"assay (?:explain|report|gate) swp_[^\n`]*", flat)}

    words = " --store 'my runs.db'"
    plain = commands(render(VERDICTS["many"], form))
    assert len(plain) >= 5
    assert commands(render(VERDICTS["many"], form, store=words)) == {command + words for command in plain}
    write_html(VERDICTS["many"], tmp_path, store=words)
    for page in tmp_path.rglob("*.html"):
        assert all(command.endswith(words) for command in commands(page.read_text()))


def test_a_short_comment_names_the_store_too_and_keeps_its_limit() -> None:
    for limit in (COMMENT_FLOOR, 1_500, 5_000):
        shown = render(VERDICTS["many"], "comment", limit=limit, store=" --store runs.db", report_url="https://e.org/r")
        assert "--store runs.db" in shown
    long = render(VERDICTS["many"], "comment", limit=COMMENT_FLOOR, store=f" --store {'x' * 5000}")
    assert comment_length(long) <= COMMENT_FLOOR
