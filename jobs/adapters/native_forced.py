"""Base and head forced through the same ids, beside the oracle: children of the native engine, one answer.

The oracle is the harness's own engine, whatever the arms run; it shares no code with what decodes. Nothing is timed
here, and whoever else is on a card cannot change what is computed, so that none needs to be clear.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from jobs.adapters.base import RunPlace
from jobs.adapters.child import ChildOrder, run_child
from jobs.adapters.ends import last_log_line
from jobs.adapters.model_files import ModelDigests
from jobs.adapters.native import checked_tree, child_environment
from jobs.adapters.peer_run import peer_command, peer_environment, request_file
from jobs.adapters.registry import PEERS
from jobs.errors import SpecError
from jobs.model import ArmPlan, CellPlan
from jobs.near_tie import Adjudication, FollowUp, ForcedPosition
from jobs.provenance import own_root

NOT_FORCED = frozenset({"batch", "prefill_chunk", "prefix_reuse"})
"""Config that a forced pass has none of: one sequence, its prompt in one call, which give the same bits."""

_SWITCH = {True: "on", False: "off"}
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ForceOrder:
    """One question with the plans of what it is about. `timeout_s` bounds each child."""

    asked: FollowUp
    cell: CellPlan
    base: ArmPlan
    head: ArmPlan
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Along:
    """What all three make of one list of ids: logits, a row for each id that is to come."""

    oracle: Logits
    base: Logits
    head: Logits


class _Failed(Exception):
    """Why there is no answer, in one line."""


def adjudicate(order: ForceOrder, place: RunPlace, python: str = sys.executable) -> Adjudication:
    """The answer to a question; one that cannot be answered says why."""
    asked = order.asked
    first = asked.first
    try:
        _check_arms(order)
        _check_model(order.cell)
        shared = _along(order, asked.base_ids, place, python)
        chose, is_lock = (asked.base_ids[first], asked.head_ids[first]), asked.kind == "lock"
        positions = [_position(shared, first, *chose, margin=is_lock)]
        positions += [_position(shared, at, asked.base_ids[at], None) for at in range(first + 1, len(asked.base_ids))]
        later = range(first + 1, len(asked.head_ids))
        alone = _along(order, asked.head_ids, place, python) if later else shared
        own = [_position(alone, at, None, asked.head_ids[at]) for at in later]
        _check_model(order.cell)
    except ValidationError:
        return Adjudication(asked=asked, failure="the engines' logits lie further apart than a number tells")
    except _Failed as failed:
        return Adjudication(asked=asked, failure=str(failed))
    return Adjudication(asked=asked, positions=tuple(positions), own=tuple(own))


def _check_arms(order: ForceOrder) -> None:
    """Raise _Failed when an arm cannot be forced at all, whatever its model."""
    for arm in (order.base, order.head):
        peer = PEERS.get(arm.adapter)
        if peer is None and arm.adapter != "native":
            raise _Failed(f"the engine of {arm.name} is run by {arm.adapter}, which cannot force ids")
        if peer is not None and not peer.forces:
            raise _Failed(f"the engine of {arm.name} is {peer.name}, which cannot force ids")


def _check_model(cell: CellPlan) -> None:
    """Raise _Failed when the model is not the one that ran."""
    try:
        digest = ModelDigests()(Path(cell.model_path))
    except SpecError as exc:
        raise _Failed(f"model {cell.model}: {exc}") from exc
    if digest != cell.model_digest:
        raise _Failed(f"model {cell.model} has digest {digest[:12]}, and what ran had {cell.model_digest[:12]}")


def _along(order: ForceOrder, ids: tuple[int, ...], place: RunPlace, python: str) -> _Along:
    """All three, fed the prompt and these ids. Raises _Failed."""
    harness = ArmPlan(name="oracle", role="variant", source="harness", python_path=str(own_root()))
    oracle = _logits(order, ids, place, (python, "-P", "-m", "engine", "oracle"), harness)
    made = [oracle]
    of_one = order.asked.kind == "lock"  # of which base is both
    arms = ((order.base, order.asked.base_target), (order.head, order.asked.head_target))
    for arm, target in arms[:1] if of_one else arms:
        command = (python, "-P", "-m", "engine", "logits", *_options(order.cell, arm, target))
        made.append(_logits(order, ids, place, command, arm))
        if made[-1].shape != oracle.shape:
            raise _Failed(f"{arm.name} gives logits {list(made[-1].shape)}, the oracle {list(oracle.shape)}")
    return _Along(*made, *(made[-1:] if of_one else ()))


def _position(
    along: _Along, index: int, base_gave: int | None, head_gave: int | None, *, margin: bool = False
) -> ForcedPosition:
    told, base, head = along.oracle[index], along.base[index], along.head[index]
    best, base_id, head_id = int(np.argmax(told)), _choice(base, base_gave), _choice(head, head_gave)
    return ForcedPosition(
        index=index,
        base_error=float(np.abs(base.astype(np.float64) - told).max()),
        base_id=base_id,
        base_behind=float(told[best] - told[base_id]),
        head_id=head_id,
        head_behind=float(told[best] - told[head_id]),
        oracle_id=best,
        oracle_margin=float(told[best]) - float(np.partition(told, -2)[-2]) if margin else None,
    )


def _logits(order: ForceOrder, ids: tuple[int, ...], place: RunPlace, command: tuple[str, ...], arm: ArmPlan) -> Logits:
    """What an engine computes for these ids, a row for each of them. Raises _Failed."""
    if arm.adapter in PEERS:
        return _of_peer(order, ids, place, command[0], arm)
    _, _, fault = checked_tree(arm)
    if fault:
        raise _Failed(fault)
    asked, out = order.asked, place.scratch / f"{len(list(place.scratch.iterdir()))}.npz"
    fed = {"--model": order.cell.model_path, "--prompt-ids": _words(asked.prompt_ids), "--out": str(out)}
    fed["--forced-ids"] = _words(ids[:-1])
    words = (*command, *(f"{name}={value}" for name, value in fed.items()))
    return _fed(order, len(ids), place, ChildLine(words, child_environment(arm, place.environ), arm.name, out))


def _of_peer(order: ForceOrder, ids: tuple[int, ...], place: RunPlace, python: str, arm: ArmPlan) -> Logits:
    """What a library computes for these ids, fed one by one. Raises _Failed."""
    peer, asked = PEERS[arm.adapter], order.asked
    cell = order.cell.model_copy(update={"prompt_ids": asked.prompt_ids, "further_prompts": ()})
    out = place.scratch / f"{len(list(place.scratch.iterdir()))}.npz"
    request = request_file(cell, arm, asked.card, place.scratch)
    words = ("logits", f"--request={request}", f"--out={out}", f"--forced-ids={_words(ids[:-1])}")
    env = peer_environment(arm, place.environ, asked.card)
    return _fed(order, len(ids), place, ChildLine((*peer_command(peer, python), *words), env, arm.name, out))


@dataclass(frozen=True, slots=True)
class ChildLine:
    """What is started for an arm, and where it writes its logits."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    name: str
    out: Path


