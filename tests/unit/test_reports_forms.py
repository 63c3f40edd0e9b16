"""One verdict, many forms: outcome, exit code, counts and worst rows are the same in each."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from jobs.verdict import Verdict
from reports.blocks import words
from reports.escape import slug
from reports.render import COMMENT_FLOOR, Form, comment_length, remove_pages, render, write_html
from reports.sections import headline
from reports.text import inline
from reports.view import SweepView
from tests.unit import reports_samples as samples
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
    forms = {
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
def test_worst_rows_agree_in_content_and_order(name: str, tmp_path: Path) -> None:
    verdict = VERDICTS[name]
    expected = worst(SweepView(verdict))
    assert read(markdown(render(verdict, "comment")).tables) == expected
    assert read(Page(render(verdict, "html")).tables) == expected
    assert read(Page(write_html(verdict, tmp_path).read_text()).tables) == expected
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


def test_json_is_the_canonical_verdict() -> None:
    verdict = samples.broken()
    shown = render(verdict, "json")
    assert shown == verdict.canonical()
    assert Verdict.model_validate_json(shown) == verdict


def test_rendering_is_a_pure_function() -> None:
    forms: tuple[Form, ...] = ("comment", "html", "text")
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
    assert [place.endswith("-dirty") for place in told_at] == [False, False, True] * 2, (
        "what was compared, and the stamp"
    )


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
