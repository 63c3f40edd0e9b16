"""`assay run` on real cards: blocks side by side, foreign work in a run, a holder left over, workers killed.

    python -P -m pytest tests/e2e/test_e2e_cards.py        (each test with one card, and with two where there are two)

The engine is a stand-in that holds memory of its card through the driver, so that a test says when it runs and for how
long; the first test runs the real one. Nothing else may be on the cards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from jobs.model import RunFact
from orchestrator.cards import CardName
from orchestrator.choose import resolve_visible
from orchestrator.clear import GIB, ClearPolicy, ClearVerdict, judge
from orchestrator.host import visible_pids
from orchestrator.nvml import NvmlProbe
from tests.chaos.run_site import FAKE, Site, laid_out, nothing_left, output, parent
from tests.chaos.site import ROOT, state_of, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

RUNS = 8
CLEAR_WITHIN_S = 5.0
SWEEP = """\
sweep: cards
models: {{tiny: {{build: tiny, seed: 7}}}}
prompts: {{short: {{ids: [1, 2]}}, other: {{ids: [1, 3]}}}}
arms:
  base: {{source: "path:{tree}", env: {env}}}
  head: {{like: base}}
run: {{device: cuda, tokens: {tokens}, generations: 1, ignore_eos: true}}
limits: {{run_timeout_s: 120, queue_timeout_s: 120}}
"""
"""Two cells of one block each: four runs of base and head."""


@dataclass(frozen=True)
class Attempt:
    """A row of the store."""

    id: str
    run_id: str
    card: str
    state: str
    reason: str
    opened_at: str
    closed_at: str | None


@dataclass
class Bench:
    """A place to run in, and the cards that a run there uses."""

    site: Site
    probe: NvmlProbe
    cards: tuple[CardName, ...]

    @property
    def uuids(self) -> list[str]:
        return [card.uuid for card in self.cards]

    @property
    def pause(self) -> Path:
        """As long as it is there, the stand-in engine gives no tokens."""
        return self.site.root / "pause"

    def start(self) -> subprocess.Popen[str]:
        """Run a sweep of the stand-in engine on these cards."""
        wish = {"sleep_s": 1.0, "mark": str(self.site.mark), "wait_while": str(self.pause), "holds_bytes": 2 * GIB}
        env = json.dumps({"FAKE_ENGINE": json.dumps(wish)})
        (self.site.root / "sweep.yaml").write_text(SWEEP.format(tree="arm", env=env, tokens=3))
        return self.site.assay("run", "sweep.yaml", "--cards", str(len(self.cards)))

    def look(self, uuid: str) -> ClearVerdict:
        """The card as a worker judges it after a run."""
        visible = visible_pids(tuple(self.on_card(uuid)))
        return judge(self.probe.snapshot(uuid), ClearPolicy(), "after", visible=visible)

    def on_card(self, uuid: str) -> set[int]:
        """Who is listed on it."""
        return {process.pid for process in self.probe.snapshot(uuid).processes or ()}

    def engines(self) -> dict[str, int]:
        """Cards on which one of our engines is listed, and its PID."""
        ours = set(self.site.children())
        return {uuid: pid for uuid in self.uuids for pid in self.on_card(uuid) & ours}

    def all_cards_held(self) -> dict[str, int]:
        """Wait for a run on each card, and hold these runs there: engines by card."""
        wait_for("a run on each card", lambda: len(self.engines()) == len(self.cards), 120)
        self.pause.touch()
        time.sleep(3)  # those that had seen no pause come to their end, and the next ones begin
        wait_for("a run held on each card", lambda: len(self.engines()) == len(self.cards), 60)
        return self.engines()

    def attempts(self) -> list[Attempt]:
        """What was tried so far, in order."""
        columns = ", ".join(Attempt.__dataclass_fields__)
        with contextlib.closing(sqlite3.connect(self.site.root / ".assay" / "store.db", timeout=30)) as store:
            return [Attempt(*row) for row in store.execute(f"SELECT {columns} FROM attempt ORDER BY opened_at, id")]

    def open_on(self, uuid: str) -> Attempt:
        """The attempt that is under way on a card."""
        (found,) = [one for one in self.attempts() if one.card == uuid and one.closed_at is None]
        return found

    def runs(self) -> list[RunFact]:
        """The sweep's runs as the judge reads them; each has one measured attempt, on a card that was clear."""
        with self.site.store() as store:
            (row,) = store.sweeps()
            assert row.state == "judged"
            given = store.judge_input(row.id)
        runs = [run for cell in given.cells for run in cell.runs]
        assert [Counter(one.state for one in run.attempts)["measured"] for run in runs] == [1] * RUNS
        cards = {one.id: one.card for one in self.attempts()}
        for run in runs:
            assert run.record is not None and run.record.certificate is not None
            certificate = run.record.certificate
            assert (certificate.verdict, certificate.grade) == ("clear", "pids")
            assert certificate.uuid == cards[run.record.attempt_id] == run.record.device["uuid"]
            assert certificate.before["processes"] == certificate.after["processes"] == []
            assert certificate.during["used_bytes"]["max"] > certificate.before["used_bytes"], "the run itself was seen"
        homes = {(run.block_id, cards[run.record.attempt_id]) for run in runs if run.record}
        assert len(homes) == 2, "a block never leaves its card"
        assert {card for _, card in homes} == set(self.uuids)
        return runs

    def set_aside(self) -> dict[str, str]:
        """Attempts that the verdict shows as not counted, and why."""
        with self.site.store() as store:
            verdict = store.verdict(store.sweeps()[0].id)
        assert verdict is not None
        return {one.attempt_id: one.reason for one in verdict.set_aside}


