"""A third party's engine for the adapter `command`: honest, but for what the file `lie.json` beside it says.

`lie.json` is an object: `hello`, `generation`, `result` (fields that replace or, being null, remove those of the line),
`at` (the generation that is changed; all without it), `counters` (the same for the counters), `lines` (raw text in the
place of a line, by "hello", "0", "1", ..., "result", or "end"), `swap` (generations in the other order), `exit`,
`sleep_s`, `last_word` (SIGTERM ends its sleep alone, and it gives a result all the same), `meddle` (change other arms'
trees), `bomb` (so many empty lists on a line), `print` (bytes on standard output, hexadecimal), `fork` (leave a process
behind), `write` (a file in its own tree), `kill` (a signal).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = int(os.environ["ASSAY_TOKENS"])
GENERATIONS = int(os.environ["ASSAY_GENERATIONS"])
WARMUPS = int(os.environ["ASSAY_WARMUPS"])
IDS = [(7 * (index + 1) * sum(map(int, os.environ["ASSAY_PROMPT_IDS"].split()))) % 500 for index in range(TOKENS)]
STEPS = GENERATIONS * TOKENS
KEYS, KEY_BYTES = 6, 4096


def counted() -> dict[str, int]:
    """Six keys a step, two of which stay: what a paging engine counts of its measured generations."""
    hits, page_ins = 2 * STEPS, 4 * STEPS
    return {
        "touches": KEYS * STEPS,
        "hits": hits,
        "hit_bytes": hits * KEY_BYTES,
        "page_ins": page_ins,
        "retained_page_ins": 0,
        "retained_bytes": 0,
        "bypassed_page_ins": page_ins,
        "bypassed_page_in_bytes": page_ins * KEY_BYTES,
        "staged_page_ins": 0,
        "staged_bytes": 0,
        "htod_bytes": page_ins * KEY_BYTES,
        "device_htod_bytes": page_ins * KEY_BYTES,
        "segments": 1,
        "captures": 1,
        "replays": GENERATIONS * (TOKENS - 1) - 1,
        "emitted_tokens": STEPS,
    }


def changed(line: dict[str, Any], by: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**line, **by}.items() if value is not None}


def woken(*_signal: Any) -> None:
    raise InterruptedError


def main() -> int:
    lie = json.loads(Path(__file__).with_name("lie.json").read_text())
    out = open(os.environ["ASSAY_RESULT"], "wb", buffering=0)  # noqa: PTH123, SIM115 - a pipe, held to the end

    def say(place: str, line: dict[str, Any]) -> None:
        raw = lie.get("lines", {}).get(place)
        out.write((json.dumps(line) + "\n").encode() if raw is None else bytes(raw, "latin-1"))

    if "write" in lie:
        Path(lie["write"]).write_text("what it says next time")
    for other in Path.cwd().parents[1].glob("*/tree/harness.py") if "meddle" in lie else ():
        if other.parent != Path.cwd():
            other.write_text(other.read_text() + "\n")
    if "last_word" in lie:
        signal.signal(signal.SIGTERM, woken)
    if "fork" in lie:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    device = {"uuid": os.environ["ASSAY_CARD"], "name": "third-party", "driver": lie.get("driver", "1")}
    say("hello", changed({"type": "hello", "protocol": 1, "device": device}, lie.get("hello", {})))
    sys.stdout.buffer.write(bytes.fromhex(lie.get("print", "")))
    with contextlib.suppress(InterruptedError):
        time.sleep(lie.get("sleep_s", 0))
    if "bomb" in lie:
        out.write(b'{"type": "progress", "a": [' + b"[]," * lie["bomb"] + b"[]]}\n")
    if "kill" in lie:
        os.kill(os.getpid(), lie["kill"])
    order = [*range(WARMUPS + GENERATIONS)]
    for index in reversed(order) if lie.get("swap") else order:
        line = {"type": "generation", "index": index, "warmup": index < WARMUPS, "ids": IDS, "stop_reason": "length"}
        line |= {"gaps": [1.0] * TOKENS, "prefill_ns": 3000, "step_ns": [1000] * (TOKENS - 1)}
        by = lie.get("generation", {}) if lie.get("at", index) == index else {}
        say(str(index), changed(line, by))
    counters = changed(counted(), lie.get("counters", {}))
    say("result", changed({"type": "result", "counters": counters}, lie.get("result", {})))
    if "end" in lie.get("lines", {}):
        say("end", {})
    return int(lie.get("exit", 0))


if __name__ == "__main__":
    raise SystemExit(main())
