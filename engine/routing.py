"""Which experts each step of a mixture chose for each token: recorded from a run in full, given to a plan-only run.

A trace is by position, not by pass: however a prompt is cut and whatever is batched, a pass over some positions asks
for the experts that those positions chose. Where no trace is had, a seed stands in, as any others would.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config import MOST_TOKENS
from engine.errors import BadRequest
from engine.plan import Operand, Plan, Step

FORMAT, VERSION = "assay routing", 1
ROUTED = "routed"
"""Operand of a mixture's step: the chosen experts, int32 [tokens, chosen], in the control block."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError, zlib.error)
"""What reading a file raises that is no trace."""

Choices = NDArray[np.int32]
"""[positions, slots]: the experts chosen at each position, those of all mixtures side by side."""


@dataclass(frozen=True, slots=True)
class Bank:
    """A step's bank of experts, of which each token chooses some; `expert_bytes` are of one expert's keys."""

    node: str
    experts: int
    chosen: int
    expert_bytes: int


class Given(Protocol):
    """Choices that are known beforehand."""

    def rows(self, sequence: int, first: int, count: int) -> Choices:
        """Those of some positions of a sequence, from `first` on."""
        ...


def routed(step: Step) -> Operand | None:
    """Where a step that reads experts has their choices; None where it reads none."""
    return next((o for o in step.operands if o.name == ROUTED and (step.keys or step.experts is not None)), None)


def bank_operands(step: Step) -> tuple[Operand, ...]:
    """The parts of a mixture's bank of experts, all of them as initialisers: what else it reads is no expert's."""
    return tuple(o for o in step.operands if o.ref.kind == "key" and o.name.startswith(("fc1", "fc2")))


