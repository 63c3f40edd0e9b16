"""Times against the card's clock: what the clock alone moved is said and is not WORSE; nothing else is excused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.judge import judge
from jobs.model import Gate, JudgeInput, RunFact
from jobs.stats import BlockTimes, ClockedBlocks, clock_effect
from jobs.verdict import TimeRow, Verdict

BLOCKS = 24
Mhz = Callable[[RunFact], float | None]


def swept(documents: Any, slower: float, mhz: Mhz, **manifest: Any) -> JudgeInput:
    """Head takes `slower` times as long; each run's clock as `mhz` says."""

    def jitter(block: int, run: int) -> int:
        return 20_000_000 + 20_000 * ((block * 7 + run * 3) % 5)

    doc = documents.sweep(
        base=documents.arm(step_ns=jitter),
        head=documents.arm(step_ns=lambda block, run: int(jitter(block, run) * slower)),
        cell={"blocks": BLOCKS},
        varies=(),
        **manifest,
    )
    clocked: JudgeInput = documents.replace_runs(doc, lambda run: _at(run, mhz(run)))
    return clocked


def _at(run: RunFact, mhz: float | None) -> RunFact:
    record = run.record
    assert record is not None and record.certificate is not None
    during = {} if mhz is None else {"sm_clock_mhz": {"min": mhz, "max": mhz, "median": mhz}}
    certificate = record.certificate.model_copy(update={"during": during})
    return run.model_copy(update={"record": record.model_copy(update={"certificate": certificate})})


def head_at(mhz: float, others: float = 1980) -> Mhz:
    return lambda run: mhz if run.arm == "head" else others


def verdict_of(doc: JudgeInput) -> Verdict:
    answer = judge(doc)
    assert isinstance(answer, Verdict)
    return answer


def row_of(doc: JudgeInput, metric: str = "decode_ms_per_token") -> TimeRow:
    return next(row for row in verdict_of(doc).cells[0].time if row.metric == metric)


@pytest.mark.parametrize("metric", ["decode_ms_per_token", "tokens_per_s"])
@pytest.mark.parametrize(("slower", "mhz"), [(1.1, 1800), (0.9, 2200)], ids=["slower", "faster"])
def test_a_difference_that_the_cycles_do_not_share_is_the_clocks(
    documents: Any, slower: float, mhz: float, metric: str
) -> None:
    row = row_of(swept(documents, slower, head_at(mhz)), metric)
    assert row.klass == "UNDECIDED"
    assert f"a clock effect: {slower:.4g} times the time at {mhz / 1980:.4g} times the SM clock is" in row.note


@pytest.mark.parametrize(
    ("why", "mhz"),
    [
        ("one clock", head_at(1980)),
        ("a faster clock", head_at(2100)),
        ("a clock that explains a fifth", head_at(1940)),
        ("no clock known", lambda _run: None),
        ("one clock unknown", lambda run: None if run.run_id == "run_20_0_head" or run.block == 20 else 1800),
        ("both arms at a lower clock", head_at(1800, others=1800)),
        ("a clock that wavers", lambda run: 1700 + 150 * ((run.block * 5 + run.position) % 4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_else_is_excused_by_a_clock(documents: Any, why: str, mhz: Mhz) -> None:
    row = row_of(swept(documents, 1.1, mhz))
    assert row.klass == "WORSE" and "clock" not in row.note, why


def test_a_clock_effect_costs_what_an_open_question_costs(documents: Any) -> None:
    advised = verdict_of(swept(documents, 1.1, head_at(1800)))
    assert advised.exit_code == 0 and all(finding.outcome != "TIME_WORSE" for finding in advised.findings)
    gated = verdict_of(swept(documents, 1.1, head_at(1800), gate=Gate(time="block")))
    assert (gated.outcome, gated.exit_code) == ("MISSING", 3)
    assert "a clock effect" in gated.headline


@given(slower=st.floats(1.03, 2.0), share=st.floats(0.0, 1.0))
def test_the_more_of_a_slowdown_is_cycles_the_less_the_clock_explains(slower: float, share: float) -> None:
    """`share` of the slowdown is in cycles, the rest in the clock: excused only where the cycles stand still."""
    cycles, wobble = slower**share, [1.0, 1.0004, 0.9997, 1.0002, 0.9999, 1.0001]
    clock = cycles / slower

    def blocks(ratio: float) -> tuple[BlockTimes, ...]:
        return tuple(BlockTimes((1.0,), (ratio * each,)) for each in wobble)

    said = clock_effect(ClockedBlocks(blocks(slower), blocks(cycles), blocks(clock)), 0.01)
    if cycles > 1.02 or clock > 0.985:
        assert said == ""
    if cycles < 1.005 and clock < 0.98:
        assert said.startswith("a clock effect")


def test_an_arm_tells_its_slowest_and_fastest_run_where_the_clock_of_each_is_known(documents: Any) -> None:
    known = verdict_of(swept(documents, 1.0, lambda run: 1980.0 if run.block else 1755.0)).cells[0].arms
    assert [arm.sm_clock_mhz for arm in known] == [(1755.0, 1980.0)] * 3
    one_lost = verdict_of(swept(documents, 1.0, lambda run: None if run.arm == "head" and not run.block else 1980.0))
    assert [arm.sm_clock_mhz for arm in one_lost.cells[0].arms] == [(1980.0, 1980.0), (1980.0, 1980.0), None]
    told = one_lost.model_dump(mode="json")["cells"][0]["arms"]
    assert ["sm_clock_mhz" in arm for arm in told] == [True, True, False], "as verdicts of before are written"
