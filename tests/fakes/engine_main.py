"""A stand-in for an engine: speaks the child protocol and behaves as the variable FAKE_ENGINE says.

Tests copy it as `engine/__main__.py` into a tree of their own. FAKE_ENGINE is a JSON object: `sleep_s` before each
generation (or `sleep_file`, whose content says so), `ids`, `page_ins`, `die` (signal in generation 0), `exit` (code
after the result), `error` (an error line and exit code), `die_last` (a signal in place of that code), `lie` (fields
that replace hello's), `silent` (no result), `spoil` (a line after hello), `exit_line` (one at the end), `log`
(printed), `mark` (append a line to this file at start), `hang` (say nothing), `fault` (at which point, what, and a
file: who makes it acts, so that it happens once), `holds_bytes` (of its card, from before hello on), `wait_while` (a
file: no generation is given as long as it is there).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("--request", type=Path)
    parser.add_argument("--result-fd", type=int)
    parser.add_argument("--control-fd", type=int)
    given = parser.parse_args()
    threading.Thread(target=end_with_parent, args=(given.control_fd,), daemon=True).start()
    request = json.loads(given.request.read_text())
    wish = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    raise SystemExit(act(request, wish, given.result_fd))


def act(request: dict[str, Any], wish: dict[str, Any], fd: int) -> int:
    def say(**line: Any) -> None:
        os.write(fd, (json.dumps(line) + "\n").encode())

    if "mark" in wish:
        with Path(wish["mark"]).open("a") as file:
            file.write(f"{os.getpid()} {sorted(os.environ)}\n")
    if wish.get("hang"):
        time.sleep(60)
    meet(wish, "spawned")
    take_card(wish)
    say(**{**hello(request), **wish.get("lie", {})})
    if "log" in wish:
        print(wish["log"], flush=True)
    if "spoil" in wish:
        os.write(fd, (wish["spoil"] + "\n").encode())
    ids = wish.get("ids", [5, 6, 7])
    for index in range(request["generations"]):
        say(type="progress", phase="generation", done=index, of=request["generations"])
        work(wish)
        if "die" in wish:
            os.kill(os.getpid(), wish["die"])
        say(**generation(index, ids, wish))
        meet(wish, "first tokens")
    if "error" in wish:
        say(type="error", counters={"page_ins": 1}, ids=[5], **wish["error"])
        if "die_last" in wish:
            os.kill(os.getpid(), wish["die_last"])
        return int(wish["error"]["code"])
    if not wish.get("silent"):
        say(**result(request, ids, wish))
        meet(wish, "result")
    if "exit_line" in wish:
        os.write(fd, (wish["exit_line"] + "\n").encode())
    print("fake engine done")
    return int(wish.get("exit", 0))


def take_card(wish: dict[str, Any]) -> None:
    """Be seen on the card, as a real engine is."""
    if "holds_bytes" in wish:
        importlib.import_module("engine.card_holder").hold(wish["holds_bytes"])


def work(wish: dict[str, Any]) -> None:
    """Take time."""
    time.sleep(float(Path(wish["sleep_file"]).read_text()) if "sleep_file" in wish else wish.get("sleep_s", 0))
    while "wait_while" in wish and Path(wish["wait_while"]).exists():
        time.sleep(0.05)


def meet(wish: dict[str, Any], point: str) -> None:
    """The fault of this point, once over all engines of a test."""
    fault = wish.get("fault")
    if fault is None or fault["at"] != point:
        return
    try:
        with Path(fault["mark"]).open("x") as mark:
            mark.write(str(os.getpid()))
    except FileExistsError:
        return
    if fault["do"] == "hang":
        time.sleep(3600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault["do"]])


def hello(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "hello",
        "protocol": 1,
        "pid": os.getpid(),
        "module_path": engine.__file__,
        "version": "0",
        "effective_config": {k: {"value": v, "source": "request"} for k, v in request["config"].items()},
        "device": {
            "kind": "cuda" if request["device"] == "cuda" else "sim",
            "name": "sim-h200",
            "uuid": request["uuid"],
            "driver": "sim 1",
            "granule_bytes": 4096,
        },
        "model": {"path": request["model"], "digest": None},
    }


def generation(index: int, ids: list[int], wish: dict[str, Any]) -> dict[str, Any]:
    decode = counted(ids, wish, 1)
    return {
        "type": "generation",
        "index": index,
        "warmup": False,
        "ids": ids,
        "stop_reason": "length",
        "gaps": [1.0] * len(ids),
        "counters": {"load": {}, "warm": {}, "prefill": {}, "decode": decode},
        "prefill_ns": 1000,
        "step_ns": [1000] * (len(ids) - 1),
        "from_a_newer_engine": 1,
    }


def counted(ids: list[int], wish: dict[str, Any], generations: int) -> dict[str, int]:
    """Counters that add up: over generations, and in each equation that a judge closes by itself."""
    page_ins, htod = wish.get("page_ins", 4) * generations, 400 * generations
    never: tuple[str, ...] = (
        "hits",
        "hit_bytes",
        "retained_page_ins",
        "retained_bytes",
        "staged_page_ins",
        "staged_bytes",
        "evictions",
    )
    never += ("ref_underflows", "fallbacks", "vmm_calls_steady", "alloc_calls_steady", "loaded_bytes")
    faults = ("unaccounted_bytes", "quarantined_bytes", "oversubscribed_bytes")
    gauges = {"segments": 1, "step_kernels": 9, "peak_committed_bytes": 4096, "peak_resident_bytes": 400}
    return {
        **dict.fromkeys((*never, *faults), 0),
        **gauges,
        "page_ins": page_ins,
        "bypassed_page_ins": page_ins,
        "touches": page_ins,
        "htod_bytes": htod,
        "bypassed_page_in_bytes": htod,
        "device_htod_bytes": htod,
        "host_syncs": len(ids) * generations,
        "emitted_tokens": len(ids) * generations,
    }


def result(request: dict[str, Any], ids: list[int], wish: dict[str, Any]) -> dict[str, Any]:
    runs = request["generations"]
    return {
        "type": "result",
        "counters": counted(ids, wish, runs),
        "facts": {"weight_bytes": 1000, "measured_generations": runs, "measured_tokens": runs * len(ids)},
        "equations": [
            {"name": "W1", "text": "hits + page_ins == touches", "relation": "==", "lhs": 1, "rhs": 1, "holds": True}
        ],
        "seams": [],
        "keys": [{"key": "w0", "nbytes": 100, "hits": 0, "retained": 0, "bypassed": 4 * runs, "evicted": 0}],
        "peak_rss_bytes": 10_000_000,
    }


def end_with_parent(fd: int) -> None:
    os.read(fd, 1)
    os._exit(143)


if __name__ == "__main__":
    main()
