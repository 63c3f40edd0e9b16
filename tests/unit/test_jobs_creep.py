"""A pinned anchor beside base: what grew a little with each change is told against it, and it accuses nobody."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import JudgeInput
from jobs.verdict import Verdict

ANCHOR = {"role": "anchor", "source": "git:v1.0"}
HTOD = 84_934_656 * 96


def verdict_of(doc: JudgeInput) -> Verdict:
    answer = judge(doc)
    assert isinstance(answer, Verdict)
    return answer


def anchored(documents: Any, anchor: Any, head: Any = None, **manifest: Any) -> JudgeInput:
    """Base, null and head under lru, unless told otherwise, and an anchor beside them."""
    doc: JudgeInput = documents.sweep(head=head or documents.arm(), others={"anchor": anchor}, varies=(), **manifest)
    return doc


def grown(documents: Any, by: int, **changes: Any) -> Any:
    """An arm that streams `by` bytes less than base."""
    less = {"htod_bytes": HTOD - by, "device_htod_bytes": HTOD - by, "retained_bytes": HTOD - by, "hit_bytes": by}
    return documents.arm(changes=less, **changes)


def test_what_crept_since_the_anchor_is_told_though_head_equals_base(documents: Any) -> None:
    verdict = verdict_of(anchored(documents, grown(documents, HTOD // 10, plan=ANCHOR)))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0), "head does what base does"
    told = [note for note in verdict.cells[0].notes if note.startswith("since anchor (git:v1.0)")]
    assert told[0] == "since anchor (git:v1.0): the same tokens"
    assert any("htod_bytes is worse" in note and "+11.1%" in note for note in told)


def test_what_became_better_since_is_told_after_what_became_worse(documents: Any) -> None:
    worse = grown(documents, HTOD // 10, plan=ANCHOR).changes
    anchor = documents.arm(changes={**worse, "host_syncs": 500}, plan=ANCHOR)
    notes = verdict_of(anchored(documents, anchor)).cells[0].notes
    told = [note.split(": ", 1)[1].split(" is ")[0] for note in notes if " is worse" in note or " is better" in note]
    assert told == ["htod_bytes", "host_syncs"]


def test_an_anchor_with_the_same_figures_says_that_none_moved(documents: Any) -> None:
    notes = verdict_of(anchored(documents, documents.arm(plan=ANCHOR))).cells[0].notes
    assert "since anchor (git:v1.0): the same tokens, and no gating counter moved" in notes


@pytest.mark.parametrize("what", ["other tokens", "failed", "broken equation", "another card's driver"])
def test_an_anchor_accuses_nobody(documents: Any, what: str) -> None:
    wrong = (*documents.IDS[:7], 1, *documents.IDS[8:])
    anchor = {
        "other tokens": lambda: documents.arm(ids=lambda _r, _g: wrong, plan=ANCHOR),
        "failed": lambda: documents.arm(fact=documents.lost("failed", "crash: it is old"), plan=ANCHOR),
        "broken equation": lambda: documents.arm(changes={"hits": 5}, plan=ANCHOR),
        "another card's driver": lambda: documents.arm(device={"driver": "old"}, plan=ANCHOR),
    }[what]()
    doc = anchored(documents, anchor)
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    assert verdict.findings == ()
    said = "\n".join(verdict.cells[0].notes)
    expected = {
        "other tokens": "other tokens, ",
        "failed": "nothing to compare, anchor gave nothing: crash: it is old",
        "broken equation": "the same tokens",
        "another card's driver": "nothing to compare, card's driver is old in anchor",
    }
    assert f"since anchor (git:v1.0): {expected[what]}" in said
    assert "anchor" in [arm.arm for arm in verdict.cells[0].arms], "its figures are shown all the same"


def test_a_head_that_is_worse_than_base_is_so_whatever_the_anchor(documents: Any) -> None:
    worse = documents.arm(changes={"host_syncs": 999})
    doc = anchored(documents, documents.arm(changes={"host_syncs": 2000}, plan=ANCHOR), head=worse)
    assert (verdict_of(doc).outcome, verdict_of(doc).exit_code) == ("REGRESSED", 1)
