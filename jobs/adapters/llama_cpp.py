"""llama.cpp as an engine: `llama-server` gives the ids, and `llama-bench`, where it is named, its own time beside them.

The weights are a GGUF file, so that they need not be those of the other arms: that they are the same is what parity
shows. The server tells one time for a prompt and one for all that follows; the latter is shared out evenly over the
steps, so that no single one of them is a measurement. Field names are those of llama.cpp's tools/server/README.md and
tools/llama-bench/README.md.
"""

from __future__ import annotations

import atexit
import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any

from engine.errors import BadRequest, CannotLoad, UnsupportedModel
from jobs.adapters.child import bound
from jobs.adapters.peer import Asked, Logits, Made, Option, Peer, Scalar, main

INSTALL = "build llama.cpp with CUDA, and put llama-server and llama-bench on PATH"
LOADS_IN_S = 240.0
LOOKS_EACH_S = 0.05
ANSWERS_IN_S = 3600.0
ALL_LAYERS = 999


class LlamaServer:
    """A `llama-server` of its own, on a port that was free; it ends with this process.

    Raises CannotLoad where it is not there, ends, or does not come up.
    """

    def __init__(self, program: str, gguf: str, positions: int, layers: int, arguments: str) -> None:
        path = found(program)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        words = ["-m", gguf, "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["-c", str(positions), "-np", "1", "-ngl", str(layers), *shlex.split(arguments)]
        self.process = subprocess.Popen(bound([path, *words]), stdin=subprocess.DEVNULL)
        atexit.register(self.close)
        deadline_s = time.monotonic() + LOADS_IN_S
        while not self._is_up():
            if (code := self.process.poll()) is not None:
                raise CannotLoad(f"{program} ended with {code}", "see the end of its log")
            if time.monotonic() > deadline_s:
                raise CannotLoad(f"{program} is not up after {LOADS_IN_S:g} s", "see the end of its log")
            time.sleep(LOOKS_EACH_S)

    def completed(self, prompt: Sequence[int], tokens: int, *, ignore_eos: bool) -> dict[str, Any]:
        """The answer to one completion: greedy, the whole prompt read anew. Raises UnsupportedModel for an error."""
        asked = {"prompt": list(prompt), "n_predict": tokens, "ignore_eos": ignore_eos, "stream": False}
        asked |= {"temperature": 0, "top_k": 1, "cache_prompt": False, "return_tokens": True}
        return self._answer("POST", "/completion", json.dumps(asked))

    def build(self) -> str:
        """The build that the server says it is."""
        return str(self._answer("GET", "/props").get("build_info", "of unknown build"))

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()

    def _answer(self, method: str, path: str, body: str | None = None) -> dict[str, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=ANSWERS_IN_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            connection.close()
        if answer.status != 200:
            raise UnsupportedModel(f"llama-server answers {answer.status} to {path}: {text[:200]}")
        told: dict[str, Any] = json.loads(text)
        return told

    def _is_up(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


class LlamaDecoder:
    """A model in a server."""

    def __init__(self, server: LlamaServer, on: str, settings: Mapping[str, Scalar], facts: Mapping[str, Any]) -> None:
        self.server, self.on, self.settings, self.facts = server, on, settings, facts

    def generate(self, prompt: Sequence[int], tokens: int, *, ignore_eos: bool = True) -> Made:
        """One generation, by the server's clock."""
        told = self.server.completed(prompt, tokens, ignore_eos=ignore_eos)
        return made_of(told)

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> Logits:
        """Not told by the server."""
        raise UnsupportedModel("llama-server tells no logits of given ids")


def made_of(told: Mapping[str, Any]) -> Made:
    """A generation from a completion's answer. Raises UnsupportedModel for one without ids or times."""
    try:
        ids, times, why = [int(one) for one in told["tokens"]], told["timings"], told["stop_type"]
        prefill_ns, rest_ns = (round(times[name] * 1e6) for name in ("prompt_ms", "predicted_ms"))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"llama-server's answer has no {error}", "take a build from 2025 on") from error
    if not ids:
        raise UnsupportedModel("llama-server gave no id", "take a build that knows return_tokens")
    steps = max(1, len(ids) - 1)
    shared = [rest_ns * (n + 1) // steps - rest_ns * n // steps for n in range(len(ids) - 1)]
    return Made(ids, prefill_ns, shared, why == "eos")


def bench_facts(output: str) -> dict[str, Any]:
    """llama-bench's own figures of generation: the median of its samples, in ns a token, its build and backend."""
    rows = [row for row in json.loads(output) if row["n_gen"] and not row["n_prompt"]]
    (row,) = rows
    return {
        "bench_ns_per_token": median(row["samples_ns"]) / row["n_gen"],
        "bench_build": f"{row['build_commit']} ({row['build_number']})",
        "bench_backends": row["backends"],
    }


def found(program: str) -> str:
    """A program's path. Raises CannotLoad where there is none."""
    path = shutil.which(program)
    if path is None:
        raise CannotLoad(f"no program {program}", INSTALL)
    return path


def opened(asked: Asked) -> LlamaDecoder:
    """The server that an arm asks for, with llama-bench's figures where it names that."""
    options = asked.options
    gguf = Path(options["gguf"] or asked.request.model).expanduser()
    if not gguf.is_file():
        raise BadRequest(f"{gguf} is no GGUF file", "options: {gguf: /path/of/the/same/weights.gguf}")
    layers = ALL_LAYERS if asked.on_card else 0
    facts: dict[str, Any] = {"gguf_bytes": gguf.stat().st_size}
    if options["bench"]:
        words = ["-m", str(gguf), "-p", "0", "-n", str(asked.request.tokens), "-ngl", str(layers), "-o", "json"]
        told = subprocess.run([found(options["bench"]), *words], check=True, capture_output=True, text=True)
        facts |= bench_facts(told.stdout)
    server = LlamaServer(options["server"], str(gguf), asked.positions, layers, options["arguments"])
    settings = {"llama.cpp.gguf": str(gguf), "llama.cpp.version": server.build()}
    return LlamaDecoder(server, "cuda" if layers else "cpu", settings, facts)


PEER = Peer(
    name="llama.cpp",
    module="jobs.adapters.llama_cpp",
    open=opened,
    distributions=(),
    blind="llama.cpp does not tell what it copies, allocates or launches",
    any_model=True,
    forces=False,
    options={
        "gguf": Option(None, "the GGUF file; without one the model of the sweep, which then is one"),
        "server": Option("llama-server", "the server's program"),
        "bench": Option("", "llama-bench's program, to have its own figure beside; empty: none"),
        "arguments": Option("", "further arguments of the server, as in a shell"),
    },
)

if __name__ == "__main__":
    sys.exit(main(PEER))
