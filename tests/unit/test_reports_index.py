"""The index of sweeps: what each came to, newest first, with the retracted and the superseded struck through."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from jobs.retracted import struck
from jobs.verdict import Retraction, Verdict
from reports.index import Entry, entry_of, standing
from reports.render.environment import style_sheet
from reports.render.pages import Links, Turn, index_page
from tests.unit import reports_samples as samples
from tests.unit.reports_parsing import Page

FALLEN = Retraction(kind="run", id="run_01", cell=samples.CELL, reason="the fan had failed", at="2026-11-30T12:00:00Z")
LINKS = Links(sweeps=lambda sweep_id: f"sweeps/{sweep_id}/index.html")


def asked(verdict: Verdict, name: str, at: str = "2026-11-29T10:00:00Z", question: str = "") -> Entry:
    return entry_of(verdict.model_copy(update={"stamp": samples.stamp(sweep_id=name, created_at=at)}), question)


def shown(*entries: Entry, **options: Any) -> str:
    return index_page(standing(entries), LINKS, style=style_sheet(), **options)


def struck_through(page: str) -> list[str]:
    return [html.unescape(re.sub(r"<[^>]+>", "", one)) for one in re.findall(r"<s>(.*?)</s>", page, re.S)]


def test_an_entry_tells_verdict_arms_cards_and_counts_of_what_was_found() -> None:
    entry = asked(samples.broken(), "swp_a")
    assert (entry.outcome, entry.exit_code, entry.at) == ("VIOLATION", 1, "2026-11-29T10:00:00Z")
    assert entry.arms == (("base", "checkout"), ("head", "checkout"))
    assert entry.cards == ("sim-h200 SIM-00000000-0000-0000-0000-000000000001",)
    assert entry.cells == (("VIOLATION", 1),)
    assert entry.findings == (("VIOLATION", 1), ("REGRESSED", 1), ("TIME_WORSE", 1))
    page = Page(shown(entry))
    flat = " ".join(page.text.split())
    for needed in ("VIOLATION exit 1", "1 REGRESSED", "1 TIME_WORSE", "2026-11-29 10:00 UTC", entry.headline):
        assert needed in flat
    assert page.links == ["#main", "sweeps/swp_a/index.html"]
    assert page.unbalanced == []


def test_sweeps_stand_newest_first_and_many_cells_are_counted() -> None:
    entries = (asked(samples.verdict(), "swp_a", "2026-11-29"), asked(samples.many(12), "swp_b", "2026-11-30"))
    page = Page(shown(*entries))
    assert page.links[1:] == ["sweeps/swp_b/index.html", "sweeps/swp_a/index.html"]
    assert "12 cells: 4 REGRESSED, 8 IMPROVED" in " ".join(page.text.split())
    assert struck_through(shown(*entries)) == []


def test_what_a_retracted_sweep_said_is_struck_through_with_the_reason() -> None:
    page = shown(asked(struck(samples.verdict(), [FALLEN]), "swp_a"))
    assert struck_through(page) == ["IMPROVED, exit 0: Same tokens; head streams 41.0 % fewer bytes a token than base."]
    flat = " ".join(Page(page).text.split())
    assert "RETRACTED exit 3" in flat
    assert FALLEN.words in flat


def test_a_later_answer_to_the_same_question_supersedes_the_one_before() -> None:
    first = asked(samples.broken(), "swp_a", "2026-11-29", "q")
    other = asked(samples.verdict(), "swp_b", "2026-11-30", "another")
    later = asked(samples.verdict(), "swp_c", "2026-12-01", "q")
    assert [entry.superseded_by for entry in standing((first, other, later))] == ["", "", "swp_c"]
    page = shown(first, other, later)
    assert [" ".join(text.split()) for text in struck_through(page)] == ["VIOLATION exit 1", first.headline]
    assert "sweep swp_c answers" in " ".join(Page(page).text.split())


@pytest.mark.parametrize("what", ["open", "not judged", "retracted"])
def test_what_has_no_answer_supersedes_nothing(what: str) -> None:
    first = asked(samples.verdict(), "swp_a", "2026-11-29", "q")
    later = {
        "open": Entry("swp_b", "x", "2026-11-30", "PASS", 0, question="q", progress="3 of 4 runs"),
        "not judged": Entry("swp_b", "x", "2026-11-30", question="q", progress="3 of 4 runs"),
        "retracted": asked(struck(samples.verdict(), [FALLEN]), "swp_b", "2026-11-30", "q"),
    }[what]
    assert [entry.superseded_by for entry in standing((first, later))] == ["", ""]


def test_a_sweep_without_a_verdict_says_how_far_it_is() -> None:
    flat = " ".join(Page(shown(Entry("swp_a", "nightly", "", progress="12 of 40 runs"))).text.split())
    assert "not judged" in flat
    assert "still open12 of 40 runs" in flat
    assert "at an unknown time" in flat
    assert "exit" not in flat.split("not judged")[1].split("nightly")[0]


def test_an_index_without_sweeps_says_so_and_pages_lead_on() -> None:
    assert "No sweep stands here yet." in shown()
    page = Page(shown(asked(samples.verdict(), "swp_a"), total=900, turn=Turn("index.html", "index-3.html")))
    assert page.links[2:] == ["index.html", "index-3.html"]
    assert "900 sweeps" in page.text


def test_field_77_hostile_names_are_text_on_the_index() -> None:
    name = "".join(samples.HOSTILE)[:380]
    page = Page(shown(asked(samples.hostile(name), "swp_a")))
    assert page.unbalanced == []
    assert not {"script", "img", "b", "iframe"} & {tag for tag, _ in page.tags}
    assert len(page.links) == 2
