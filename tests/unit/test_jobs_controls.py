"""Counts against bytes, changed defaults, and metrics that are new, gone, renamed, redefined or not recorded."""

from __future__ import annotations

from typing import Any

import pytest

from engine.counters import COUNTERS
from jobs.controls import PAIRS
from jobs.gates import EXACT
from jobs.judge import judge
from jobs.model import JudgeInput
from jobs.reads import Figure, Reads
from jobs.verdict import MetricRow, Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    answer = judge(doc)
    assert isinstance(answer, Verdict)
    return answer


def notes_of(doc: JudgeInput) -> str:
    return "\n".join(verdict_of(doc).cells[0].notes)


def row_of(doc: JudgeInput, metric: str) -> MetricRow:
    return next(row for row in verdict_of(doc).cells[0].exact if row.metric == metric)


def closed(touches: int, hits: int, hit_bytes: int, htod: int) -> dict[str, int]:
    """Counters that close, of runs that touch `touches` keys."""
    page_ins = touches - hits
    return {
        "touches": touches, "hits": hits, "hit_bytes": hit_bytes, "page_ins": page_ins, "htod_bytes": htod,
        "retained_page_ins": page_ins, "retained_bytes": htod, "bypassed_page_ins": 0, "bypassed_page_in_bytes": 0,
        "device_htod_bytes": htod,
    }  # fmt: skip


def moved(documents: Any, base: dict[str, int], head: dict[str, int]) -> JudgeInput:
    doc: JudgeInput = documents.sweep(
        base=documents.arm(changes=base), null=documents.arm(changes=base), head=documents.arm(changes=head), varies=()
    )
    return doc


# ---- counts against bytes ----------------------------------------------------------------------------------------

FEW = closed(1000, 200, 2_000_000, 8_000_000)
MORE_HITS_MORE_BYTES = closed(1000, 500, 1_000_000, 9_000_000)


@pytest.mark.parametrize("mirrored", [False, True], ids=["fewer page-ins, more bytes", "more page-ins, fewer bytes"])
def test_counts_that_rank_the_arms_otherwise_than_bytes_are_flagged(documents: Any, mirrored: bool) -> None:
    """The seeds' byte-aware admission: the count says better, the link says worse."""
    arms = (MORE_HITS_MORE_BYTES, FEW) if mirrored else (FEW, MORE_HITS_MORE_BYTES)
    doc = moved(documents, *arms)
    said = notes_of(doc)
    count, size = ("higher", "lower") if mirrored else ("lower", "higher")
    assert f"head ranks otherwise by bytes than by count: page_ins {count} and htod_bytes {size}; the" in said
    assert f"hits {size} and hit_bytes {count}" in said
    assert f"count_hit_rate {size} and byte_hit_rate {count}" in said
    assert row_of(doc, "htod_bytes").klass == ("improved" if mirrored else "regressed"), "bytes gate, counts do not"


def test_counts_and_bytes_that_agree_or_stand_still_are_not_flagged(documents: Any) -> None:
    both = closed(1000, 500, 5_000_000, 5_000_000)
    still = closed(1000, 500, 2_000_000, 8_000_000)
    for head in (both, still, FEW):
        assert "ranks otherwise" not in notes_of(moved(documents, FEW, head))


def test_every_pair_is_of_metrics_that_are_compared() -> None:
    assert set(PAIRS) | set(PAIRS.values()) <= set(EXACT)
    twins = {counter.name for counter in COUNTERS.values() if counter.twin is not None}
    assert twins and twins <= set(PAIRS)


# ---- changed defaults --------------------------------------------------------------------------------------------


def defaulted(documents: Any, base: object, head: object, source: str = "default", **manifest: Any) -> JudgeInput:
    """Arms that serve `growth` in these values, by default unless told otherwise."""

    def serves(value: object) -> dict[str, Any]:
        return {"growth": {"value": value, "source": source}}

    doc = documents.sweep(**manifest)
    values = {"base": base, "null": base, "head": head}
    served: JudgeInput = documents.replace_runs(
        doc,
        lambda run: run.model_copy(
            update={
                "record": run.record.model_copy(
                    update={"effective_config": {**run.record.effective_config, **serves(values[run.arm])}}
                )
            }
        ),
    )
    return served


