"""onnx-genai's `profile_native` as an arm's program: its `name: k=v` lines, as it prints them with `--steady`.

A line's name says which counters of ours its keys are; what it prints as `n/a`, or not at all, is Missing with that
reason. Per-run lines give the time to the first id and one time for the steps behind it, which is shared out evenly
over them; the ids are printed once, since the program itself refuses runs that differ. Warm-ups are not printed, so the
sweep asks for none and the command may. Counters are sums over the measured runs, the peak that of the process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from jobs.adapters.command_reads import Mapped, Unread
from jobs.excerpt import first_words

NAME = "profile_native"
LINES: Mapping[str, Mapping[str, str]] = {
    "weight_offload_cache": {
        name: name
        for name in ("page_ins", "hits", "hit_bytes", "evictions", "bypassed_page_ins", "bypassed_page_in_bytes")
    },
    "weight_offload_amortization": {"emitted_tokens": "emitted_tokens"},
    "weight_offload_physical": {name: name for name in ("htod_bytes", "mapped_physical_bytes", "physical_owned_bytes")},
    "cuda_graph_measured": {name: name for name in ("captures", "replays", "fallbacks", "invalidations")},
    "vmm_arena": {
        "peak_committed_physical_bytes": "peak_committed_bytes",
        "ref_underflows": "ref_underflows",
        "unaccounted_committed_bytes": "unaccounted_bytes",
    },
    "resource_vram": {"oversubscribed_bytes": "oversubscribed_bytes"},
}
"""Line -> its key -> the counter of ours that it is."""
COUNTERS = ("bypassed_page_ins", "emitted_tokens", "evictions", "hits", "htod_bytes", "page_ins")
"""Those that a run without them must answer for: it prints them wherever weights are on a card."""
_RUN = re.compile(
    r"^steady_run \d+: prefill=(?P<prefill>[0-9.]+) ms decode_tokens=(?P<steps>\d+) decode_wall=(?P<wall>[0-9.]+) ms",
    re.MULTILINE,
)
_IDS = re.compile(r"^generated_token_ids: \[([0-9, ]*)\]$", re.MULTILINE)


def read(output: bytes, device: Mapping[str, str]) -> Mapped:
    """The hello, generations and result that an output amounts to. Raises Unread for one that is not its output."""
    text = output.decode("utf-8", "replace")
    ids = [int(one) for one in _one(_IDS, text, "generated_token_ids").replace(",", " ").split()]
    if contended := re.search(r"^gpu_contention_check: CONTENDED.*$", text, re.MULTILINE):
        raise Unread(first_words(contended.group(0), 200))
    made = Mapped([{"type": "hello", "protocol": 1, "effective_config": {}, "device": dict(device)}])
    made.lines += [_generation(index, ids, run) for index, run in enumerate(_RUN.finditer(text))]
    if len(made.lines) == 1:
        raise Unread("no steady_run line: run it with --steady")
    counters: dict[str, int] = {}
    for line, keys in LINES.items():
        told = _pairs(text, line)
        for key, counter in keys.items():
            value = told.get(key)
            if value is not None and value.isdecimal():
                counters[counter] = int(value)
            else:
                made.absent[counter] = f"{line} prints {value}" if value else f"no {key} in a line {line}"
    made.lines.append({"type": "result", "counters": counters})
    return made


def _generation(index: int, ids: list[int], run: re.Match[str]) -> dict[str, Any]:
    """A run's line; without times for its steps where it tells of fewer of them than there are (--decode-skip)."""
    wall_ns, steps = round(Fraction(run["wall"]) * 10**6), int(run["steps"])
    shared = [wall_ns * (n + 1) // steps - wall_ns * n // steps for n in range(steps)] if steps == len(ids) - 1 else []
    line = {"type": "generation", "index": index, "warmup": False, "ids": ids, "stop_reason": "length"}
    return {**line, "prefill_ns": round(Fraction(run["prefill"]) * 10**6), "step_ns": shared}


def _pairs(text: str, name: str) -> dict[str, str]:
    """The keys of the last line of that name; none where there is no such line."""
    lines = re.findall(rf"^{name}: (.*)$", text, re.MULTILINE)
    return dict(re.findall(r"(\w+)=(\S+)", lines[-1])) if lines else {}


def _one(pattern: re.Pattern[str], text: str, word: str) -> str:
    found = pattern.findall(text)
    if len(found) != 1:
        raise Unread(f"{word} is found {len(found)} times in the output, and not once")
    return str(found[0])