def _fed(order: ForceOrder, rows: int, place: RunPlace, line: ChildLine) -> Logits:
    """The logits that a child writes. Raises _Failed."""
    child = ChildOrder(
        argv=line.argv,
        env=line.env,
        cwd=place.scratch,
        log_path=place.scratch / f"{line.out.stem}.log",
        timeout_s=order.timeout_s,
    )
    try:
        end = run_child(child, on_spawn=place.on_spawn, stopped=place.stopped)
    except OSError as exc:
        raise _Failed(f"{line.name} could not be started: {exc}") from exc
    if end.timed_out:
        raise _Failed(f"{line.name} had no answer within {order.timeout_s:g} s")
    if end.exit_code != 0:
        how = f"signal {end.signal}" if end.exit_code is None else f"exit {end.exit_code}"
        raise _Failed(f"{line.name} ends with {how}; {last_log_line(end)}")
    return _read(line.out, rows, line.name)


def _read(out: Path, rows: int, name: str) -> Logits:
    """The last rows of a file of logits: the one after the prompt, then one for each forced id."""
    try:
        with np.load(out, allow_pickle=False) as arrays:
            made = np.asarray(arrays["logits"], np.float32)
    except Exception as exc:  # whatever a child wrote, and what NumPy makes of it
        raise _Failed(f"{name} wrote no logits: {type(exc).__name__}: {exc}") from exc
    if made.ndim != 2 or len(made) < rows or not np.isfinite(made).all():
        raise _Failed(f"{name} wrote logits {list(made.shape)}, due are {rows} finite rows")
    return made[-rows:]


def _choice(row: Logits, gave: int | None) -> int:
    """What an arm chooses by its logits; of several that are equal, the one that it gave there."""
    best = int(np.argmax(row))
    return gave if gave is not None and gave < row.size and row[gave] == row[best] else best


def _options(cell: CellPlan, arm: ArmPlan, target: str) -> list[str]:
    """An arm's config as options of the command; arm config wins over the cell's, as in a run.

    `target` is what its run's plans were made for, which follows from the device where no config names it.
    """
    asked = {**({"target": target} if target else {}), **cell.config, **arm.config}
    given = {name: value for name, value in asked.items() if name not in NOT_FORCED}
    options = [f"--device={cell.settings.device}"]
    for name, value in given.items():
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={_SWITCH[value] if isinstance(value, bool) else value}")
    return options


def _words(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids))
