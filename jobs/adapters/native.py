"""The native engine as a child: request in, JSON lines out, one record; and the accused does not testify alone.

The parent computes the digest of the engine tree itself, just before the child starts, and checks afterwards that the
child imported `engine` from that tree, spoke of the expected card and model, and ended the way its stream says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jobs.adapters import ends
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.child import ChildOrder, allowed_environment, run_child
from jobs.adapters.model_files import ModelDigests, model_fault
from jobs.adapters.native_record import Known, Stream, outside_vocabulary, record_of
from jobs.errors import SpecError
from jobs.model import PLAN_ONLY, ArmPlan, CellPlan, Reading
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


class NativeAdapter:
    """Runs `python -P -m engine run` from the arm's tree, or another `command` of it that speaks as it does."""

    def __init__(
        self,
        python: str = sys.executable,
        models: Callable[[Path], str] | None = None,
        command: str = "run",
        absent: Mapping[str, Reading] | None = None,
    ) -> None:
        """`models` gives the digest of a model's folder; may raise SpecError. `absent`: counters, and why they are."""
        self._python = python
        self._models = models or ModelDigests()
        self._command = command
        self._absent = dict(absent or {})

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        """One attempt: spawn, listen, verify, write down."""
        tree, digest, wrong = checked_tree(order.arm)
        if wrong:
            return RunResult("failed", None, wrong)
        if fault := model_fault(self._models, order.cell):
            return RunResult("failed", None, f"provenance: {fault}")
        known = Known(digest, self._models(Path(order.cell.model_path)))
        request = place.scratch / "request.json"
        request.write_text(json.dumps(request_document(order.cell, order.arm, order.card_uuid)))
        started = place.utc_now()
        try:
            end = run_child(
                self._child_order(order, place, request),
                on_spawn=place.on_spawn,
                on_line=place.on_progress,
                stopped=place.stopped,
            )
        except OSError as exc:
            return RunResult("failed", None, f"the engine could not be started: {exc}", retry=True, fault="start")
        stream = Stream.of(end)
        stream.fault = stream.fault or outside_vocabulary(order.cell, stream)
        lie = verify(order, tree, stream) or model_fault(self._models, order.cell)
        kind, reason, retry = ends.outcome(end, stream, lie)
        error = None if kind == "measured" else reason
        record = record_of(order, end, stream, known, started, place.utc_now(), error)
        if self._absent:
            record = record.model_copy(update={"counters": {**self._absent, **record.counters}})
        return ends.result_of(kind, record, reason, retry, end)

    def _child_order(self, order: RunOrder, place: RunPlace, request: Path) -> ChildOrder:
        words = ("-P", "-m", "engine", self._command, "--request", str(request))
        return ChildOrder(
            argv=(self._python, *words, "--result-fd", "{result_fd}", "--control-fd", "{control_fd}"),
            env=child_environment(order.arm, place.environ),
            cwd=place.scratch,
            log_path=place.scratch / "child.log",
            timeout_s=order.timeout_s,
            start_timeout_s=order.start_timeout_s,
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
    """Allowlist, then what is fixed, then the arm's own variables and its import path.

    An installation that is a folder on the worker's PYTHONPATH is one for the child too, behind the arm's own tree.
    """
    env = {**allowed_environment(environ, ENVIRONMENT), **FIXED_ENVIRONMENT, **arm.env}
    here = str(own_root())
    installed = [here] if here in environ.get("PYTHONPATH", "").split(os.pathsep) else []
    if path := [*filter(None, [arm.python_path]), *installed]:
        env["PYTHONPATH"] = os.pathsep.join(path)
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


def _changed_words(arm: ArmPlan, tree: Path, digest: str) -> str:
    return (
        f"provenance: engine of arm {arm.name} in {tree} has digest {digest[:12]}, the plan says "
        f"{arm.tree_digest[:12]}: it changed since the sweep was submitted"
    )
