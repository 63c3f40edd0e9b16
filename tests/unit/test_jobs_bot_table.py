"""Field report: a bot's table of 59 rows, base and then head once each, with three red by a limit of 30 %.

Its figures as they were printed, judged by the rules here: one pair a row decides nothing, and with the noise that the
bot itself names for its runners, 27 % at worst, six pairs a row do not either.
"""

from __future__ import annotations

import math

import pytest

from jobs.compare import MeasuredRun, Standing, TimePlan, measured_arm, time_rows
from jobs.model import RunRecord
from jobs.verdict import TimeRow

METRIC = "decode_ms_per_token"
NOISE = 1.27
UNITS_MS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0}

TABLE = """
matmul/medium_generic_f16_threads=8/32x512x512 37.12µs 52.89µs +42.5%
sampling_latency/min_p_per_token 235.70µs 324.76µs +37.8%
matmul/medium_generic_bf16_threads=1/32x512x512 539.89µs 734.71µs +36.1%
gather/medium_f32_threads=1-internal/32768 4.48µs 5.37µs +19.9%
sampling_latency/top_k_per_token 59.76µs 70.01µs +17.1%
sampling_latency/top_p_per_token 463.78µs 539.39µs +16.3%
qwen3_sampling_processors/top_p_full_sort_after_top_k_baseline 3.80ms 4.41ms +16.0%
gather/small_bf16_threads=1-internal/4096 516.7ns 583.9ns +13.0%
qwen3_sampling_processors/top_k_partial_selection 152.34µs 170.51µs +11.9%
matmul/large_generic_bf16_threads=1/32x1024x1024 2.15ms 2.35ms +9.6%
qwen3_sampling_processors/top_k_full_sort_baseline 2.41ms 2.54ms +5.2%
sampling_latency/greedy_per_token 3.60µs 3.75µs +4.0%
matmul/medium_generic_f16_threads=1/32x512x512 36.06µs 36.46µs +1.1%
kv_cache/alloc_dealloc_pages 41.32µs 41.31µs -0.0%
tokenization/decode_tokens_per_second 7.32ms 7.26ms -0.7%
gather/small_f16_threads=1-internal/4096 565.7ns 554.2ns -2.0%
mxfp4_cached_dense_expert_repeated_call/rows=1,H=256,I=256,E=4,top_k=1 85.32µs 83.24µs -2.4%
qwen3_sampling_processors/top_p_fast_after_top_k 576.31µs 561.60µs -2.6%
tokenization/encode_tokens_per_second 459.35µs 446.24µs -2.9%
mxfp4_preexpanded_dense_oncelock_like_proxy/1x1024x1024 66.79µs 64.57µs -3.3%
grammar_masking/llguidance_compute_mask/32 84.22µs 79.37µs -5.8%
qwen3_sampling_processors/top_k_top_p_full_sort_baseline 6.41ms 6.04ms -5.9%
logit_processing/seven_processor_chain_per_step 351.74µs 327.84µs -6.8%
matmul/large_generic_f32_threads=1/32x1024x1024 10.57ms 9.78ms -7.5%
add/medium_bf16_threads=1-internal/262144 3.26ms 2.99ms -8.4%
add/large_f32_threads=1-internal/4194304 48.83ms 44.72ms -8.4%
add/medium_f16_threads=1-internal/262144 3.04ms 2.78ms -8.5%
matmul/small_generic_f32_threads=8/1x256x256 50.86µs 46.45µs -8.7%
add/large_f16_threads=1-internal/4194304 49.48ms 44.97ms -9.1%
matmul/small_generic_f16_threads=1/1x256x256 35.86µs 32.11µs -10.5%
add/small_f16_threads=1-internal/1024 15.50µs 13.85µs -10.7%
reduce_mean/medium_f32_threads=1-internal/65536 289.45µs 256.08µs -11.5%
matmul/small_generic_f32_threads=1/1x256x256 43.74µs 38.65µs -11.6%
matmul/large_generic_f16_threads=8/32x1024x1024 104.15µs 91.36µs -12.3%
reduce_mean/large_f32_threads=1-internal/262144 1.21ms 1.06ms -12.7%
matmul/large_generic_bf16_threads=8/32x1024x1024 1.98ms 1.73ms -12.9%
gather/small_f32_threads=1-internal/4096 805.9ns 698.7ns -13.3%
matmul/small_generic_bf16_threads=1/1x256x256 38.43µs 33.31µs -13.3%
add/medium_f32_threads=1-internal/262144 3.26ms 2.81ms -13.7%
qwen3_sampling_processors/top_k_top_p_fast 732.50µs 631.99µs -13.7%
matmul/small_generic_bf16_threads=8/1x256x256 42.90µs 36.91µs -14.0%
matmul/medium_generic_f32_threads=1/32x512x512 2.73ms 2.33ms -14.5%
matmul/small_generic_f16_threads=8/1x256x256 39.58µs 33.78µs -14.7%
gather/medium_f16_threads=1-internal/32768 2.78µs 2.35µs -15.3%
matmul/large_generic_f32_threads=8/32x1024x1024 6.01ms 5.06ms -15.8%
mxfp4_uncached_expert_dequant_each_call/rows=1,H=256,I=256,E=4,top_k=1 513.28µs 429.89µs -16.2%
add/small_bf16_threads=1-internal/1024 16.76µs 14.02µs -16.4%
matmul/large_generic_f16_threads=1/32x1024x1024 106.72µs 86.49µs -19.0%
gather/medium_bf16_threads=1-internal/32768 2.88µs 2.32µs -19.4%
add/large_bf16_threads=1-internal/4194304 54.82ms 44.12ms -19.5%
gather/large_bf16_threads=1-internal/131072 18.55µs 14.87µs -19.9%
reduce_mean/small_f32_threads=1-internal/4096 20.16µs 16.06µs -20.3%
add/small_f32_threads=1-internal/1024 330.1ns 240.4ns -27.2%
gather/large_f32_threads=1-internal/131072 46.05µs 32.99µs -28.4%
matmul/medium_generic_bf16_threads=8/32x512x512 613.67µs 439.42µs -28.4%
mxfp4_uncached_dequant_each_call/1x1024x1024 936.44µs 656.57µs -29.9%
matmul/medium_generic_f32_threads=8/32x512x512 1.31ms 915.82µs -30.3%
gather/large_f16_threads=1-internal/131072 21.27µs 14.75µs -30.7%
mxfp4_cached_dense_repeated_call/1x1024x1024 92.95µs 60.00µs -35.5%
"""
"""Name, base, head, and the change in per cent as the bot gives it."""


