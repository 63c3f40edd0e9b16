"""How long judging ten thousand cells takes, and in how much memory: the judge alone, and what `assay judge` adds.

A cell is base and head in one block, four runs, each with one generation of 16 tokens, 28 counters and the metrics
made of them: 42 rows of metrics are compared. The runs of one cell are written to a store as a worker's are, and copied
there by SQL to all others. Each step is measured in a process of its own, so that none sits on another's memory:
`judge` has the whole document before it and is timed alone; `read` takes it from the store; `as read` judges cell by
cell as the command does, and says how much of that was reading; `write` keeps the verdict;
`assay judge` is the command, from its start to its exit, first without a verdict in the store and then with one.

    python -m benchmarks.judge_cells [--cells N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Table, create_engine, text

from benchmarks.sim_decode import host_facts
from jobs.cells_read import CellsRead
from jobs.judge import Asked, judge, judge_read
from jobs.model import CellPlan, JudgeInput, RunFact, RunSettings
from jobs.provenance import own_root
from jobs.store import Store
from jobs.store.connect import parse_url
from jobs.tables import attempt, certificate, key_bytes, sample, seam, token_stream, value
from jobs.verdict import Verdict
from tests.unit.conftest import IDS, Documents
from tests.unit.store_sweeps import measured_sweep

CELLS, TOKENS, AT_ONCE = 10_000, 16, 100
PARTS = (token_stream, sample, seam, key_bytes, certificate, value)
"""Tables of what an attempt measured."""


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    parser.add_argument("--step", choices=("judge", "read", "as read", "write"), help="one step, in this process")
    parser.add_argument("--url", default="", help="the store of that step")
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(step(arguments.step, arguments.cells, arguments.url)))
        return
    with tempfile.TemporaryDirectory(prefix="ab-") as folder:
        url = f"sqlite:///{folder}/store.db"
        fill(url, arguments.cells)
        rows = [alone(name, arguments.cells, url) for name in ("judge", "read", "as read")]
        rows += [command(url, "assay judge", "judge"), command(url, "assay judge, again", "judge")]
        rows.append(alone("write", arguments.cells, url))
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host_facts(),
        "load_average": os.getloadavg(),
        "cells": arguments.cells,
        "runs": 4 * arguments.cells,
        "rows": rows,
    }
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


def sweep(cells: int) -> JudgeInput:
    """A sweep of cells that are alike in all but their names, ids of runs and times; base under lru, head stable."""
    builder = Documents()
    settings = RunSettings(tokens=TOKENS, generations=1, ignore_eos=True)
    short = {"ids": lambda _run, _generation: IDS[:TOKENS]}
    one = builder.sweep(base=builder.arm(**short), head=builder.stable_arm(**short), cell={"settings": settings})
    arms = tuple(arm for arm in one.manifest.arms if arm.role != "null")
    [cell] = one.cells
    kept = [run for run in cell.runs if run.arm != "null"]
    runs = tuple(run.model_copy(update={"position": position}) for position, run in enumerate(kept))
    plan = cell.plan.model_copy(update={"arms": ("base", "head")})
    raw = cell.model_copy(update={"plan": plan, "runs": runs}).model_dump_json()
    found = tuple(_named(type(cell).model_validate_json(raw), number) for number in range(cells))
    manifest = one.manifest.model_copy(update={"arms": arms, "cells": tuple(one.plan for one in found)})
    return one.model_copy(update={"manifest": manifest, "manifest_digest": manifest.digest(), "cells": found})


def _named(cell: Any, number: int) -> Any:
    plan: CellPlan = cell.plan.model_copy(update={"cell": f"cell{number:05}/{cell.plan.cell}"})
    return cell.model_copy(update={"plan": plan, "runs": tuple(_renamed(run, number) for run in cell.runs)})


def _renamed(run: RunFact, number: int) -> RunFact:
    assert run.record is not None
    own = {"run_id": f"{run.run_id}_{number}"}
    return run.model_copy(update={**own, "record": run.record.model_copy(update=own)})


def step(name: str, cells: int, url: str) -> dict[str, Any]:
    """One step: seconds of wall and of this process, and the most memory that it ever held."""
    if name == "judge":
        doc = sweep(cells)
        return {"step": name, **timed(lambda: judged(doc))}
    store = Store.open(url, lambda: datetime.now(UTC))
    [row] = store.sweeps()
    if name == "read":
        return {"step": name, **timed(lambda: store.judge_input(row.id))}
    if name == "as read":
        took_s: list[float] = []
        done = timed(lambda: store.judged(row.id, lambda read: told(judge_read(_clocked(read, took_s)))))
        return {"step": name, **done, "of_that_reading_cpu_s": round(sum(took_s), 2)}
    verdict = store.judged(row.id, lambda read: told(judge_read(read)))
    return {"step": name, **timed(lambda: store.write_verdict(row.id, verdict, verdict.input_digest))}


def judged(doc: JudgeInput) -> Verdict:
    """The verdict on a document."""
    return told(judge(doc))


def _clocked(read: CellsRead, took_s: list[float]) -> CellsRead:
    """The same, with what each cell's reading took this process."""

    def cells() -> Iterator[Any]:
        while True:
            began_s = time.process_time()
            cell = next(read.cells, None)
            took_s.append(time.process_time() - began_s)
            if cell is None:
                return
            yield cell

    return replace(read, cells=cells())


