"""Base and head forced through the same ids, beside the oracle: three children of the native engine, one answer.

The oracle is the harness's own engine, whatever the arms run; it shares no code with what decodes. Nothing is timed
here, and whoever else is on a card cannot change what is computed, so that none needs to be clear.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jobs.adapters.base import RunPlace
from jobs.adapters.child import ChildOrder, run_child
from jobs.adapters.native import checked_tree, child_environment, last_log_line
from jobs.model import ArmPlan, CellPlan
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition
from jobs.provenance import own_root

NOT_FORCED = frozenset({"batch", "prefill_chunk", "prefix_reuse"})
"""Config that a forced pass has none of: one sequence, its prompt in one call, which give the same bits."""

_SWITCH = {True: "on", False: "off"}
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ForceOrder:
    """One question with the plans of what it is about. `timeout_s` bounds each of three children."""

    asked: FollowUp
    cell: CellPlan
    base: ArmPlan
    head: ArmPlan
    timeout_s: float


class _Failed(Exception):
    """Why there is no answer, in one line."""


def adjudicate(order: ForceOrder, place: RunPlace, python: str = sys.executable) -> Adjudication:
    """The answer to a question; one that cannot be answered says why."""
    try:
        return Adjudication(asked=order.asked, positions=tuple(_positions(order, place, python)))
    except _Failed as failed:
        return Adjudication(asked=order.asked, failure=str(failed))


def _positions(order: ForceOrder, place: RunPlace, python: str) -> Iterator[ForcedPosition]:
    asked = order.asked
    harness = ArmPlan(name="oracle", role="variant", source="harness", python_path=str(own_root()))
    oracle = _logits(order, place, (python, "-P", "-m", "engine", "oracle"), harness)
    arms = [
        _logits(order, place, (python, "-P", "-m", "engine", "logits", *_options(order.cell, arm)), arm)
        for arm in (order.base, order.head)
    ]
    for name, made in zip((asked.base, asked.head), arms, strict=True):
        if made.shape != oracle.shape:
            raise _Failed(f"{name} gives logits {list(made.shape)} where the oracle gives {list(oracle.shape)}")
    for index in range(asked.first, len(asked.base_ids)):
        told, base, head = oracle[index], arms[0][index], arms[1][index]
        best, base_id = int(np.argmax(told)), _choice(base, asked.base_ids[index])
        head_id = _choice(head, asked.head_id) if index == asked.first else int(np.argmax(head))
        yield ForcedPosition(
            index=index,
            base_error=float(np.abs(base - told).max()),
            base_id=base_id,
            base_behind=float(told[best] - told[base_id]),
            head_id=head_id,
            head_behind=float(told[best] - told[head_id]),
            oracle_id=best,
        )


def _logits(order: ForceOrder, place: RunPlace, command: tuple[str, ...], arm: ArmPlan) -> Logits:
    """What an engine computes for base's ids, a row for each of them. Raises _Failed."""
    if arm.adapter != "native":
        raise _Failed(f"the engine of {arm.name} is run by {arm.adapter}, which cannot force ids")
    _, _, fault = checked_tree(arm)
    if fault:
        raise _Failed(fault)
    asked, out = order.asked, place.scratch / f"{len(list(place.scratch.iterdir()))}.npz"
    fed = {"--model": order.cell.model_path, "--prompt-ids": _words(asked.prompt_ids), "--out": str(out)}
    fed["--forced-ids"] = _words(asked.base_ids[:-1])
    child = ChildOrder(
        argv=(*command, *(f"{name}={value}" for name, value in fed.items())),
        env=child_environment(arm, place.environ),
        cwd=place.scratch,
        log_path=place.scratch / f"{out.stem}.log",
        timeout_s=order.timeout_s,
    )
    try:
        end = run_child(child, on_spawn=place.on_spawn, stopped=place.stopped)
    except OSError as exc:
        raise _Failed(f"{arm.name} could not be started: {exc}") from exc
    if end.timed_out:
        raise _Failed(f"{arm.name} had no answer within {order.timeout_s:g} s")
    if end.exit_code != 0:
        how = f"signal {end.signal}" if end.exit_code is None else f"exit {end.exit_code}"
        raise _Failed(f"{arm.name} ends with {how}; {last_log_line(end)}")
    return _read(out, len(asked.base_ids), arm.name)


def _read(out: Path, rows: int, name: str) -> Logits:
    """The last rows of a file of logits: the one after the prompt, then one for each forced id."""
    try:
        with np.load(out, allow_pickle=False) as arrays:
            made = np.asarray(arrays["logits"], np.float32)
    except (OSError, ValueError, KeyError) as exc:
        raise _Failed(f"{name} wrote no logits: {exc}") from exc
    if made.ndim != 2 or len(made) < rows or not np.isfinite(made).all():
        raise _Failed(f"{name} wrote logits {list(made.shape)}, due are {rows} finite rows")
    return made[-rows:]


def _choice(row: Logits, gave: int) -> int:
    """What an arm chooses by its logits; of several that are equal, the one that it gave."""
    best = int(np.argmax(row))
    return gave if gave < row.size and row[gave] == row[best] else best


def _options(cell: CellPlan, arm: ArmPlan) -> list[str]:
    """An arm's config as options of the command; arm config wins over the cell's, as in a run."""
    given = {name: value for name, value in {**cell.config, **arm.config}.items() if name not in NOT_FORCED}
    options = [f"--device={cell.settings.device}"]
    for name, value in given.items():
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={_SWITCH[value] if isinstance(value, bool) else value}")
    return options


def _words(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids))