def test_a_default_that_changed_is_shown_and_cannot_be_compared_by_itself(documents: Any) -> None:
    doc = defaulted(documents, "double", "exact")
    said = notes_of(doc)
    assert "the default of growth changed: double in base and exact in head, and the sweep asks neither" in said
    assert (verdict_of(doc).outcome, verdict_of(doc).exit_code) == ("NOT_COMPARABLE", 3)


def test_a_default_that_changed_on_purpose_is_still_shown(documents: Any) -> None:
    doc = defaulted(documents, "double", "exact", varies=("policy", "growth"))
    assert "the default of growth changed" in notes_of(doc)
    assert verdict_of(doc).exit_code == 0


@pytest.mark.parametrize(
    ("base", "head", "source"), [("double", "double", "default"), ("double", "exact", "request")], ids=["same", "asked"]
)
def test_what_is_the_same_or_was_asked_for_is_no_changed_default(
    documents: Any, base: str, head: str, source: str
) -> None:
    assert "the default of" not in notes_of(defaulted(documents, base, head, source, varies=("policy", "growth")))


# ---- metrics that come and go ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "head", "klass", "note"),
    [
        (None, 5, "new", "base does not record it"),
        (5, None, "vanished", "head does not record it"),
        (None, None, "not_recorded", ""),
        (0, 5, "regressed", "new non-zero"),
        (5, 0, "improved", "now zero"),
    ],
)
def test_new_vanished_and_not_recorded_are_said_and_never_read_as_zero(
    documents: Any, base: int | None, head: int | None, klass: str, note: str
) -> None:
    doc = documents.sweep(
        base=documents.arm(changes={"host_syncs": base}),
        null=documents.arm(changes={"host_syncs": base}),
        head=documents.arm(changes={"host_syncs": head}),
        varies=(),
    )
    row = row_of(doc, "host_syncs")
    assert row.klass == klass and note in row.note
    missing = klass in ("new", "vanished", "not_recorded")
    assert verdict_of(doc).exit_code == {True: 3, False: 1 if klass == "regressed" else 0}[missing]


def test_a_metric_that_may_have_been_renamed_is_said_and_nothing_is_guessed(documents: Any) -> None:
    """Head calls it by another name: the old one vanished and gates, the new one is listed, and the note names both."""
    doc = documents.sweep(
        base=documents.arm(changes={"host_syncs": 77}),
        null=documents.arm(changes={"host_syncs": 77}),
        head=documents.arm(changes={"host_syncs": None, "host_waits": 77, "other": 12}),
        varies=(),
    )
    said = notes_of(doc)
    assert "head no longer records host_syncs and newly records host_waits of the same value: if it was renamed" in said
    assert "other" not in said
    assert (row_of(doc, "host_syncs").klass, row_of(doc, "host_waits").klass) == ("vanished", "new")
    assert verdict_of(doc).exit_code == 3


@pytest.mark.parametrize(
    ("head", "is_said"),
    [(("/traffic", "B"), False), (("/traffic", "MiB"), True), (("/all_traffic", "B"), True)],
    ids=["one place", "another unit", "another place"],
)
def test_a_counter_that_is_read_from_another_place_is_said(
    documents: Any, head: tuple[str, str], is_said: bool
) -> None:
    def reads(at: str, unit: str) -> Reads:
        return Reads(format="json", ids="/ids", counters={"htod_bytes": Figure(at=at, unit=unit)})

    base = documents.arm(plan={"reads": reads("/traffic", "B")})
    doc = documents.sweep(base=base, head=documents.stable_arm(plan={"reads": reads(*head)}))
    told = f"htod_bytes is read from '/traffic' (B) in base and {head[0]!r} ({head[1]}) in head" in notes_of(doc)
    assert told is is_said