def banks(plan: Plan) -> tuple[Bank, ...]:
    """Banks of a plan in the order of its steps."""
    found = []
    for step in plan.steps:
        if (operand := routed(step)) is not None:
            experts = next(o.ref.shape[-1] for o in step.operands if o.name == "router")
            bank = {o.ref.index for o in bank_operands(step)} if step.experts is None else step.experts.keys
            bank_bytes = sum(plan.keys[k].nbytes for k in bank)
            found.append(Bank(step.node, experts, operand.ref.shape[-1], bank_bytes // experts))
    return tuple(found)


def routed_bytes(plan: Plan) -> int:
    """Bytes of one sequence's choices in one pass."""
    return sum(4 * plan.rows * bank.chosen for bank in banks(plan))


def flat(choices: Choices, of: Sequence[Bank]) -> Choices:
    """Choices as steps write them: all of one step, [tokens, chosen], then all of the next."""
    return np.concatenate([part.reshape(-1) for part in _apart(choices, of)])


def by_position(written: Choices, of: Sequence[Bank]) -> Choices:
    """The other way round."""
    rows = written.size // sum(bank.chosen for bank in of)
    if rows == 1:
        return written.reshape(1, -1)
    ends = np.cumsum([rows * bank.chosen for bank in of])[:-1]
    return np.hstack([part.reshape(rows, -1) for part in np.split(written, ends)])


@dataclass(frozen=True, slots=True)
class Seeded:
    """Choices drawn from a seed, each expert as likely as another; the same for a position in every run."""

    seed: int
    banks: tuple[Bank, ...]

    def rows(self, sequence: int, first: int, count: int) -> Choices:
        """Drawn anew each time."""
        return np.stack([self._row(sequence, position) for position in range(first, first + count)])

    def _row(self, sequence: int, position: int) -> Choices:
        drawn = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, sequence, position])))
        return np.concatenate([drawn.permutation(b.experts)[: b.chosen] for b in self.banks]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Trace:
    """Choices of a run, by sequence."""

    choices: tuple[Choices, ...]

    def rows(self, sequence: int, first: int, count: int) -> Choices:
        """As recorded; that there are enough was checked on reading."""
        made: Choices = self.choices[sequence][first : first + count]
        assert len(made) == count, (sequence, first, count)
        return made


class Recorder:
    """Takes down what a run's first generation chose."""

    def __init__(self, sequences: int) -> None:
        self._parts: list[list[Choices]] = [[] for _ in range(sequences)]
        self._lengths = [0] * sequences

    def take(self, sequence: int, first: int, choices: Choices) -> None:
        """Choices of positions from `first` on; those of positions already taken down are later generations'."""
        if first == self._lengths[sequence]:
            self._parts[sequence].append(choices)
            self._lengths[sequence] += len(choices)

    def trace(self) -> Trace:
        """All of it."""
        return Trace(tuple(np.concatenate(parts) for parts in self._parts))


@dataclass(frozen=True, slots=True)
class Origin:
    """What a trace belongs to: the graph file's digest, the model's where it is known, banks, prompts."""

    graph_sha256: str
    model_digest: str | None
    banks: tuple[Bank, ...]
    prompts: tuple[tuple[int, ...], ...]


def write(path: Path, trace: Trace, origin: Origin) -> None:
    """Write a trace as engine/schemas/routing.json says. Raises BadRequest for a place that cannot be written."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "graph_sha256": origin.graph_sha256,
        "model_digest": origin.model_digest,
        "banks": _described(origin.banks),
        "sequences": [
            {
                "prompt_sha256": _digest(prompt),
                "prompt_tokens": len(prompt),
                "positions": len(choices),
                "experts": base64.b64encode(zlib.compress(choices.astype("<u2").tobytes(), 9)).decode(),
            }
            for prompt, choices in zip(origin.prompts, trace.choices, strict=True)
        ],
    }
    try:
        path.write_text(json.dumps(document))
    except OSError as error:
        raise BadRequest(f"--routing-out: {path} cannot be written: {error.strerror}", "write elsewhere") from error


def read(path: Path, origin: Origin, tokens: int) -> Trace:
    """Read a trace for a run of `tokens` tokens. Raises BadRequest for one that is not whole or not this run's."""
    try:
        document = _document(path, origin)
        found = document["sequences"]
        if len(found) != len(origin.prompts):
            raise _refused(path, f"has {len(found)} sequences, the run has {len(origin.prompts)}")
        return Trace(
            tuple(
                _sequence(path, index, entry, prompt, origin.banks, tokens)
                for index, (entry, prompt) in enumerate(zip(found, origin.prompts, strict=True))
            )
        )
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def read_counts(path: str, graph_sha256: str, model_digest: str | None, of: tuple[Bank, ...]) -> list[NDArray[Any]]:
    """How often a recorded run chose each expert, by bank, whatever its prompts; `hot_experts` is such a file.

    Raises BadRequest for one that is not whole or was recorded from another model.
    """
    try:
        everything = _all_choices(Path(path), Origin(graph_sha256, model_digest, of, ()))
    except BadRequest as error:
        remedy = "record it with --routing-out, from this model and any prompt"
        raise BadRequest(f"hot_experts: {error.message}", remedy) from error
    parts = zip(of, _apart(everything, of), strict=True)
    return [np.bincount(part.reshape(-1), minlength=bank.experts) for bank, part in parts]


def _all_choices(path: Path, origin: Origin) -> Choices:
    """Those of all sequences of a trace, one after another."""
    try:
        sequences = _document(path, origin)["sequences"]
        found = [_unpacked(path, index, entry, origin.banks) for index, entry in enumerate(sequences)]
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    if not found:
        raise _refused(path, "has no sequence")
    return np.concatenate(found)


def _document(path: Path, origin: Origin) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    if (document["format"], document["version"]) != (FORMAT, VERSION):
        raise _refused(path, f"is {document['format']!r} version {document['version']}, not {FORMAT!r} {VERSION}")
    _check_origin(path, document, origin)
    return document


def _check_origin(path: Path, document: dict[str, Any], origin: Origin) -> None:
    known = document["model_digest"], origin.model_digest
    if document["graph_sha256"] != origin.graph_sha256 or (None not in known and known[0] != known[1]):
        raise _refused(path, "was recorded from another model")
    if document["banks"] != _described(origin.banks):
        raise _refused(path, "names other steps, experts or choices than the plan has")


def _sequence(
    path: Path, index: int, entry: dict[str, Any], prompt: tuple[int, ...], of: tuple[Bank, ...], tokens: int
) -> Choices:
    if (entry["prompt_sha256"], entry["prompt_tokens"]) != (_digest(prompt), len(prompt)):
        raise _refused(path, f"was recorded from another prompt (sequence {index})")
    positions, needed = _positions(path, index, entry), len(prompt) + tokens - 1
    if positions < needed:
        raise _refused(path, f"has {positions} positions of sequence {index}, the run needs {needed}")
    return _unpacked(path, index, entry, of)


def _unpacked(path: Path, index: int, entry: dict[str, Any], of: tuple[Bank, ...]) -> Choices:
    positions = _positions(path, index, entry)
    slots = sum(bank.chosen for bank in of)
    size = 2 * positions * slots
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(base64.b64decode(entry["experts"], validate=True), size + 1)
    if len(raw) != size or not unpacker.eof:
        raise _refused(path, f"does not hold {positions} positions of {slots} experts (sequence {index})")
    choices = np.frombuffer(raw, "<u2").reshape(positions, slots).astype(np.int32)
    check(choices, of, str(path))
    return choices


def _positions(path: Path, index: int, entry: dict[str, Any]) -> int:
    positions = entry["positions"]
    if type(positions) is not int or not 1 <= positions <= MOST_TOKENS:
        raise _refused(path, f"has {positions!r} positions of sequence {index}, which is no number of them")
    return positions


def check(choices: Choices, of: Sequence[Bank], what: str) -> None:
    """Refuse an expert that a bank has not, and one that a token chose twice. Raises BadRequest."""
    for bank, part in zip(of, _apart(choices, of), strict=True):
        if part.size and not 0 <= part.min() <= part.max() < bank.experts:
            worst = int(part.max() if part.min() >= 0 else part.min())
            raise BadRequest(f"{what}: expert {worst} of {bank.node} is not among its {bank.experts}", _RECORD)
        ordered = np.sort(part, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            raise BadRequest(f"{what}: a token chose an expert of {bank.node} twice", _RECORD)


_RECORD = "record it with --routing-out, from this model and prompt and of as many tokens, or give seed:N"


def _unreadable(path: Path, error: Exception) -> BadRequest:
    return _refused(path, f"cannot be read: {type(error).__name__}: {error}")


def _refused(path: Path, why: str) -> BadRequest:
    return BadRequest(f"routing {path} {why}", _RECORD)


def _apart(choices: Choices, of: Sequence[Bank]) -> list[Choices]:
    return np.split(choices, np.cumsum([bank.chosen for bank in of])[:-1], axis=1)


def _described(of: Sequence[Bank]) -> list[dict[str, Any]]:
    return [{"node": bank.node, "experts": bank.experts, "chosen": bank.chosen} for bank in of]


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()
