"""The token diff: both sides by position with their margins, what was ruled, and what both chose when forced."""

from __future__ import annotations

from typing import Any

from jobs.model import JudgeInput
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition
from jobs.reviewed import Golden, GoldenStream
from jobs.verdict import IdentityRow
from reports import text
from reports.blocks import Bars, Details, Section, Table
from reports.evidence import diff
from reports.pictures import margins
from tests.unit import reports_runs as runs
from tests.unit import reports_samples as samples

CHANGED = (*samples.IDS[:19], 46283, 1, 1, 1, 1)


def row(**over: Any) -> IdentityRow:
    return samples.violation(**{"run_ids": ("run_00", "run_01"), **over})


def section(*rows: IdentityRow, doc: JudgeInput | None = None) -> Section:
    doc = doc or runs.judge_input()
    return diff.build(doc, doc.cells[0], rows)


def tables(part: Section) -> list[Table]:
    return [block for block in part.shown if isinstance(block, Table)]


def lines(table: Table) -> list[list[str]]:
    return [[text.inline(cell) for cell in line] for line in table.rows]


def adjudicated(**over: Any) -> JudgeInput:
    """The oracle asked about the difference at 19: head's id stands in the band there, and not at 21."""
    fields = {"base_error": 0.02, "base_id": 1, "base_behind": 0.0, "head_behind": 0.0, "oracle_id": 1}
    base_ids, head_ids = samples.IDS, CHANGED
    positions = tuple(
        ForcedPosition(
            **{**fields, "base_id": base_ids[at], "head_id": head_ids[at] if at == 19 else base_ids[at]},
            index=at,
        )
        for at in range(19, 24)
    )
    beyond = positions[2].model_copy(update={"head_id": 9, "head_behind": 0.5})
    asked = FollowUp(
        cell=samples.CELL,
        base="base",
        head="head",
        card="SIM-1",
        prompt_ids=(504,),
        base_ids=base_ids,
        head_ids=head_ids,
        first=19,
    )
    answer = Adjudication(asked=asked, positions=(*positions[:2], beyond, *positions[3:]))
    return runs.judge_input().model_copy(update={"adjudications": (answer.model_copy(update=over),)})


def test_both_sides_stand_by_position_and_the_first_difference_is_marked_in_words() -> None:
    window = tables(section(row()))[0]
    assert [column.title for column in window.columns] == [
        "Position",
        "base, id",
        "head, id",
        "base, gap",
        "head, gap",
        "What",
    ]
    shown = lines(window)
    assert shown[0] == ["0 to 14", "15 ids", "15 ids", "smallest 0.5", "smallest 0.5", "common prefix"]
    assert shown[4] == ["18", "34", "34", "0.5", "0.5", "equal"]
    assert shown[5] == ["19", "216", "46283", "0.5", "0.5", "first difference: violation"]
    assert shown[6][-1] == "after other ids"
    assert window.marked_rows == (5,)


def test_every_id_of_both_lists_stands_behind_a_fold() -> None:
    part = section(row())
    (whole,) = (block for fold in part.folded for block in fold.blocks if isinstance(block, Table))
    shown = lines(whole)
    assert [line[1] for line in shown] == [str(token) for token in samples.IDS]
    assert [line[2] for line in shown] == [str(token) for token in CHANGED]
    assert whole.marked_rows == (19,)


def test_an_arm_against_itself_is_found_by_its_two_generations() -> None:
    one = row(left="head gen 1", right="head gen 2", what="self", run_ids=("run_01",))
    shown = lines(tables(section(one))[0])
    assert shown[5][1:3] == ["216", "46283"]
    assert "oracle" not in text.section(section(one), folded=False), "it is asked about base and head"


def test_a_list_that_ends_early_says_end() -> None:
    short = runs.judge_input()
    cell = short.cells[0]
    record = cell.runs[1].record
    assert record is not None
    cut = record.generations[0].model_copy(update={"ids": samples.IDS[:20], "gaps": ()})
    fact = cell.runs[1].model_copy(update={"record": record.model_copy(update={"generations": (cut,)})})
    doc = short.model_copy(update={"cells": (cell.model_copy(update={"runs": (cell.runs[0], fact)}),)})
    one = row(
        **{"class": "SHORT"},
        right_length=20,
        common_prefix=20,
        first_difference=20,
        generation=0,
        left_id=None,
        right_id=None,
        left_context=samples.IDS[16:24],
        right_context=samples.IDS[16:20],
    )
    shown = lines(tables(section(one, doc=doc))[0])
    assert shown[5][:6] == ["20", "33", "end", "0.5", "", "first difference: short"]
    assert shown[4][4] == "not recorded"


def test_without_a_difference_base_and_head_are_shown_with_how_clear_each_choice_was() -> None:
    part = section(samples.identical().model_copy(update={"run_ids": ("run_00", "run_03", "run_01", "run_02")}))
    assert tables(part) == []
    (picture,) = (block for block in part.shown if isinstance(block, Bars))
    assert picture.bands == ()
    assert [bar.reading for bar in picture.groups[0][1]] == ["smallest 0.5 at position 0, largest 0.5"] * 2
    assert "all 24 ids of base and head" in text.inline(part.folded[0].summary)


def test_lists_that_are_not_there_or_not_those_of_the_row_are_missing_and_not_guessed() -> None:
    gone = text.section(section(row(run_ids=("run_98", "run_99"))), folded=True)
    assert "missing: the lists that were compared are not in this input" in gone
    assert tables(section(row(right_length=23))) == []
    assert tables(section(row(right_context=(1, 2, 3)))) == []
    assert "missing: no lists were compared" in text.section(section(), folded=True)


