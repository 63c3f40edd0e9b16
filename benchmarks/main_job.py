"""How long the main job takes and how much memory all its processes need together.

Runs `assay run` on a sweep into a scratch store and adds up, every so often, the proportional set size of the command
and of all that came of it: a page that several processes share counts once. Ray's daemons that lost their parent are
found by the scratch folder in their command line or the mark in their environment. Models and caches are the user's
own, so a first run also builds what is missing.

    python -m benchmarks.main_job [--sweep sweeps/smollm2-residency.yaml] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.sim_decode import host_facts
from jobs.provenance import harness_digest, own_root

PERIOD_S = 0.25
MARK = "ASSAY_BENCHMARK"


def main() -> int:
    """Run, print the record, and write it where asked; the exit code is the job's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=Path, default=Path("sweeps/smollm2-residency.yaml"))
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    record = measure(arguments.sweep.absolute())
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return int(record["exit_code"])


def measure(sweep: Path) -> dict[str, Any]:
    """The record of one run: seconds, peak proportional set size in bytes and what made it up, exit code, host."""
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="ab-") as folder:
        command = [sys.executable, "-P", "-m", "orchestrator.cli", "run", str(sweep)]
        command += ["--store", f"{folder}/store.db", "--out", f"{folder}/report"]
        environ = {**os.environ, "PYTHONPATH": str(own_root()), "TMPDIR": folder, MARK: folder}
        begin_s = time.monotonic()
        with Path(folder, "log").open("wb") as log:
            job = subprocess.Popen(command, cwd=sweep.parent.parent, env=environ, stdout=log, stderr=log)
            peak: dict[int, int] = {}
            samples = 0
            while job.poll() is None:
                now = {pid: pss_bytes(pid) for pid in processes(job.pid, folder)}
                peak, samples = max(peak, now, key=lambda sizes: sum(sizes.values())), samples + 1
                time.sleep(PERIOD_S)
        wall_s = time.monotonic() - begin_s
        tail = Path(folder, "log").read_text(errors="replace").splitlines()[-3:] if job.returncode else []
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "sweep": sweep.name,
        "harness_digest": harness_digest(own_root()),
        "exit_code": job.returncode,
        "wall_s": round(wall_s, 2),
        "peak_pss_bytes": sum(peak.values()),
        "processes_at_peak": len(peak),
        "largest_at_peak_bytes": sorted(peak.values(), reverse=True)[:8],
        "samples": samples,
        "period_s": PERIOD_S,
        "host": host_facts(),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "log_tail": tail,
    }


def processes(command: int, folder: str) -> set[int]:
    """PIDs of the command, of what bears the scratch folder's name, and of all their descendants."""
    parents = dict(_parents())
    found = {command} | {pid for pid in parents if pid != os.getpid() and _bears(pid, folder.encode())}
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue


def _bears(pid: int, folder: bytes) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return folder in command or MARK.encode() + b"=" + folder in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