def told(verdict: Verdict | tuple[Asked, ...]) -> Verdict:
    """The verdict, which must be the one that is meant."""
    assert isinstance(verdict, Verdict) and verdict.outcome == "IMPROVED", verdict
    assert len(verdict.cells[0].exact) + len(verdict.cells[0].time) >= 40
    return verdict


def timed(action: Any) -> dict[str, Any]:
    """Seconds of an action, and bytes of this process before it and at most."""
    before_bytes, began_s, began_cpu_s = rss_bytes(), time.perf_counter(), time.process_time()
    kept = action()
    took = {"wall_s": round(time.perf_counter() - began_s, 2), "cpu_s": round(time.process_time() - began_cpu_s, 2)}
    del kept
    return {**took, "rss_before_bytes": before_bytes, "peak_rss_bytes": rss_bytes()}


def rss_bytes() -> int:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(name: str, cells: int, url: str) -> dict[str, Any]:
    """A step in a process of its own."""
    words = [sys.executable, "-P", "-m", "benchmarks.judge_cells", "--step", name, "--cells", str(cells), "--url", url]
    done = subprocess.run(words, check=True, env=_environ(), stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def command(url: str, step: str, *words: str) -> dict[str, Any]:
    """A command of the only sweep, from its start to its exit; `words`: its name and options."""
    store = Store.open(url, lambda: datetime.now(UTC))
    [row] = store.sweeps()
    store.close()
    verb, *options = words
    argv = [sys.executable, "-P", "-m", "orchestrator.cli", verb, row.id, *options, "--store", url]
    began_s = time.perf_counter()
    child = subprocess.Popen(argv, env=_environ(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - began_s
    return {
        "step": step,
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(own_root()), "OMP_NUM_THREADS": "1"}


# ---- the store ---------------------------------------------------------------------------------------------------


def fill(url: str, cells: int) -> None:
    """A sweep whose runs are all measured: those of its first cell as a worker brings them, the others copied."""
    doc = sweep(1)
    plan = doc.cells[0].plan
    named = tuple(plan.model_copy(update={"cell": f"cell{number:05}"}) for number in range(cells))
    manifest = doc.manifest.model_copy(update={"cells": named})
    first = doc.cells[0].model_copy(update={"plan": named[0]})
    with Store.open(url, lambda: datetime.now(UTC)) as store:
        sweep_id = measured_sweep(store, doc.model_copy(update={"manifest": manifest, "cells": (first,)}))
        [block_id] = {run.block_id for run in store.judge_input(sweep_id).cells[0].runs}
    engine = create_engine(parse_url(url))
    for statement in copies(block_id):
        with engine.begin() as connection:
            connection.execute(text(statement))
    engine.dispose()


def copies(block_id: str) -> Iterator[str]:
    """Statements that give every run what the run of the same place in one block was given."""
    others = [column.name for column in attempt.columns if column.name not in ("id", "run_id")]
    theirs = (
        f"FROM run r JOIN run t ON t.block_id = '{block_id}' AND t.position = r.position AND r.block_id <> t.block_id"
        " JOIN attempt a ON a.run_id = t.id"
    )
    yield (
        f"INSERT INTO attempt (id, run_id, {', '.join(others)})"
        f" SELECT 'att_' || substr(r.id, 5), r.id, {', '.join(f'a.{name}' for name in others)} {theirs}"
    )
    for table in PARTS:
        yield _copy(table, theirs)
    yield "UPDATE run SET state = 'complete'"
    yield "UPDATE block SET runs_left = 0"
    yield "ANALYZE"


def _copy(table: Table, theirs: str) -> str:
    names = [column.name for column in table.columns if column.name != "attempt_id"]
    return (
        f"INSERT INTO {table.name} (attempt_id, {', '.join(names)})"
        f" SELECT 'att_' || substr(r.id, 5), {', '.join(f'p.{name}' for name in names)} {theirs}"
        f" JOIN {table.name} p ON p.attempt_id = a.id"
    )


if __name__ == "__main__":
    main()
