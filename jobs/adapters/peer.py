"""The child's side of an engine that nobody here wrote: a library decodes, and lines of the child protocol tell of it.

A file beside this one holds each such engine: how it is opened, what it can be told and what it can witness. Here is
what they share: the request, the lines, and every way to end. Nothing of a library is imported before its run.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine import PROTOCOL
from engine.commands.ids import parse_ids
from engine.config import RunRequest, parse_request
from engine.errors import BadRequest, CannotLoad, EngineError, NonFiniteLogits, OutOfMemory
from engine.forced import save
from engine.interrupt import end_with, ended_by_signals
from engine.journal import Emit, to_fd

Scalar = str | int | bool | None
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that an arm may tell an engine: its default, whose type it has (text where that is None)."""

    default: Scalar
    meaning: str
    among: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks of an engine: the request as any engine gets it, and the arm's options, all of them."""

    request: RunRequest
    options: Mapping[str, Any]

    @property
    def on_card(self) -> bool:
        """Whether there is a card to run on; on a simulated one nothing but tokens can be tried."""
        return not (self.request.uuid or "").startswith("SIM-") and self.request.device != "sim"

    @property
    def positions(self) -> int:
        """Tokens that the prompt and what follows it take."""
        return len(self.request.prompt_ids) + self.request.tokens


@dataclass(frozen=True, slots=True)
class Made:
    """One generation: ids, the time to the first in ns, that of each further one, and counters by name.

    `ended`: an end id came, and it is the last one.
    """

    ids: list[int]
    prefill_ns: int
    step_ns: list[int]
    ended: bool = False
    counters: Mapping[str, int] = field(default_factory=dict)


class Decoder(Protocol):
    """An engine with its model loaded.

    `on` is the kind of device that computes: cuda or cpu. `settings` are those served, by the names of the engine's
    config; `facts` are of the model and the session.
    """

    settings: Mapping[str, Scalar]

    @property
    def on(self) -> str:
        """See the class."""
        ...

    @property
    def facts(self) -> Mapping[str, int | float | str]:
        """See the class."""
        ...

    def generate(self, prompt: Sequence[int], tokens: int, *, ignore_eos: bool) -> Made:
        """Greedy ids, ties to the lowest: as many as asked, or fewer where an end id came."""
        ...

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> Logits:
        """Logits after the prompt, then after each forced id: float32 [1 + forced, vocabulary]."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine as adapters know it.

    `distributions` are the packages whose versions are told. `counters` are those of ours that it tells, and `blind`
    says why it tells no others. `serves` are names of the engine's config that it can be given. `any_model`: it takes
    files that no engine of ours would load. `forces`: whether it can be fed given ids.
    """

    name: str
    module: str
    open: Callable[[Asked], Decoder]
    distributions: tuple[str, ...]
    blind: str
    counters: tuple[str, ...] = ("emitted_tokens",)
    serves: frozenset[str] = frozenset()
    options: Mapping[str, Option] = field(default_factory=dict)
    any_model: bool = False
    forces: bool = True


def library(name: str, remedy: str) -> Any:
    """A library by its name. Raises CannotLoad where it is absent or broken."""
    try:
        return import_module(name)
    except (ImportError, OSError) as error:
        raise CannotLoad(f"{name} cannot be imported: {error}", remedy) from error


def checked_best(row: NDArray[Any]) -> int:
    """The id of the highest logit, the lowest of several. Raises NonFiniteLogits; the highest of NaN and inf is one."""
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        raise NonFiniteLogits(f"the logit of id {best} is {row[best]}")
    return best


def main(peer: Peer, argv: Sequence[str] | None = None) -> int:
    """Serve one order of the parent; the exit code. The last word goes to the result stream, else to standard error."""
    arguments = _parser(peer).parse_args(argv)
    if arguments.control_fd is not None:
        end_with(arguments.control_fd)
    emit: Emit = (lambda _line: None) if arguments.result_fd is None else to_fd(arguments.result_fd)
    try:
        with ended_by_signals(tells=True):
            serve = _run if arguments.command == "run" else _logits
            serve(peer, arguments, emit)
    except EngineError as error:
        emit({"type": "error", "code": error.exit_code, "kind": error.kind, **_words(error)})
        print(f"error: {error}")
        return error.exit_code
    return 0


