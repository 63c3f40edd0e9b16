"""Damaged model folders, one kind of damage a case, and the process that loads and runs them under watch.

`damage` is a function of folder and seed alone, so a case that fails is named by both. The watch runs case after case
in one process: what it opens is written down by an audit hook, its memory is bounded, and the parent's clock ends it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]

from engine.config import parse_request
from engine.errors import EXIT_KINDS, EngineError
from engine.journal import Collected
from engine.run import execute

GRAPH, DATA, CONFIG = "model.onnx", "model.onnx.data", "genai_config.json"
SECRET = "secret.data"
"""A file beside the case's folder, as long as any data file: what damaged locations and links point at."""
_TEXTS = (
    "",
    "input_ids",
    f"../{SECRET}",
    "/etc/hostname",
    "/dev/zero",
    "sub/..",
    "x" * 300,
    "%d",
    "%s",
    "ai.onnx",
    "\0",
)
_NUMBERS = (0, 1, -1, 2, 3, 5, 7, 16, 127, 128, 4096, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, 1e-30, 1e38, float("inf"), float("-inf"), float("nan"))
_ODD: tuple[Any, ...] = (None, True, [], {}, [1], {"a": 1}, 10**30, "0")
_MEMORY_BYTES = 3 << 30
_OWN_STATUS = os.path.realpath("/proc/self/status")


def damage(source: Path, into: Path, seed: int) -> str:
    """Write a copy of a model folder with damage of one kind; what was done, in words."""
    chance = random.Random(seed)
    into.mkdir()
    for name in (GRAPH, DATA, CONFIG):
        os.link(source / name, into / name)
    kind = chance.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])[0]
    return f"{kind}: {_KINDS[kind][0](into, chance)}"


def _replace(path: Path, content: bytes) -> None:
    path.unlink()  # the file is a hard link to the whole model's
    path.write_bytes(content)


def _flipped(name: str) -> Callable[[Path, random.Random], str]:
    def act(folder: Path, chance: random.Random) -> str:
        content = bytearray((folder / name).read_bytes())
        places = [chance.randrange(len(content)) for _ in range(chance.choice((1, 1, 2, 4, 16, 64)))]
        for at in places:
            content[at] = chance.choice(
                (content[at] ^ (1 << chance.randrange(8)), 0, 255, *chance.choices(b"019-.,:%e", k=2))
            )
        _replace(folder / name, bytes(content))
        return f"bytes {places[:4]} of {name}"

    return act


def _cut(folder: Path, chance: random.Random) -> str:
    name = chance.choice((GRAPH, DATA, CONFIG))
    content = (folder / name).read_bytes()
    kept = chance.choice((0, 1, len(content) - 1, chance.randrange(len(content))))
    _replace(folder / name, content[:kept])
    return f"{name} cut to {kept} bytes"


def _spliced(folder: Path, chance: random.Random) -> str:
    name = chance.choice((GRAPH, GRAPH, CONFIG, DATA))
    content = bytearray((folder / name).read_bytes())
    size = chance.choice((1, 4, 32, 256))
    start, to = chance.randrange(len(content)), chance.randrange(len(content))
    content[to : to + chance.choice((0, size))] = content[start : start + size]
    _replace(folder / name, bytes(content))
    return f"{size} bytes of {name} from {start} to {to}"


def _linked(folder: Path, chance: random.Random) -> str:
    name = chance.choice((GRAPH, DATA, CONFIG))
    target = chance.choice((f"../{SECRET}", "/dev/zero", "/etc/hostname", name, "..", DATA))
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    return f"{name} is a link to {target}"


def _graph_fields(folder: Path, chance: random.Random) -> str:
    model = onnx.load(str(folder / GRAPH), load_external_data=False)
    names = [n.name for n in model.graph.node] + [name for n in model.graph.node for name in n.output]
    texts = [*names, *(t.name for t in model.graph.initializer), *(n.op_type for n in model.graph.node)]
    done = [_one_field(model, chance, texts) for _ in range(chance.choice((1, 1, 2, 3)))]
    _replace(folder / GRAPH, model.SerializeToString())
    return "; ".join(done)