def printed() -> list[tuple[str, float, float, float]]:
    """Name, base and head in ms, change in per cent."""
    lines = (line.split() for line in TABLE.strip().splitlines())
    return [(name, in_ms(base), in_ms(head), float(change.rstrip("%"))) for name, base, head, change in lines]


def in_ms(text: str) -> float:
    return float(text[:-2]) * UNITS_MS[text[-2:]]


def judged(base_ms: float, head_ms: float, offsets: list[float]) -> TimeRow:
    """A block for each offset: head is so many times its printed figure, base its own."""
    arms = {
        "base": [base_ms for _ in offsets],
        "head": [head_ms * offset for offset in offsets],
        "null": [base_ms for _ in offsets],
    }
    base, head, null = (
        measured_arm(name, [run(name, block, ms) for block, ms in enumerate(times)]) for name, times in arms.items()
    )
    rows = time_rows(base, head, null, TimePlan(len(offsets), len(printed())), Standing())
    return next(row for row in rows if row.metric == METRIC)


def run(arm: str, block: int, ms: float) -> MeasuredRun:
    record = RunRecord(run_id=f"{arm}_{block}", attempt_id=f"a_{arm}_{block}", attempt_number=1, exit_code=0)
    return MeasuredRun(record.run_id, block, record, {METRIC: ms})


def test_the_figures_are_the_bots_own_three_red_and_four_to_look_at() -> None:
    rows = printed()
    assert len(rows) == 59
    assert all(100 * (head / base - 1) == pytest.approx(change, abs=0.5) for _, base, head, change in rows)
    assert [change for *_, change in rows if change >= 30] == [42.5, 37.8, 36.1]
    assert len([change for *_, change in rows if 15 <= change < 30]) == 4


@pytest.mark.parametrize(("name", "base", "head", "change"), printed())
def test_one_pair_of_runs_decides_nothing(name: str, base: float, head: float, change: float) -> None:
    row = judged(base, head, [1.0])
    assert (row.klass, row.blocks) == ("UNDECIDED", 1), (name, change)
    assert row.ratio == pytest.approx(head / base)


@pytest.mark.parametrize(("name", "base", "head", "change"), printed())
def test_six_pairs_with_the_noise_of_its_runners_are_undecided(
    name: str, base: float, head: float, change: float
) -> None:
    """Each mean is the printed figure. What could have been seen is told, and it is far above the bot's limit."""
    row = judged(base, head, [NOISE, 1 / NOISE] * 3)
    assert row.ratio == pytest.approx(head / base)
    assert row.klass == "UNDECIDED", (name, change)
    assert isinstance(row.smallest_detectable, float) and row.smallest_detectable > 0.30


def test_the_same_figures_on_steady_runners_are_three_slower_and_more() -> None:
    """The mirror: with 0.1 % of noise each change beyond the floors is decided, and its side is that of the figure."""
    steady = [1.001, 1 / 1.001] * 12
    for name, base, head, change in printed():
        floor = max(0.01, 0.001 / base)  # a microsecond, where that is more
        side = "WORSE" if head > base else "BETTER"
        beyond = abs(math.log(head / base)) > math.log1p(floor) + 0.002
        assert (judged(base, head, steady).klass == side) == beyond, (name, change)


def test_a_change_of_a_few_nanoseconds_is_none_however_steady() -> None:
    names = {"gather/small_bf16_threads=1-internal/4096": 13.0, "add/small_f32_threads=1-internal/1024": -27.2}
    rows = [row for row in printed() if row[0] in names]
    assert {name: change for name, _, _, change in rows} == names
    assert {judged(base, head, [1.0] * 24).klass for _, base, head, _ in rows} == {"SAME"}
