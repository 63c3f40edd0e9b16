"""The native engine as a child: request in, JSON lines out, one record; and the accused does not testify alone.

The parent computes the digest of the engine tree itself, just before the child starts, and checks afterwards that the
child imported `engine` from that tree, spoke of the expected card and model, and ended the way its stream says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.interrupt import INTERRUPTED
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.child import ChildEnd, ChildOrder, allowed_environment, run_child
from jobs.adapters.model_files import ModelDigests, last_changed
from jobs.adapters.native_record import Known, Stream, record_of
from jobs.errors import SpecError
from jobs.excerpt import first_words
from jobs.model import PLAN_ONLY, ArmPlan, CellPlan, RunRecord
from jobs.provenance import own_root, tree_digest

PROTOCOL = 1
PROTOCOLS = (PROTOCOL, PROTOCOL - 1)
ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "ASSAY_MARK",  # by which the driver's guard finds what a killed driver left behind
)
"""Variables that reach the child: no store URL, no token, nothing that a user forgot in a shell."""

FIXED_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

_KINDS = {
    10: "bad_request",
    11: "model_files",
    12: "unsupported",
    13: "refused",
    14: "out_of_memory",
    15: "non_finite",
    16: "device",
}
_RETRIED_KINDS = frozenset({"out_of_memory", "device"})
"""Ends that another attempt may not meet; the others are the same each time, being facts of the arm."""


class NativeAdapter:
    """Runs `python -P -m engine run` from the arm's tree."""

    def __init__(self, python: str = sys.executable, models: Callable[[Path], str] | None = None) -> None:
        """`models` gives the digest of a model's folder; it may raise SpecError."""
        self._python = python
        self._models = models or ModelDigests()

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        """One attempt: spawn, listen, verify, write down."""
        tree, digest, wrong = checked_tree(order.arm)
        if wrong:
            return RunResult("failed", None, wrong)
        if fault := self._model_fault(order):
            return RunResult("failed", None, f"provenance: {fault}")
        known = Known(digest, self._models(Path(order.cell.model_path)))
        request = place.scratch / "request.json"
        request.write_text(json.dumps(request_document(order.cell, order.arm, order.card_uuid)))
        started = place.utc_now()
        try:
            end = run_child(
                _child_order(self._python, order, place, request),
                on_spawn=place.on_spawn,
                on_line=place.on_progress,
                stopped=place.stopped,
            )
        except OSError as exc:
            return RunResult("failed", None, f"the engine could not be started: {exc}", retry=True, fault="start")
        stream = Stream.of(end)
        lie = verify(order, tree, stream) or self._model_fault(order)
        kind, reason, retry = _outcome(end, stream, lie)
        error = None if kind == "measured" else reason
        record = record_of(order, end, stream, known, started, place.utc_now(), error)
        return _result(kind, record, reason, retry, end)

    def _model_fault(self, order: RunOrder) -> str | None:
        """What is wrong with the model's files, as this process reads them, against the plan."""
        try:
            digest = self._models(Path(order.cell.model_path))
        except SpecError as exc:
            return f"model {order.cell.model}: {exc}"
        if not order.cell.model_digest or digest == order.cell.model_digest:
            return None
        return (
            f"model {order.cell.model} in {order.cell.model_path} has digest {digest[:12]}, the plan says "
            f"{order.cell.model_digest[:12]}: it changed since the sweep was submitted; "
            f"{last_changed(Path(order.cell.model_path))}"
        )


def request_document(cell: CellPlan, arm: ArmPlan, card_uuid: str | None) -> dict[str, Any]:
    """The request file's content; arm config wins over the cell's, since an arm is what is compared within a cell."""
    settings = cell.settings
    first, *further = cell.prompts(arm)
    return {
        "protocol": PROTOCOL,
        "model": cell.model_path,
        "prompt_ids": list(first),
        **({"further_prompts": [list(prompt) for prompt in further]} if further else {}),
        "tokens": settings.tokens,
        "generations": settings.generations,
        "warmups": settings.warmups,
        "ignore_eos": settings.ignore_eos,
        "decode_skip": settings.decode_skip,
        "device": settings.device,
        **({"arithmetic": settings.arithmetic} if settings.plan_only else {}),
        "config": {**cell.config, **arm.config},
        "uuid": card_uuid,
    }


def checked_tree(arm: ArmPlan) -> tuple[Path, str, str]:
    """An arm's engine tree, its digest, and why it must not run; empty when it is what was planned."""
    tree = Path(arm.python_path) if arm.python_path else own_root()
    if arm.unbuilt:  # without a tree it would import the installed engine
        return tree, "", arm.unbuilt
    try:
        digest = tree_digest(tree, arm.build.outputs if arm.build else ())
    except SpecError as exc:
        return tree, "", f"engine tree: {exc}"
    return tree, digest, _changed_words(arm, tree, digest) if arm.tree_digest not in ("", digest) else ""