def _one_field(model: onnx.ModelProto, chance: random.Random, texts: list[str]) -> str:
    """Change one field anywhere: first a kind of field is drawn, so that rare kinds have their turn, then one of it."""
    places: dict[str, list[tuple[Message, FieldDescriptor]]] = {}
    for message, field in _fields(model):
        places.setdefault(field.full_name, []).append((message, field))
    message, field = chance.choice(places[chance.choice(sorted(places))])
    here = getattr(message, field.name)
    if field.is_repeated:
        return f"{field.full_name} {_repeated(here, field, chance, texts)}"
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        message.ClearField(field.name)
        return f"{field.full_name} cleared"
    new = _scalar(here, field, chance, texts)
    setattr(message, field.name, new)
    return f"{field.full_name} {here!r:.40} -> {new!r:.40}"


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if field.is_repeated else [value]:
                yield from _fields(part)


def _repeated(here: Any, field: FieldDescriptor, chance: random.Random, texts: list[str]) -> str:
    at, other = chance.randrange(len(here)), chance.randrange(len(here))
    how = chance.choice(("drop", "double", "swap", "reverse", "set"))
    if how == "set" and field.type != FieldDescriptor.TYPE_MESSAGE:
        here[at] = _scalar(here[at], field, chance, texts)
        return f"[{at}] = {here[at]!r:.40}"
    values = list(here)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        values = [type(v).FromString(v.SerializeToString()) for v in values]
    if how == "drop":
        del values[at]
    elif how == "double":
        values.insert(other, values[at])
    elif how == "reverse":
        values.reverse()
    else:
        values[at], values[other] = values[other], values[at]
    del here[:]
    here.extend(values)
    return f"{how} {at} {other}"


def _scalar(here: Any, field: FieldDescriptor, chance: random.Random, texts: list[str]) -> Any:
    if isinstance(here, str):
        if here.isdigit() and chance.random() < 0.7:  # offsets and lengths are numbers in words
            return str(_number(int(here), chance))
        return chance.choice((chance.choice(texts), chance.choice(_TEXTS)))
    if isinstance(here, bytes):
        return chance.choice((b"", here[:-1], here + b"\0", here[::-1], b"\xff" * len(here)))
    if isinstance(here, float):
        return chance.choice(_FLOATS)
    if field.enum_type is not None:
        return chance.choice([v.number for v in field.enum_type.values])
    wide = field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
    number = _number(int(here), chance)
    return abs(number) if field.type == FieldDescriptor.TYPE_UINT64 else number if wide else number % 2**31


def _number(here: int, chance: random.Random) -> int:
    low, high = -(2**63), 2**63 - 1
    return min(max(chance.choice((here + 1, here - 1, 2 * here, -here, *_NUMBERS)), low), high)


def _config_fields(folder: Path, chance: random.Random) -> str:
    config = json.loads((folder / CONFIG).read_text())
    leaves = list(_leaves(config))
    holder, key = chance.choice(leaves)
    there, other = chance.choice(leaves)
    how, old = chance.choice(("drop", "set", "set", "set", "swap")), holder[key]
    if how == "drop":
        del holder[key]
    elif how == "swap":
        holder[key], there[other] = there[other], holder[key]
    else:
        values: tuple[Any, ...] = (
            *_NUMBERS,
            *_FLOATS,
            *_TEXTS,
            None,
            True,
            [],
            {},
            [1],
            {"a": 1},
            10**30,
            "0",
            chance.randrange(600),
        )
        holder[key] = chance.choice(values)
    _replace(folder / CONFIG, json.dumps(config).encode())
    return f"{key} {how}: {old!r:.40} -> {holder.get(key, None) if isinstance(holder, dict) else holder!r:.40}"


def _leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield node, key
        if isinstance(value, dict | list):
            yield from _leaves(value)


