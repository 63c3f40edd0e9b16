"""How long `assay serve` takes for its pages on a store of more than a million readings, and in how much memory.

One sweep has 10,000 cells of four runs, whose records are written once as a worker's are and copied by SQL to all
others, and a verdict with a cell's own figures in each; beside it stand small judged sweeps and open ones. The command
is started as a person starts it and asked over HTTP: each address once, then several times, then by several readers at
once. On SQLite, and on PostgreSQL with the tests' own server, as on any machine where the development environment is.

    python -m benchmarks.serve_store [--cells N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import create_engine, text

from benchmarks.judge_cells import fill, judged, sweep
from benchmarks.sim_decode import host_facts
from benchmarks.store_status import count, postgresql, sqlite
from jobs.provenance import own_root
from jobs.store import Store
from jobs.store.connect import parse_url
from jobs.verdict import Finding, Verdict
from tests.unit.store_sweeps import submitted

CELLS, SMALL, OPEN = 10_000, 300, 20
TIMES, READERS = 15, 8
STARTED = re.compile(r"serving .* at (http://\S+)")


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    parser.add_argument("--only", choices=("sqlite", "postgresql"))
    arguments = parser.parse_args()
    rows = []
    for place in (sqlite, postgresql):
        if arguments.only in (None, place.__name__):
            with place() as url:
                rows.append({"store": place.__name__, **measure(url, arguments.cells)})
    record = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "host": host_facts()}
    document = json.dumps({**record, "load_average": os.getloadavg(), "rows": rows}, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


def measure(url: str, cells: int) -> dict[str, Any]:
    """What is in the store, and what each address took."""
    fill(url, cells)
    large, small = judge_all(url, cells)
    engine = create_engine(parse_url(url))
    with engine.begin() as connection:
        connection.execute(text("ANALYZE"))  # as a server does by itself
    engine.dispose()
    held = {name: count(url, name) for name in ("value", "attempt", "sweep", "scenario", "cell_verdict", "finding")}
    return {"rows": held, **served(url, large, small, cells)}


def judge_all(url: str, cells: int) -> tuple[str, str]:
    """Verdicts as a judge writes them, one cell in ten worse, of the large sweep and of small ones; both kinds' ids."""
    one = judged(sweep(1))
    with Store.open(url, lambda: datetime.now(UTC)) as store:
        [row] = store.sweeps()
        large = of_cells(one, row.id, [f"cell{number:05}" for number in range(cells)])
        store.write_verdict(row.id, large, large.input_digest)
        for number in range(SMALL + OPEN):
            small = submitted(store, f"nightly {number}", cells=4, key=str(number))
            if number < SMALL:
                verdict = of_cells(one, small, [f"cell{place}" for place in range(4)])
                store.write_verdict(small, verdict, verdict.input_digest)
        return row.id, small


def of_cells(one: Verdict, sweep_id: str, names: list[str]) -> Verdict:
    """The verdict of one cell as that of many."""
    [cell] = one.cells
    made, findings = [], []
    for number, name in enumerate(names):
        worse = number % 10 == 3
        told = {"outcome": "REGRESSED", "exit_code": 1} if worse else {}
        made.append(cell.model_copy(update={"cell": name, **told}))
        if worse:
            message = "htod_bytes: 2 % more"
            regressed = {"outcome": "REGRESSED", "cell": name, "arm": "head", "exit_code": 1, "gate": "exact"}
            findings.append(Finding.model_validate({**regressed, "message": message}))
    told = {"outcome": "REGRESSED", "exit_code": 1} if findings else {}
    rows = {"cells": tuple(made), "findings": tuple(findings), "cells_expected": len(made), "cells_judged": len(made)}
    return one.model_copy(update={"stamp": one.stamp.model_copy(update={"sweep_id": sweep_id}), **rows, **told})