def child_environment(arm: ArmPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Allowlist, then what is fixed, then the arm's own variables and its import path."""
    env = {**allowed_environment(environ, ENVIRONMENT), **FIXED_ENVIRONMENT, **arm.env}
    if arm.python_path:
        env["PYTHONPATH"] = arm.python_path
    return env


def verify(order: RunOrder, tree: Path, stream: Stream) -> str | None:
    """What the child said of itself against what the parent knows; None when all of it agrees."""
    hello = stream.hello
    if hello is None:
        return None  # its end says why it never spoke
    if hello.protocol not in PROTOCOLS:
        return f"child speaks protocol {hello.protocol}, served are {PROTOCOLS}"
    module = Path(hello.module_path).resolve()
    if not module.is_relative_to(tree.resolve() / "engine"):
        return f"engine was imported from {module}, not from {tree}/engine"
    if (hello.device.kind == PLAN_ONLY) is not order.cell.settings.plan_only:
        if order.cell.settings.plan_only:
            return f"child computed on a device of kind {hello.device.kind}, and was asked to plan alone"
        return "child ran without arithmetic: it has no tokens, so nothing of it may stand beside another run"
    if hello.device.uuid != order.card_uuid:
        return f"child ran on card {hello.device.uuid}, expected {order.card_uuid}"
    model = hello.model.digest
    if model is not None and order.cell.model_digest and model != order.cell.model_digest:
        return f"child read model {model[:12]}, expected {order.cell.model_digest[:12]}"
    return None


def _child_order(python: str, order: RunOrder, place: RunPlace, request: Path) -> ChildOrder:
    words = ("-P", "-m", "engine", "run", "--request", str(request))
    return ChildOrder(
        argv=(python, *words, "--result-fd", "{result_fd}", "--control-fd", "{control_fd}"),
        env=child_environment(order.arm, place.environ),
        cwd=place.scratch,
        log_path=place.scratch / "child.log",
        timeout_s=order.timeout_s,
        start_timeout_s=order.start_timeout_s,
    )


def _outcome(end: ChildEnd, stream: Stream, lie: str | None) -> tuple[str, str, bool]:
    """(measured or a failure's kind, reason, whether to try again)."""
    if end.stopped:
        return "cancelled", "stopped by the user", False
    if end.timed_out:
        late = "running: no end" if end.spoke else "spawning: no word"
        return "timeout", f"timeout: {late} within {end.wall_s:.0f} s", True
    if lie:
        return "provenance", f"provenance: {lie}", False
    if stream.fault and end.signal is None:  # who died while writing crashed, and says no more than that
        return "protocol", f"protocol: {stream.fault}", False
    if stream.error is not None and stream.error.kind != INTERRUPTED:  # then the signal says it all
        kind, remedy = stream.error.kind, stream.error.remedy
        words = f"{kind}: {stream.error.message}" + (f" ({remedy})" if remedy else "")
        return kind, words, kind in _RETRIED_KINDS
    if end.signal is not None:
        return "crash", f"crash: ended by signal {end.signal}", True
    if stream.fault:
        return "protocol", f"protocol: {stream.fault}", False
    if end.exit_code == 0 and stream.result is not None:
        return "measured", "", False
    kind = _KINDS.get(end.exit_code or 0, "crash")
    what = "no result" if end.exit_code == 0 else f"exit {end.exit_code}"
    return kind, f"{kind}: {what}; {last_log_line(end)}", kind not in _KINDS.values() or kind in _RETRIED_KINDS


def _result(kind: str, record: RunRecord, reason: str, retry: bool, end: ChildEnd) -> RunResult:
    if kind == "measured":
        return RunResult("measured", record, leftovers=end.leftovers)
    if kind == "cancelled":
        return RunResult("cancelled", record, reason, leftovers=end.leftovers)
    if kind == "refused":
        return RunResult("refused", record, reason, leftovers=end.leftovers, fault=kind)
    return RunResult("failed", record, reason, retry, end.leftovers, fault=kind)


def _changed_words(arm: ArmPlan, tree: Path, digest: str) -> str:
    return (
        f"provenance: engine of arm {arm.name} in {tree} has digest {digest[:12]}, the plan says "
        f"{arm.tree_digest[:12]}: it changed since the sweep was submitted"
    )


def last_log_line(end: ChildEnd) -> str:
    """The last words of a child that said nothing else."""
    lines = [line for line in end.log_tail.splitlines() if line.strip()]
    return f"log ends: {first_words(lines[-1], 300)}" if lines else "the log is empty"
