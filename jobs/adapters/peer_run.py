"""The parent's side of an engine that nobody here wrote: its child is a file of this package, with a library inside.

The parent computes the digest of the harness, which holds that file, and of the model, and checks that the child ran
from here and spoke of the card that it was given. What such an engine cannot witness is Missing with its reason.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.adapters import ends
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.child import ChildOrder, allowed_environment, run_child
from jobs.adapters.model_files import AnyModelDigests, model_fault
from jobs.adapters.native import ENVIRONMENT, PROTOCOLS, request_document
from jobs.adapters.native_record import Known, Stream, outside_vocabulary, record_of
from jobs.adapters.peer import Peer
from jobs.gates import GATING, UNDECLARED
from jobs.model import ArmPlan, CellPlan, Missing, Reading, RunRecord
from jobs.provenance import harness_digest, own_root

LIBRARIES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES")
"""Variables of the host that libraries need beside those of any child."""


class PeerAdapter:
    """Runs one engine as a child of this package."""

    def __init__(self, peer: Peer, python: str = sys.executable, models: Callable[[Path], str] | None = None) -> None:
        """`models` gives the digest of a model's files; it may raise SpecError."""
        self._peer = peer
        self._python = python
        self._models = models or AnyModelDigests()

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        """One attempt: spawn, listen, verify, write down."""
        digest = harness_digest(own_root())
        if digest != order.arm.tree_digest:
            changed = f"the harness has digest {digest[:12]}, the plan says {order.arm.tree_digest[:12]}"
            return RunResult("failed", None, f"provenance: {changed}: it changed since the sweep was submitted")
        if fault := model_fault(self._models, order.cell):
            return RunResult("failed", None, f"provenance: {fault}")
        known = Known(digest, self._models(Path(order.cell.model_path)))
        started = place.utc_now()
        words = ("run", f"--request={request_file(order.cell, order.arm, order.card_uuid, place.scratch)}")
        child = ChildOrder(
            argv=(*peer_command(self._peer, self._python), *words, "--result-fd", "{result_fd}"),
            env=peer_environment(order.arm, place.environ, order.card_uuid),
            cwd=place.scratch,
            log_path=place.scratch / "child.log",
            timeout_s=order.timeout_s,
            start_timeout_s=order.start_timeout_s,
        )
        try:
            end = run_child(child, on_spawn=place.on_spawn, on_line=place.on_progress, stopped=place.stopped)
        except OSError as exc:
            return RunResult(
                "failed", None, f"{self._peer.name} could not be started: {exc}", retry=True, fault="start"
            )
        stream = Stream.of(end)
        stream.fault = stream.fault or outside_vocabulary(order.cell, stream)
        lie = _lie(order, stream) or model_fault(self._models, order.cell)
        kind, reason, retry = ends.outcome(end, stream, lie)
        record = record_of(order, end, stream, known, started, place.utc_now(), None if kind == "measured" else reason)
        return ends.result_of(kind, _with_absent(record, self._peer), reason, retry, end)


def peer_command(peer: Peer, python: str = sys.executable) -> tuple[str, ...]:
    """What starts the child of an engine."""
    return (python, "-P", "-m", peer.module)


def request_file(cell: CellPlan, arm: ArmPlan, card_uuid: str | None, scratch: Path) -> Path:
    """The request of a run as a file, with the arm's options."""
    place = scratch / "request.json"
    place.write_text(json.dumps({**request_document(cell, arm, card_uuid), "options": arm.options}))
    return place


def peer_environment(arm: ArmPlan, environ: Mapping[str, str], card_uuid: str | None) -> dict[str, str]:
    """What a child of this package is given: the packages that this process sees, behind those of the arm's own."""
    own = {**allowed_environment(environ, (*ENVIRONMENT, *LIBRARIES)), "PYTHONUNBUFFERED": "1", **arm.env}
    if card_uuid and card_uuid.startswith("GPU-"):
        own["CUDA_VISIBLE_DEVICES"] = card_uuid
    paths = [arm.env.get("PYTHONPATH", ""), str(own_root()), *sys.path]
    own["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    return own


def _lie(order: RunOrder, stream: Stream) -> str | None:
    """What the child said of itself against what the parent knows; None when all of it agrees."""
    hello = stream.hello
    if hello is None:
        return None
    if hello.protocol not in PROTOCOLS:
        return f"child speaks protocol {hello.protocol}, served are {PROTOCOLS}"
    module = Path(hello.module_path).resolve()
    if not module.is_relative_to(own_root() / "jobs"):
        return f"the adapter was imported from {module}, not from {own_root()}/jobs"
    if hello.device.uuid != order.card_uuid:
        return f"child ran on card {hello.device.uuid}, expected {order.card_uuid}"
    return None


def _with_absent(record: RunRecord, peer: Peer) -> RunRecord:
    """The record with a reason for each gating counter that the engine cannot witness."""
    why: dict[str, Reading] = dict.fromkeys(sorted(GATING), Missing(missing=f"{UNDECLARED}: {peer.blind}"))
    return record.model_copy(update={"counters": {**why, **record.counters}})
