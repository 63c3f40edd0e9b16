"""Any program as a child: it prints lines of the child protocol, or text or JSON that its sweep file maps.

The program is the arm's shell command, run at the root of the arm's tree with the request in its environment
(docs/adapters.md). The parent computes the tree's digest, just before the program starts and after it ended, and what
the program cannot witness is Missing with that reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.adapters import ends
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.child import MAX_OUTPUT_BYTES, ChildEnd, ChildOrder, allowed_environment, run_child
from jobs.adapters.command_reads import Mapped, Unread, mapped
from jobs.adapters.model_files import AnyModelDigests, FolderDigests, last_changed, model_fault
from jobs.adapters.native import ENVIRONMENT, PROTOCOLS, request_document
from jobs.adapters.native_record import Known, Stream, outside_vocabulary, record_of
from jobs.errors import SpecError
from jobs.gates import GATING, UNDECLARED
from jobs.model import PLAN_ONLY, ArmPlan, CellPlan, Missing, Reading, RunRecord
from jobs.whole_trees import program_digest

SIMULATED = "SIM-"
"""How the UUID of a simulated card begins."""
UNTOLD = Missing(missing="declared in the sweep file, and the program did not tell it")


Reader = Callable[[bytes, Mapping[str, str]], Mapped]
"""What makes lines of the child protocol of an output, given the facts of the card. Raises Unread."""


class CommandAdapter:
    """Runs an arm's own command."""

    def __init__(
        self,
        models: Callable[[Path], str] | None = None,
        trees: Callable[[Path], str] | None = None,
        read: Reader | None = None,
    ) -> None:
        """`models` and `trees` give the digest of a model's and of a program's folder; they may raise SpecError.

        `read`: what reads the output of a program that is known, in the place of lines and of the arm's mapping.
        """
        self._read = read
        self._models = models or AnyModelDigests()
        self._trees = trees or FolderDigests(program_digest)

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        """One attempt: spawn, listen, verify, write down."""
        if wrong := order.arm.unbuilt or self._tree_fault(order.arm):
            return RunResult("failed", None, wrong)
        if fault := model_fault(self._models, order.cell):
            return RunResult("failed", None, f"provenance: {fault}")
        known = Known(order.arm.tree_digest, self._models(Path(order.cell.model_path)))
        asked = place.scratch / "request.json"
        asked.write_text(json.dumps(request_document(order.cell, order.arm, order.card_uuid)))
        started = place.utc_now()
        try:
            end = run_child(
                _child_order(order, place, asked, speaks=self._reader(order) is None),
                on_spawn=place.on_spawn,
                on_line=place.on_progress,
                stopped=place.stopped,
            )
        except OSError as exc:
            return RunResult("failed", None, f"the command could not be started: {exc}", retry=True, fault="start")
        absent = _map_output(order, end, self._reader(order))
        stream = Stream.of(end)
        _find_faults(order, stream)
        lie = _lie(order, stream) or model_fault(self._models, order.cell)
        kind, reason, retry = ends.outcome(end, stream, lie)
        if kind == "measured" and (changed := self._tree_fault(order.arm)):
            kind, reason = "provenance", changed
        record = record_of(order, end, stream, known, started, place.utc_now(), None if kind == "measured" else reason)
        return ends.result_of(kind, _with_absent(record, order.arm, absent), reason, retry, end)

    def _reader(self, order: RunOrder) -> Reader | None:
        """What reads the program's output; None where it speaks the child protocol."""
        reads, warmups = order.arm.reads, order.cell.settings.warmups
        if self._read is not None or reads is None:
            return self._read
        return lambda output, device: mapped(output, reads, warmups, device)

    def _tree_fault(self, arm: ArmPlan) -> str:
        """Why the program is not what was planned; empty when it is."""
        if arm.python_path is None:
            return f"provenance: arm {arm.name} has no tree"
        tree = Path(arm.python_path)
        try:
            digest = self._trees(tree)
        except (SpecError, OSError) as exc:
            return f"provenance: tree of arm {arm.name}: {exc}"
        if digest == arm.tree_digest:
            return ""
        return (
            f"provenance: the tree of arm {arm.name} in {tree} has digest {digest[:12]}, the plan says "
            f"{arm.tree_digest[:12]}: {last_changed(tree)}; a program may write into its scratch folder alone"
        )