def _parser(peer: Peer) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -P -m {peer.module}", description=f"Decode with {peer.name}.")
    commands = parser.add_subparsers(required=True, dest="command")
    for name in ("run", "logits"):
        command = commands.add_parser(name)
        command.add_argument("--request", type=Path, required=True)
        command.add_argument("--result-fd", type=int)
        command.add_argument("--control-fd", type=int)
    command.add_argument("--forced-ids", default="")
    command.add_argument("--out", type=Path, required=True)
    return parser


def _asked(peer: Peer, path: Path) -> Asked:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path}: {error}", "give a request file") from error
    given = told.pop("options", {})
    if unknown := sorted(set(given) - set(peer.options)):
        raise BadRequest(f"{peer.name} has no option {unknown[0]!r}", f"known: {', '.join(peer.options)}")
    request = parse_request(told)
    if request.config.batch not in (None, 1) or request.further_prompts:
        raise BadRequest(f"{peer.name} decodes one sequence at a time", "leave batch out")
    options = {name: given.get(name, option.default) for name, option in peer.options.items()}
    return Asked(request, options)


def _run(peer: Peer, arguments: argparse.Namespace, emit: Emit) -> None:
    asked = _asked(peer, arguments.request)
    request = asked.request
    decoder = _opened(peer, asked)
    emit(_hello(peer, asked, decoder))
    totals = dict.fromkeys(peer.counters, 0)
    for index in range(request.warmups + request.generations):
        with _labelled():
            made = decoder.generate(request.prompt_ids, request.tokens, ignore_eos=request.ignore_eos)
        is_warmup = index < request.warmups
        counters = {"emitted_tokens": len(made.ids), **made.counters}
        for name in () if is_warmup else totals:
            totals[name] += counters.get(name, 0)
        emit(
            {
                "type": "generation",
                "index": index,
                "warmup": is_warmup,
                "ids": made.ids,
                "stop_reason": "eos" if made.ended else "length",
                "prefill_ns": made.prefill_ns,
                "step_ns": made.step_ns,
            }
        )
    emit({"type": "result", "counters": totals, "facts": dict(decoder.facts)})


def _logits(peer: Peer, arguments: argparse.Namespace, emit: Emit) -> None:
    asked = _asked(peer, arguments.request)
    forced = parse_ids(arguments.forced_ids, "forced")
    decoder = _opened(peer, asked)
    with _labelled():
        made = decoder.logits(asked.request.prompt_ids, forced)
    save(arguments.out, made, list(asked.request.prompt_ids), forced)


def _opened(peer: Peer, asked: Asked) -> Decoder:
    """The engine with its model. Whatever a library raises before it has decoded a token is that it cannot load."""
    try:
        with _labelled():
            return peer.open(asked)
    except EngineError:
        raise
    except Exception as error:
        raise CannotLoad(f"{type(error).__name__}: {_first_line(error)}", "see the end of its log") from error


@contextmanager
def _labelled() -> Iterator[None]:
    """Memory that ran out is told as such, whatever library says it, and anything else leaves its trace in the log."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
            raise OutOfMemory(_first_line(error), "use a smaller model, or free the card") from error
        raise


def _hello(peer: Peer, asked: Asked, decoder: Decoder) -> dict[str, Any]:
    served = {**asked.options, "version": ", ".join(map(_version, peer.distributions))}
    entries = {f"{peer.name}.{name}": value for name, value in served.items()} | dict(decoder.settings)
    kind = "sim" if not asked.on_card else decoder.on
    return {
        "type": "hello",
        "protocol": PROTOCOL,
        "module_path": str(Path(__file__).resolve()),
        "effective_config": {name: {"value": value, "source": "request"} for name, value in entries.items()},
        "device": {"kind": kind, "uuid": asked.request.uuid},
    }


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} of unknown version"


def _words(error: EngineError) -> dict[str, str]:
    return {"message": error.message, "remedy": error.remedy}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
