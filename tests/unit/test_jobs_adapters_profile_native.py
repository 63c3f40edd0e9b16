"""The adapter `profile_native`: lines as the program prints them, its figures under our names, and what it leaves out.

tests/recorded/profile_native.txt is no recording: the program's format, with figures of a published run of a 14B model
(docs/field-reports.md) twice over, as two measured runs sum up.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.adapters.base import RunPlace
from jobs.adapters.command import CommandAdapter
from jobs.adapters.command_reads import Unread
from jobs.adapters.profile_native import COUNTERS, LINES, read
from jobs.adapters.registry import adapters
from jobs.errors import SpecError
from jobs.model import Missing
from jobs.spec import load, plan
from tests.unit.test_jobs_adapters_command import order_for
from tests.unit.test_jobs_spec import FakeResolver

OUTPUT = (Path(__file__).parents[1] / "recorded/profile_native.txt").read_text()
DEVICE = {"kind": "cuda", "uuid": "GPU-1"}
IDS = (96347, 3375, 724, 11, 358, 2776, 14589, 311, 6723, 429, 498, 3003, 2581, 6617, 315, 752)


def test_its_output_becomes_a_record_whose_equations_close(tmp_path: Path) -> None:
    (tmp_path / "output").write_text(OUTPUT)
    order = order_for(tmp_path, f"cat {tmp_path / 'output'}", counters=COUNTERS)
    (tmp_path / "scratch").mkdir()
    adapter = CommandAdapter(models=lambda _folder: "d" * 64, read=read)
    done = adapter.run(order, RunPlace(tmp_path / "scratch", {"PATH": "/usr/bin:/bin"}, lambda: "2026-01-01T00:00:00Z"))
    assert (done.end, done.reason) == ("measured", "")
    assert done.record is not None
    counters = done.record.counters
    assert [g.ids for g in done.record.generations] == [IDS, IDS]
    assert [(g.prefill_ns, sum(g.step_ns), len(g.step_ns)) for g in done.record.generations] == [
        (231_250_000, 1_500_003_000, 15),
        (230_125_000, 1_515_000_000, 15),
    ]
    told = {name: value for name, value in counters.items() if isinstance(value, int)}
    assert told["hits"] + told["page_ins"] == 867 * 32
    assert told["htod_bytes"] == 2_349_010_944 * 32
    assert told["hit_bytes"] + told["htod_bytes"] == 7_870_916_608 * 32
    assert (told["peak_committed_bytes"], told["captures"], told["replays"]) == (7_725_907_968, 0, 30)
    assert counters["unaccounted_bytes"] == Missing(missing="vmm_arena prints n/a")


def test_a_line_that_is_not_there_is_missing_and_never_zero() -> None:
    without = "\n".join(line for line in OUTPUT.splitlines() if not line.startswith("weight_offload_cache"))
    made = read(without.encode(), DEVICE)
    assert made.absent["page_ins"] == "no page_ins in a line weight_offload_cache"
    assert "page_ins" not in made.lines[-1]["counters"]
    assert made.lines[-1]["counters"]["htod_bytes"] == 75_168_350_208
    assert set(LINES["weight_offload_cache"]) <= set(made.absent)


def test_steps_of_which_a_part_is_timed_are_told_without_times() -> None:
    later = OUTPUT.replace("decode_tokens=15", "decode_tokens=12")
    assert [line["step_ns"] for line in read(later.encode(), DEVICE).lines[1:-1]] == [[], []]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("steady_run", "other"), "no steady_run line: run it with --steady"),
        (("generated_token_ids", "other"), "generated_token_ids is found 0 times"),
        (("gpu_contention_check: clear", "gpu_contention_check: CONTENDED pid 9"), "CONTENDED pid 9"),
    ],
)
def test_output_that_is_none_of_its_own_is_a_fault(change: tuple[str, str], says: str) -> None:
    with pytest.raises(Unread, match=re.escape(says)):
        read(OUTPUT.replace(*change).encode(), DEVICE)


SWEEP = """\
sweep: theirs
models: {m: {path: m}}
prompts: {p: {ids: [1, 2]}}
arms:
  base: {source: "git:main", adapter: profile_native, command: ./profile_native --steady}
  head: {like: base, source: checkout}
run: {tokens: 4}
"""


def test_a_sweep_names_its_command_alone(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    base, head = plan(load(tmp_path / "sweep.yaml"), FakeResolver()).arms
    assert (base.adapter, base.counters, base.reads) == ("profile_native", COUNTERS, None)
    assert head.command == base.command and base.adapter in adapters()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (", command: ./profile_native --steady", "", "arm 'base' has no command"),
        ("--steady", "--steady, counters: [hits]", "profile_native is read as it is known"),
        ("tokens: 4", "tokens: 4, warmups: 1", "profile_native does not print its warm-ups"),
        ("source: checkout", "source: installed", "there is no tree to run in"),
    ],
)
def test_what_it_cannot_be_told_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "sweep.yaml")
    assert any(says in str(error) for error in (caught.value, *caught.value.others))