def request_variables(cell: CellPlan, arm: ArmPlan, card_uuid: str) -> dict[str, str]:
    """The request of a run as variables; its place on a host apart."""
    settings = cell.settings
    told = {
        "MODEL": cell.model_path,
        "PROMPT_IDS": " ".join(map(str, cell.prompt_ids)),
        "TOKENS": str(settings.tokens),
        "GENERATIONS": str(settings.generations),
        "WARMUPS": str(settings.warmups),
        "IGNORE_EOS": str(int(settings.ignore_eos)),
        "CONFIG": json.dumps({**cell.config, **arm.config}),
        "DEVICE": _device_kind(card_uuid),
        "CARD": card_uuid,
    }
    return {f"ASSAY_{name}": value for name, value in told.items()}


def _environment(order: RunOrder, place: RunPlace, asked: Path) -> dict[str, str]:
    """The host's own variables that are allowed, the arm's, and the request."""
    here = {"ASSAY_REQUEST": str(asked), "ASSAY_SCRATCH": str(place.scratch)}
    own = request_variables(order.cell, order.arm, order.card_uuid)
    return {**allowed_environment(place.environ, ENVIRONMENT), **order.arm.env, **own, **here}


def _child_order(order: RunOrder, place: RunPlace, asked: Path, *, speaks: bool) -> ChildOrder:
    # The blank before a word that begins with a brace, which would be a place for a descriptor to the child's launcher.
    argv = (f" {word}" if word.startswith("{") else word for word in order.arm.command)
    return ChildOrder(
        argv=tuple(argv),
        env=_environment(order, place, asked),
        cwd=Path(order.arm.python_path or place.scratch),
        log_path=place.scratch / "child.log",
        timeout_s=order.timeout_s,
        start_timeout_s=order.start_timeout_s if speaks else None,  # text is read when all of it is there
        result_variable="ASSAY_RESULT" if speaks else "",
        keeps_stdout=not speaks,
    )


def _map_output(order: RunOrder, end: ChildEnd, read: Reader | None) -> dict[str, str]:
    """Put what a program printed in the place of lines; why counters of its mapping are absent."""
    if read is None or end.exit_code != 0:
        return {}
    if len(end.stdout) > MAX_OUTPUT_BYTES:
        end.bad_line, end.bad_reason = "", f"the program printed more than {MAX_OUTPUT_BYTES} bytes"
        return {}
    device = {"kind": _device_kind(order.card_uuid), "uuid": order.card_uuid}
    try:
        made = read(bytes(end.stdout), device)
    except Unread as exc:
        end.bad_line, end.bad_reason = "", str(exc)
        return {}
    end.lines = made.lines
    return made.absent


def _find_faults(order: RunOrder, stream: Stream) -> None:
    """What a line says that no program of this model could."""
    hello = stream.hello
    if stream.fault is None and hello is not None and hello.protocol not in PROTOCOLS:
        stream.fault = f"the program speaks protocol {hello.protocol}, served are {PROTOCOLS}"
    stream.fault = stream.fault or outside_vocabulary(order.cell, stream)
    if hello is not None and not hello.device.kind:
        stream.hello = hello.model_copy(
            update={"device": hello.device.model_copy(update={"kind": _device_kind(order.card_uuid)})}
        )


def _lie(order: RunOrder, stream: Stream) -> str | None:
    """What the program said of itself against what the parent knows; None when all of it agrees."""
    hello = stream.hello
    if hello is None:
        return None
    if hello.device.kind == PLAN_ONLY:
        return "the program says that it computed nothing: only the native engine may plan alone"
    if hello.device.uuid != order.card_uuid:
        return f"the program ran on card {hello.device.uuid}, expected {order.card_uuid}"
    model = hello.model.digest
    if model is not None and order.cell.model_digest and model != order.cell.model_digest:
        return f"the program read model {model[:12]}, expected {order.cell.model_digest[:12]}"
    return None


def _with_absent(record: RunRecord, arm: ArmPlan, absent: Mapping[str, str]) -> RunRecord:
    """The record with a reason for each counter that is asked for and not told."""
    why: dict[str, Reading] = dict.fromkeys(sorted(GATING), Missing(missing=UNDECLARED))
    why |= dict.fromkeys(arm.counters, UNTOLD)
    why |= {name: Missing(missing=reason) for name, reason in absent.items()}
    return record.model_copy(update={"counters": {**why, **record.counters}})


def _device_kind(card_uuid: str) -> str:
    return "sim" if card_uuid.startswith(SIMULATED) else "cuda"