def test_forced_answers_stand_beside_the_oracle_s_with_the_band_and_what_is_outside_it() -> None:
    forced = tables(section(row(), doc=adjudicated()))[1]
    assert forced.caption == "Forced through the ids of base, beside the oracle"
    shown = lines(forced)
    assert shown[0] == ["19", "1", "216", "0", "46283", "0", "0.04", "in the band"]
    assert shown[2][-4:] == ["9", "0.5", "0.04", "outside the band"]


def test_base_is_held_to_the_band_at_the_first_difference() -> None:
    answer = adjudicated().adjudications[0]
    first, *rest = answer.positions
    behind = (
        first.model_copy(update={"base_behind": 0.05}),
        *(at.model_copy(update={"base_behind": 9.0}) for at in rest),
    )
    shown = lines(tables(section(row(), doc=adjudicated(positions=behind)))[1])
    assert [line[-1] for line in shown[:2]] == ["outside the band", "in the band"]


def test_an_oracle_that_could_not_be_asked_or_was_asked_of_other_lists_is_said() -> None:
    failed = text.section(section(row(), doc=adjudicated(positions=(), failure="no worker was there")), folded=False)
    assert "The oracle could not be asked: no worker was there." in failed
    assert "The oracle was not asked about these two lists." in text.section(section(row()), folded=False)


def test_an_arm_stands_beside_its_golden_with_the_gaps_that_were_blessed() -> None:
    golden = Golden(
        id="gld_1",
        cell=samples.CELL,
        model_digest="m",
        prompt_digest="p",
        tokens=24,
        ignore_eos=True,
        card="sim-h200",
        streams=(GoldenStream(ids=samples.IDS, stop="length", gaps=(0.25,) * 24),),
        reason="agreed",
        by="Ada",
        at="2026-11-29T10:00:00Z",
        sweep="swp_0",
        arm="base",
        runs=("run_9",),
        engine_digest="e",
    )
    doc = runs.judge_input()
    reviewed = doc.manifest.reviewed.model_copy(update={"goldens": (golden,)})
    doc = doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"reviewed": reviewed})})
    one = row(left="golden", what="golden", run_ids=("", "run_01"))
    shown = lines(tables(section(one, doc=doc))[0])
    assert shown[5] == ["19", "216", "46283", "0.25", "0.5", "first difference: violation"]
    assert tables(section(one)) == [], "no golden, nothing to stand beside it"


def test_what_the_oracle_answered_about_locks_is_a_table_with_its_margin() -> None:
    doc = adjudicated()
    (answer,) = doc.adjudications
    asked = answer.asked.model_copy(update={"kind": "lock", "head": "base"})
    told = answer.positions[0].model_copy(update={"oracle_id": 46283, "oracle_margin": 0.031})
    locks = (
        answer.model_copy(update={"asked": asked, "positions": (told,)}),
        answer.model_copy(
            update={"asked": asked.model_copy(update={"first": 3}), "positions": (), "failure": "no room"}
        ),
    )
    (table,) = tables(section(samples.identical(), doc=doc.model_copy(update={"adjudications": locks})))
    assert lines(table) == [
        ["19", "46283", "0.031", "216", "0", "another id than the oracle's"],
        ["3", "", "", "", "", "not answered: no room"],
    ]


def test_long_lists_are_bounded_and_the_rest_is_counted() -> None:
    doc, length = runs.judge_input(), diff.MOST_ROWS + 200
    cell = doc.cells[0]
    facts = []
    for fact in cell.runs:
        assert fact.record is not None
        ids = (*range(length - 1), 7 if fact.arm == "head" else 8)
        long = fact.record.generations[0].model_copy(update={"ids": ids, "gaps": (0.5,) * length})
        facts.append(fact.model_copy(update={"record": fact.record.model_copy(update={"generations": (long,)})}))
    doc = doc.model_copy(update={"cells": (cell.model_copy(update={"runs": tuple(facts)}),)})
    at = {"common_prefix": length - 1, "first_difference": length - 1, "left_length": length, "right_length": length}
    ends = {"left_context": (*range(length - 5, length - 1), 8), "right_context": (*range(length - 5, length - 1), 7)}
    part = section(row(**at, **ends, generation=0), doc=doc)
    (whole,) = (block for fold in part.folded for block in fold.blocks if isinstance(block, Table))
    assert (len(whole.rows), whole.more, whole.marked_rows) == (diff.MOST_ROWS, 200, ())
    assert lines(tables(part)[0])[-1][1:3] == ["8", "7"]
    (picture,) = (block for block in part.shown if isinstance(block, Bars))
    assert all(len(bar.lines[0]) <= margins.MOST_POINTS for bar in picture.groups[0][1])
    (mark,) = picture.bands
    assert mark.start + mark.width == 1000


def test_a_sharp_dip_of_one_position_stays_in_the_picture() -> None:
    gaps = [1.0] * 5_000
    gaps[3_333] = 0.001
    picture = margins.build((("base", gaps),), 5_000, None)[0]
    assert isinstance(picture, Bars)
    lowest = max(picture.groups[0][1][0].lines[0], key=lambda point: point[1])
    assert lowest == (667, 949)


def test_more_differences_than_are_shown_are_counted() -> None:
    part = section(*[row()] * 5)
    assert len(part.folded) == diff.MOST_DIFFERENCES
    assert all(isinstance(fold, Details) for fold in part.folded)
    assert "2 more comparisons that differ" in text.section(part, folded=False)