_KINDS: dict[str, tuple[Callable[[Path, random.Random], str], int]] = {
    "graph bytes": (_flipped(GRAPH), 6),
    "graph fields": (_graph_fields, 10),
    "data bytes": (_flipped(DATA), 2),
    "config bytes": (_flipped(CONFIG), 2),
    "config fields": (_config_fields, 4),
    "cut": (_cut, 2),
    "spliced": (_spliced, 2),
    "linked": (_linked, 1),
}
"""Kinds of damage, and how often each comes."""


# -- the process under watch


class Watch:
    """What is opened, made or started while a case runs, but for its own folder and the interpreter's modules."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._seen: list[str] = []
        self._modules = tuple(os.path.realpath(p) for p in sys.path if p)
        sys.addaudithook(self._hear)

    @contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        """Listen; what was heard."""
        self._folder, self._seen = os.path.realpath(folder), []
        try:
            yield self._seen
        finally:
            self._folder = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        if event in ("os.remove", "os.rename", "os.mkdir", "os.truncate", "subprocess.Popen", "socket.connect"):
            self._seen.append(f"{event} {arguments[:2]!r:.200}")
        elif event == "open" and not isinstance(arguments[0], int):
            path, mode = os.path.realpath(os.fsdecode(arguments[0])), arguments[1] or ""
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            inside = path.startswith(self._folder + os.sep)
            module = path.endswith((".py", ".pyc")) and path.startswith(self._modules)
            if not (inside or module or path == _OWN_STATUS) or writes:
                self._seen.append(f"open {path} {mode}")


def one_case(case: Path, seed: int, watch: Watch) -> dict[str, Any]:
    """Load, plan and decode two tokens: the exit code, and what should not have been. What is raised goes through."""
    document = {"protocol": 1, "model": str(case), "prompt_ids": [1, 17, 42], "tokens": 2}
    request = parse_request({**document, "config": {"granule": 4096, "weight_budget": ("75%", None)[seed % 2]}})
    lines = Collected()
    with watch.over(case) as seen:
        code = execute(request, lines, iter(range(1 << 62)).__next__)
    outside = f" touched what is not its own: {seen[:3]}" if seen else ""
    return {"code": code, "fault": _doubt(code, lines) + outside}


def _doubt(code: int, lines: Collected) -> str:
    """What is wrong with a run's end, if anything."""
    if code not in EXIT_KINDS:
        return f"exit code {code} is none of the engine's"
    error = lines.of("error")
    if code == 0:
        return "" if len(lines.of("generation")[0]["ids"]) in (1, 2) else "a run without tokens"
    if len(error) != 1 or not error[0]["message"] or not error[0]["remedy"] or "do not read me" in error[0]["message"]:
        return f"an end without a word, or with one too many: {error}"
    return ""


def main(arguments: list[str]) -> int:
    """Run cases: `FIRST LAST FOLDER...`; a line before each and one after it, as JSON on stdout."""
    first, last, *folders = arguments
    sources = [Path(f) for f in folders]
    sys.dont_write_bytecode = True  # modules that a damaged model is the first to need
    watch = Watch()
    with tempfile.TemporaryDirectory() as made:
        below = Path(made)
        (below / SECRET).write_bytes(b"do not read me" * 100_000)
        _warm(sources[0])
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
        for seed in range(int(first), int(last)):
            source = sources[seed % len(sources)]
            what = damage(source, below / "case", seed)
            print(json.dumps({"seed": seed, "what": f"{source.name}; {what}"}), flush=True)
            print(json.dumps(one_case(below / "case", seed, watch)), flush=True)
            shutil.rmtree(below / "case")
    return 0


def _warm(source: Path) -> None:
    """One whole run, so that everything is imported."""
    document = {"protocol": 1, "model": str(source), "prompt_ids": [1], "tokens": 2}
    code = execute(parse_request(document), Collected(), iter(range(1 << 62)).__next__)
    if code:
        raise EngineError(f"{source} does not run undamaged")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