@contextlib.contextmanager
def foreign(uuid: str) -> Iterator[int]:
    """A program of somebody else that holds memory of a card: its PID."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    with subprocess.Popen(
        [sys.executable, str(FAKE.with_name("card_holder.py")), str(2 * GIB)],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == f"{holder.pid}\n"
        yield holder.pid
        holder.stdin.close()
    assert holder.returncode == 0


@pytest.fixture(
    params=[pytest.param(1, id="one-card"), pytest.param(2, id="two-cards", marks=pytest.mark.gpu(2))],
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    probe = NvmlProbe()
    cards = resolve_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), probe.cards())[: request.param]
    with laid_out() as site:
        site.extra["CUDA_VISIBLE_DEVICES"] = ",".join(card.uuid for card in cards)
        made = Bench(site, probe, cards)
        for card in cards:
            assert made.look(card.uuid).clear, made.look(card.uuid)
        yield made
        made.pause.unlink(missing_ok=True)
    probe.close()


def test_blocks_of_the_real_engine_run_at_once_one_a_card_certified_by_uuid(bench: Bench) -> None:
    root = bench.site.root
    shutil.copytree(ROOT / "engine", root / "real" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "sweep.yaml").write_text(SWEEP.format(tree="real", env="{}", tokens=48))
    run = bench.site.assay("run", "sweep.yaml", "--cards", str(len(bench.cards)))
    text = output(run, within_s=280)
    assert run.returncode == 0, text
    runs = bench.runs()
    assert {run.record.device["kind"] for run in runs if run.record} == {"cuda"}
    tried = bench.attempts()
    assert len(tried) == RUNS
    spans = {uuid: [(one.opened_at, one.closed_at or "") for one in tried if one.card == uuid] for uuid in bench.uuids}
    if len(bench.cards) == 2:
        first, second = spans.values()
        assert any(a[0] < b[1] and b[0] < a[1] for a in first for b in second), "never two at once"
    for own in spans.values():
        assert all(before[1] <= after[0] for before, after in pairwise(own)), "two on one card"
    nothing_left(bench.site)


def test_a_foreign_process_in_a_run_contaminates_that_run_alone(bench: Bench) -> None:
    met, *_others = bench.uuids[::-1]
    run = bench.start()
    bench.all_cards_held()
    hit = bench.open_on(met)
    with foreign(met) as pid:
        time.sleep(1.5)
    bench.pause.unlink()
    text = output(run, within_s=200)
    assert run.returncode == 0, text
    bench.runs()
    tried = bench.attempts()
    assert Counter(one.state for one in tried) == {"measured": RUNS, "contaminated": 1}
    (contaminated,) = [one for one in tried if one.state == "contaminated"]
    assert (contaminated.id, contaminated.card) == (hit.id, met)
    assert f"process {pid} holds" in contaminated.reason
    again = [one for one in tried if one.run_id == hit.run_id and one.state == "measured"]
    assert [one.card for one in again] == [met]
    assert bench.set_aside() == {hit.id: contaminated.reason}
    nothing_left(bench.site)


def test_a_holder_left_over_is_named_and_blocks_its_card_until_it_is_gone(bench: Bench) -> None:
    """The other card, where there is one, is served meanwhile."""
    met, *others = bench.uuids[::-1]
    with foreign(met) as pid:
        run = bench.start()
        assert run.stdout is not None
        said = ""
        while f"process {pid} holds" not in said:
            line = run.stdout.readline()
            assert line, f"it ended: {said}"
            said += line
        assert met in said.splitlines()[-1] and "is not clear" in said.splitlines()[-1]
        wait_for("a run elsewhere", lambda: {one.card for one in bench.attempts()} == set(others), 120)
        time.sleep(3)
        assert met not in {one.card for one in bench.attempts()}
        assert bench.on_card(met) == {pid}
    text = output(run, within_s=200)
    assert run.returncode == 0, said + text
    bench.runs()
    assert Counter(one.state for one in bench.attempts()) == {"measured": RUNS}
    nothing_left(bench.site)


def test_a_worker_killed_leaves_its_card_clear_within_seconds(bench: Bench) -> None:
    """SIGKILL of the worker of every card at once; each costs one attempt, and the sweep goes on."""
    run = bench.start()
    held = bench.all_cards_held()
    for engine in held.values():
        os.kill(parent(engine), signal.SIGKILL)
    begin_s, took_s = time.monotonic(), dict[str, float]()
    while len(took_s) < len(held) and time.monotonic() < begin_s + CLEAR_WITHIN_S:
        for uuid in held.keys() - took_s.keys():
            if bench.look(uuid).clear:
                took_s[uuid] = time.monotonic() - begin_s
    assert took_s.keys() == held.keys(), [bench.look(uuid) for uuid in held]
    assert {state_of(pid) for pid in held.values()} <= {"", "Z"}, "the engines died with their workers"
    print({uuid: f"clear after {seconds:.2f} s" for uuid, seconds in took_s.items()})
    bench.pause.unlink()
    text = output(run, within_s=200)
    assert run.returncode == 0, text
    bench.runs()
    assert Counter(one.state for one in bench.attempts()) == {"measured": RUNS, "lost": len(held)}
    nothing_left(bench.site)