def addresses(large: str, small: str, cells: int) -> dict[str, str]:
    """What is asked for, by name."""
    name, last = f"cell{cells // 2 + 3:05}", cells // 50
    at, api = f"/sweeps/{large}", f"/api/v1/sweeps/{large}"
    return {
        "list": "/",
        "list, last page": "/?page=13",
        "list by verdict": "/?verdict=REGRESSED",
        "list by scenario": f"/?scenario={name}",
        "list by model that is nowhere": "/?model=nowhere",
        "list by all": "/?state=judged&verdict=REGRESSED&model=smol&scenario=cell&text=resid",
        "large sweep": at,
        "large sweep, cells": f"{at}/cells",
        "large sweep, last cells": f"{at}/cells?page={last}",
        "large sweep, cells by text": f"{at}/cells?text={name[4:]}",
        "large sweep, findings": f"{at}/findings?page=2",
        "large sweep, progress": f"{at}/progress?page={last}",
        "cell": f"{at}/cell?name={name}",
        "scenario": f"{at}/scenario?name={name}",
        "open sweep": f"/sweeps/{small}",
        "API: list": "/api/v1/sweeps",
        "API: large sweep": api,
        "API: cells": f"{api}/cells?size=20",
        "API: cell": f"{api}/cell?name={name}",
    }


def served(url: str, large: str, small: str, cells: int) -> dict[str, Any]:
    """Milliseconds of each address, first and then the middle of several; the server's memory and its end."""
    command = [sys.executable, "-P", "-m", "orchestrator.cli", "serve", "--store", url, "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": str(own_root()), "OMP_NUM_THREADS": "1"}
    began_s = time.perf_counter()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        started = STARTED.match(server.stdout.readline())
        assert started is not None, "the server did not start"
        try:
            with httpx.Client(base_url=started[1].rstrip("/"), timeout=60) as client:
                client.get("/assets/report.css").raise_for_status()
                start_s = time.perf_counter() - began_s
                idle = memory_bytes(server.pid, "VmRSS")
                asked = {
                    name: asked_for(client, path, server.pid) for name, path in addresses(large, small, cells).items()
                }
                busy_ms = together(started[1].rstrip("/"), ["/", f"/sweeps/{large}"])
            peak = memory_bytes(server.pid, "VmHWM")
        finally:
            server.send_signal(signal.SIGTERM)
            began_s = time.perf_counter()
            try:
                code = server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                raise
        end_s = time.perf_counter() - began_s
    return {
        "start_s": round(start_s, 2),
        "idle_rss_bytes": idle,
        "peak_rss_bytes": peak,
        "addresses": asked,
        f"list and sweep, {READERS} readers at once, slowest": busy_ms,
        "end_s": round(end_s, 2),
        "exit_code": code,
    }


def asked_for(client: httpx.Client, path: str, server: int) -> dict[str, Any]:
    """Milliseconds and bytes of one address, and what of it the server worked: the same on a host that others use."""
    took, process = [], psutil.Process(server)
    for _ in range(1 + TIMES):
        began_s, worked_s = time.perf_counter(), sum(process.cpu_times()[:2])
        answer = client.get(path).raise_for_status()
        took.append((time.perf_counter() - began_s, sum(process.cpu_times()[:2]) - worked_s))
    (first, _), *then = took
    middle = sorted(wall for wall, _ in then)[TIMES // 2]
    told = {"first_ms": first, "ms": middle, "cpu_ms": sum(cpu for _, cpu in then) / TIMES}
    return {name: round(seconds * 1e3, 1) for name, seconds in told.items()} | {"bytes": len(answer.content)}


def together(base: str, paths: list[str]) -> float:
    """Milliseconds of the slowest of several readers that ask at once, each for each address several times."""

    def read(_reader: int) -> float:
        slowest = 0.0
        with httpx.Client(base_url=base, timeout=60) as client:
            for path in paths * 5:
                began_s = time.perf_counter()
                client.get(path).raise_for_status()
                slowest = max(slowest, time.perf_counter() - began_s)
        return slowest

    with ThreadPoolExecutor(READERS) as readers:
        return round(max(readers.map(read, range(READERS))) * 1e3, 1)


def memory_bytes(pid: int, name: str) -> int:
    """A line of /proc/PID/status."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
