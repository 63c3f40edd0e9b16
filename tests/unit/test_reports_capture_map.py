"""The capture map: every seam at its place under its cause, arms cut alike once, and nothing drawn that disagrees."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.model import Missing, SeamRow
from jobs.verdict import ArmView
from reports import text
from reports.blocks import Bars, Block, Paragraph
from reports.pictures import capture
from tests.unit import reports_samples as samples


def seam(step: int, reason: str = "KernelCaptureUnsupported", op: str = "ai.onnx::Split", detail: str = "") -> SeamRow:
    return SeamRow(step=step, node=f"/model/{step}", op=op, reason=reason, path="eager-device-seam", detail=detail)


def arm(name: str, steps: int | None, seams: tuple[SeamRow, ...], segments: Any) -> ArmView:
    made = samples.arm(name, "head", "stable", samples.STABLE, 0, 0, seams=seams)
    facts = {name: value for name, value in made.facts.items() if name != "plan_steps"}
    values = {**made.values, "segments": segments, "seam_nodes": len(seams)}
    return made.model_copy(
        update={"facts": facts if steps is None else {**facts, "plan_steps": steps}, "values": values}
    )


def picture(*arms: ArmView) -> Bars:
    found = capture.build(arms)[0]
    assert isinstance(found, Bars)
    return found


def said(blocks: list[Block]) -> list[str]:
    return [text.inline(one.words) for one in blocks if isinstance(one, Paragraph)]


def test_each_seam_stands_at_its_step_on_the_strip_and_under_its_cause() -> None:
    grows = ("ClassifierDisqualified", "ai.onnx::Add", "the mask grows")
    seams = (seam(2), seam(3), seam(50, *grows), seam(99))
    ((title, bars),) = picture(arm("head", 100, seams, 3)).groups
    assert title == "head: 3 captured segments and 3 seams along 100 plan steps"
    whole, split, add = bars
    assert whole.reading == "96 plan steps in graphs, 4 in seams"
    assert [(part.kind, part.start, part.width) for part in whole.slices] == [
        ("captured", 0, 1000),
        ("seam-unsupported", 20, 20),
        ("seam-grows", 500, 10),
        ("seam-unsupported", 988, 12),
    ]
    assert split.label == "Split: KernelCaptureUnsupported"
    assert split.reading == "3 plan steps on the path eager-device-seam"
    assert [part.value for part in split.slices] == ["steps 2 to 3", "step 99"]
    assert add.reading == "1 plan step on the path eager-device-seam: the mask grows"
    assert add.slices[0].start == 500


def test_before_and_after_stand_on_one_scale_and_arms_cut_alike_share_a_strip() -> None:
    seams = (seam(4),)
    found = picture(arm("base", 10, seams, 2), arm("null", 10, seams, 2), arm("head", 10, (), 1))
    assert [title.split(":")[0] for title, _ in found.groups] == ["base, null", "head"]
    assert found.groups[1][1][0].slices[0].width == 1000
    assert dict(found.legend) == {
        "captured": "in a graph",
        "seam-unsupported": "KernelCaptureUnsupported: its kernel cannot be recorded",
    }


def test_one_graph_in_each_arm_needs_no_map_and_neither_does_capture_that_is_off() -> None:
    assert capture.build([arm("base", 10, (), 1), arm("head", 10, (), 1)]) == []
    assert capture.build([arm("base", 10, (), 0)]) == []


def test_a_step_of_which_nothing_is_captured_is_seams_alone() -> None:
    ((title, (whole, _)),) = picture(arm("head", 3, (seam(0), seam(1), seam(2)), 0)).groups
    assert title == "head: 0 captured segments and 1 seam along 3 plan steps"
    assert [(part.kind, part.start, part.width) for part in whole.slices] == [("seam-unsupported", 0, 1000)]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (arm("head", None, (seam(1),), 2), "how many steps its plan has was not recorded"),
        (arm("head", 10, (seam(1),), 5), "its 1 seam row and its 5 segments disagree"),
        (arm("head", 10, (seam(10),), 1), "its 1 seam row and its 1 segment disagree"),
        (arm("head", 10, (seam(3), seam(3)), 2), "its 2 seam rows and its 2 segments disagree"),
        (arm("head", 10, (), Missing(missing="varies: 1 to 3")), "segments varies: 1 to 3"),
    ],
)
def test_what_does_not_add_up_is_said_and_not_drawn(made: ArmView, why: str) -> None:
    assert said(capture.build([made])) == [f"No map of head: {why}."]


def test_a_plan_of_any_length_gives_a_bounded_picture_in_which_the_last_seam_is_seen() -> None:
    steps = 100_001
    seams = tuple(seam(place) for place in range(1, steps, 2))
    ((_, (whole, cause)),) = picture(arm("head", steps, seams, len(seams) + 1)).groups
    assert len(whole.slices) + len(cause.slices) <= 2 * 251
    one = picture(arm("head", steps, (seam(steps - 1),), 1)).groups[0][1][1]
    assert (one.slices[0].start + one.slices[0].width, one.slices[0].width >= 4) == (1000, True)


def test_the_rarest_causes_share_a_bar_and_a_reason_of_a_newer_engine_has_one() -> None:
    seams = tuple(seam(2 * place, op=f"ai.onnx::Op{place}", reason="SomethingNew") for place in range(1, 12))
    found = picture(arm("head", 30, seams, 12))
    bars = found.groups[0][1]
    assert bars[-1].label == "Other causes"
    assert bars[-1].reading == "3 plan steps of 3 more causes"
    assert ("seam-other", "SomethingNew: a reason that this report does not know") in found.legend


def test_text_shows_where_seams_are() -> None:
    shown = text.block(picture(arm("head", 40, (seam(20),), 2)))
    line = next(line for line in shown.splitlines() if "Split" in line)
    assert line.split("|")[1] == " " * 20 + "#" + " " * 19
