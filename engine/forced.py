"""Teacher forcing: given ids go in, logits come out; the prompt in one call, each further id alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.bind import lower
from engine.config import RunRequest
from engine.counters import Tally
from engine.errors import BadRequest, NonFiniteLogits
from engine.graph import DecoderInfo, Graph
from engine.run import close, make_device, set_up

Logits = NDArray[np.float32]


def force(graph: Graph, request: RunRequest, forced: Sequence[int], *, wide: bool = False) -> Logits:
    """Logits after the prompt's rows, then after each forced id: float32 [rows, vocabulary].

    A head that keeps one row a call gives the prompt's last row alone. `wide` keeps the KV cache in float32 where it is
    of a half type; everything else is float32 as it is. `request.tokens` is one more than the forced ids, so that
    addresses and budget are those of a run that emits as many. Raises NonFiniteLogits.
    """
    assert request.tokens == len(forced) + 1, (request.tokens, len(forced))
    graph = _widened(graph) if wide else graph
    prompt = request.prompt_ids
    target = request.config.target or "plain"
    plans = {n: lower(graph, n, all_logits=n > 1, target=target) for n in (1, len(prompt))}
    setup = set_up(request, make_device(request), graph, plans, Tally())
    setup.decoder.reset()
    setup.decoder.prefill([prompt], len(prompt))
    rows = [setup.decoder.logits(len(prompt))]
    for token in forced:
        setup.decoder.feed([token])
        setup.decoder.step()
        rows.append(setup.decoder.logits(1))
    close(setup, {})
    made = np.concatenate(rows)
    bad = np.flatnonzero(~np.isfinite(made).all(axis=1))
    if bad.size:
        position = len(prompt) + len(forced) - len(made) + int(bad[0])
        raise NonFiniteLogits(f"logits at position {position} are not finite", "the model's numbers cannot be used")
    return made


def check_fed(info: DecoderInfo, prompt: Sequence[int], forced: Sequence[int]) -> None:
    """Refuse ids outside the vocabulary, and more of them than the context holds. Raises BadRequest."""
    worst = max((*prompt, *forced))
    if worst >= info.vocabulary:
        raise BadRequest(
            f"id {worst} is outside the vocabulary of {info.vocabulary}", "give ids of this model's own tokenizer"
        )
    if info.context_length is not None and len(prompt) + len(forced) > info.context_length:
        raise BadRequest(
            f"{len(prompt)} prompt and {len(forced)} forced ids do not fit the model's {info.context_length} positions",
            "give fewer",
        )


def save(path: Path, logits: Logits, prompt: Sequence[int], forced: Sequence[int]) -> None:
    """Write arrays logits, prompt_ids and forced_ids: the whole file or none. Raises BadRequest."""
    fed = [np.asarray(ids, np.int64) for ids in (prompt, forced)]
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                np.savez(file, logits=logits, prompt_ids=fed[0], forced_ids=fed[1])
                file.flush()
                Path(file.name).chmod(0o666 & ~_umask())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise BadRequest(f"--out: {path} cannot be written: {error.strerror or error}", "write elsewhere") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _widened(graph: Graph) -> Graph:
    """The same graph with caches of half types in float32; an int8 cache is what the graph means, and stays."""
    inputs = {
        name: replace(value, dtype="float32") if value.dtype in ("float16", "bfloat16") else value
        for name, value in graph.inputs.items()
    }
    return replace(graph, inputs=inputs)
