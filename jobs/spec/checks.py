"""What a sweep file must hold beyond its shape: known names, values the engine takes, arms that can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from engine import config as engine_config
from engine.counters import COUNTERS
from engine.errors import BadRequest
from jobs import expressions, gates
from jobs.adapters.registry import KNOWN
from jobs.errors import SpecError
from jobs.metrics import METRICS, counters_of, expression_names
from jobs.model import ArmRole
from jobs.spec.faults import first_of, nearest
from jobs.spec.form import LEAST_SCREENING, ArmForm, BuildForm, ExpectationsForm, SweepForm
from jobs.spec.programs import check_programs
from jobs.spec.yaml_lines import Path_, Source

RUN_AXES = ("warmups",)
"""Settings of a run that may be an axis of the matrix."""
AXES_APART = ("model", "prompt", *RUN_AXES)
VARIES_APART = ("build", "env", "program", "device")
"""What `varies` may name beside engine config names: the engine's code, the arm's environment, its adapter with what
that is told, and the kind of device that computes, as where one engine runs on the card and one beside it."""

SOURCES = "checkout, installed, path:DIR, git:REF, merge-base:REF, or like: ARM in place of a source"
MOST_CELLS = 10_000
MOST_SOURCE = 4096
PLAIN_SOURCES = frozenset({"checkout", "installed"})
ROLES: dict[str, ArmRole] = {"base": "base", "head": "head", "null": "null", "anchor": "anchor"}


def check_sweep(form: SweepForm, source: Source) -> None:
    """Raise SpecError with every fault found, the first by line in front."""
    faults = [
        *_models(form, source),
        *_prompts(form, source),
        *_arm_likes(form, source),
        *_matrix(form, source),
        *_varies(form, source),
        *_expressions(form, source),
        *_locks(form, source),
        *_contract(form, source),
        *_gate(form, source),
        *_blocks(form, source),
        *_plan_only(form, source),
    ]
    if not faults:  # these need arms whose `like` is sound
        arms = {name: merged(form, name) for name in form.arms}
        programs = check_programs(form, arms, source)
        faults = [*_roles(form, source), *_differences(form, source), *_unbuildable(form, source), *programs]
    if faults:
        raise first_of(faults)


def merged(form: SweepForm, name: str) -> ArmForm:
    """An arm with what it takes from `like` filled in."""
    chain = [form.arms[name]]
    while (like := chain[-1].like) is not None:
        chain.append(form.arms[like])
    made = chain.pop()
    for arm in reversed(chain):
        made = ArmForm(
            source=arm.source or made.source,
            role=arm.role,
            adapter=arm.adapter or made.adapter,
            command=arm.command or made.command,
            counters=arm.counters if arm.counters is not None else made.counters,
            reads=arm.reads if "reads" in arm.model_fields_set else made.reads,
            options=None if arm.options is made.options is None else {**(made.options or {}), **(arm.options or {})},
            build=arm.build if "build" in arm.model_fields_set else made.build,  # `build: null` takes none over
            config={**made.config, **arm.config},
            env={**made.env, **arm.env},
        )
    return made


def role_of(form: SweepForm, name: str) -> ArmRole:
    """An arm's role: as written, else by its name."""
    return form.arms[name].role or ROLES.get(name, "variant")


def check_expectations(form: ExpectationsForm, source: Source) -> None:
    """Raise SpecError when an expectation names no known metric or counter, or one that never gates."""
    faults = [
        source.error(("expectations", index, "metric"), *told)
        for index, row in enumerate(form.expectations)
        if (told := _undeclarable(row.metric))
    ]
    if faults:
        raise first_of(faults)


def known_metric(name: str) -> bool:
    """Whether a registry holds a counter or metric of that name."""
    return name in METRICS or name in COUNTERS


def _undeclarable(name: str) -> tuple[str, str] | None:
    """What is wrong with a metric that cannot be declared, and what to declare in its place."""
    if name in gates.DECLARABLE:
        return None
    if not known_metric(name):
        return f"unknown metric {name!r}", nearest(name, gates.DECLARABLE)
    if name not in gates.EXACT:
        return f"{name} is a time: only exact counters can be declared", "leave it out; gate.time says what times do"
    behind = counters_of(name) & gates.GATING if name in METRICS else ()
    remedy = f"declare {' or '.join(sorted(behind))}" if behind else f"those that do: {', '.join(sorted(gates.GATING))}"
    return f"{name} {gates.NEVER_GATES}", remedy


def _models(form: SweepForm, source: Source) -> Iterator[SpecError]:
    for name, model in form.models.items():
        path: Path_ = ("models", name)
        if (model.build is None) == (model.path is None):
            yield source.error(path, f"model {name!r} needs one of build and path", "build: a zoo name, or path: DIR")
        elif model.build is None:
            for key in ("seed", "layers", "hollow", "poured", "skew"):
                if getattr(model, key):
                    yield source.error((*path, key), f"{key} goes with build", f"a folder has no {key}; remove it")
        elif model.hollow and form.run.arithmetic == "full":
            remedy = "run: {arithmetic: none}, or have the model built whole"
            yield source.error((*path, "hollow"), f"model {name!r} is hollow: it can be planned alone", remedy)


def _prompts(form: SweepForm, source: Source) -> Iterator[SpecError]:
    for name, prompt in form.prompts.items():
        if sum(given is not None for given in (prompt.ids, prompt.text, prompt.length)) != 1:
            remedy = 'ids: [..], text: "..", or length: N'
            yield source.error(("prompts", name), f"prompt {name!r} needs one of ids, text and length", remedy)


def _arm_likes(form: SweepForm, source: Source) -> Iterator[SpecError]:
    for name, arm in form.arms.items():
        path: Path_ = ("arms", name)
        if arm.like is not None and arm.like not in form.arms:
            yield source.error((*path, "like"), f"no arm {arm.like!r}", nearest(arm.like, form.arms))
        elif _loops(form, name):
            yield source.error((*path, "like"), f"arm {name!r} is like itself", "give one of them a source")
        elif arm.source is None and arm.like is None:
            yield source.error(path, f"arm {name!r} needs a source", SOURCES)
        if arm.source is not None and len(arm.source) > MOST_SOURCE:
            remedy = f"at most {MOST_SOURCE}"
            yield source.error((*path, "source"), f"the source has {len(arm.source)} characters", remedy)
        elif arm.source is not None:
            yield from _source(arm.source, (*path, "source"), source)
        if arm.adapter is not None and arm.adapter not in KNOWN:
            message = f"unknown adapter {arm.adapter!r}"
            yield source.error((*path, "adapter"), message, nearest(arm.adapter, KNOWN))
        for key, value in arm.config.items():
            yield from _config_value(key, value, (*path, "config", key), source)
        for key in arm.env:
            if not key.replace("_", "a").isalnum() or key[0].isdigit():
                yield source.error((*path, "env", key), f"{key!r} is not an environment variable's name", "rename it")
        if arm.build is not None:
            yield from _build(arm.build, (*path, "build"), source)


def _build(build: BuildForm, path: Path_, source: Source) -> Iterator[SpecError]:
    if not build.command.strip():
        yield source.error((*path, "command"), "the build command is empty", "give the shell command that builds")
    seen: set[PurePosixPath] = set()
    for index, text in enumerate(build.outputs):
        output, place = PurePosixPath(text), (*path, "outputs", index)
        if output.is_absolute() or ".." in output.parts:
            yield source.error(place, f"the output {text!r} is not inside the arm's tree", "a path below its root")
        elif not output.parts or not text.strip():
            yield source.error(place, f"the output {text!r} names no file", "a path below the tree's root")
        elif output in seen:
            yield source.error(place, f"the output {text!r} stands twice", "remove one")
        seen.add(output)


def _unbuildable(form: SweepForm, source: Source) -> Iterator[SpecError]:
    for name in form.arms:
        arm = merged(form, name)
        if arm.build is not None and arm.source == "installed":
            remedy = "give it a checkout, path or git ref as source, or write build: null"
            yield source.error(("arms", name, "build"), f"arm {name!r} is installed: there is no tree to build", remedy)


def _loops(form: SweepForm, name: str) -> bool:
    seen = [name]
    while (like := form.arms[seen[-1]].like) is not None and like in form.arms:
        if like in seen:
            return True
        seen.append(like)
    return False


def _source(text: str, path: Path_, source: Source) -> Iterator[SpecError]:
    kind, colon, value = text.partition(":")
    if kind in {"path", "git", "merge-base"} and (not colon or not value.strip()):
        yield source.error(path, f"source {text!r} names no {'folder' if kind == 'path' else 'ref'}", f"{kind}:NAME")
    elif kind not in {"path", "git", "merge-base", *PLAIN_SOURCES} or (colon and kind in PLAIN_SOURCES):
        yield source.error(path, f"unknown source {text!r}", f"known: {SOURCES}")


def _config_value(name: str, value: Any, path: Path_, source: Source) -> Iterator[SpecError]:
    try:
        engine_config.check({name: value})
    except BadRequest as error:
        yield source.error(path, error.message, error.remedy)


def _matrix(form: SweepForm, source: Source) -> Iterator[SpecError]:
    known = {*engine_config.CONFIG_NAMES, *AXES_APART}
    cells = 1
    for axis, values in form.matrix.items():
        cells *= len(values)
        holders = [name for name, arm in form.arms.items() if axis in arm.config]
        if holders:
            place: Path_ = ("arms", holders[0], "config", axis)
            yield source.error(place, f"{axis!r} is also in the matrix", "keep one of the two")
        if axis not in known:
            yield source.error(("matrix", axis), f"unknown matrix axis {axis!r}", nearest(axis, known))
            continue
        seen: set[tuple[type, Any]] = set()
        for index, value in enumerate(values):
            path: Path_ = ("matrix", axis, index)
            if (type(value), value) in seen:
                yield source.error(path, f"{value!r} stands twice in {axis}", "remove one")
            seen.add((type(value), value))
            if axis in RUN_AXES:
                yield from _run_value(form, axis, value, path, source)
            elif axis not in AXES_APART:
                yield from _config_value(axis, value, path, source)
            elif value not in (defined := form.models if axis == "model" else form.prompts):
                yield source.error(path, f"no {axis} {value!r}", nearest(str(value), defined))
    if cells > MOST_CELLS:
        yield source.error(("matrix",), f"the matrix has {cells} cells", f"at most {MOST_CELLS}; split the sweep")


def _run_value(form: SweepForm, axis: str, value: Any, path: Path_, source: Source) -> Iterator[SpecError]:
    if axis in form.run.model_fields_set:
        yield source.error(("run", axis), f"{axis!r} is also in the matrix", "keep one of the two")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= engine_config.MOST_TIMES:
        told = f"{axis} takes a whole number from 0 to {engine_config.MOST_TIMES}"
        yield source.error(path, f"{axis} is {value!r}", told)


def _varies(form: SweepForm, source: Source) -> Iterator[SpecError]:
    known = {*engine_config.CONFIG_NAMES, *VARIES_APART}
    for index, name in enumerate(form.varies):
        if name not in known:
            yield source.error(("varies", index), f"unknown factor {name!r} in varies", nearest(name, known))
        elif name in form.matrix and not any(name in arm.config for arm in form.arms.values()):
            remedy = "a matrix axis is equal in all arms of a cell; remove one of the two"
            yield source.error(("varies", index), f"{name!r} is both in varies and in the matrix", remedy)


def _expressions(form: SweepForm, source: Source) -> Iterator[SpecError]:
    rows = [(("witnesses", i, "expr"), row.expr) for i, row in enumerate(form.witnesses)]
    rows += [(("invariants", i, "expr"), row.expr) for i, row in enumerate(form.invariants)]
    for path, expr in rows:
        try:
            expressions.check(expr, expression_names())
        except SpecError as error:
            yield source.error(path, error.message, error.remedy)
    for index, witness in enumerate(form.witnesses):
        for place, arm in enumerate(witness.arms):
            if arm not in form.arms:
                yield source.error(("witnesses", index, "arms", place), f"no arm {arm!r}", nearest(arm, form.arms))
        for axis, value in witness.where.items():
            where: Path_ = ("witnesses", index, "where", axis)
            if axis not in form.matrix:
                yield source.error(where, f"no axis {axis!r} in the matrix", nearest(axis, form.matrix))
            elif value not in form.matrix[axis]:
                values = ", ".join(map(str, form.matrix[axis]))
                yield source.error(where, f"{axis} is never {value!r}", f"its values are {values}")


def _locks(form: SweepForm, source: Source) -> Iterator[SpecError]:
    for index, lock in enumerate(form.locks):
        yield from _place_of_ids(form, source, ("locks", index), lock.prompt, lock.index)
        if lock.margin is not None and not 0 <= lock.margin[0] <= lock.margin[1] < math.inf:
            told = f"[{lock.margin[0]:g}, {lock.margin[1]:g}] is no band of margins"
            yield source.error(("locks", index, "margin"), told, "[LEAST, MOST] in logits, from 0 up: [0.05, 0.15]")


def _place_of_ids(form: SweepForm, source: Source, path: Path_, prompt: str, index: int) -> Iterator[SpecError]:
    """A prompt of the sweep, and an index that its output has."""
    if prompt not in form.prompts:
        yield source.error((*path, "prompt"), f"no prompt {prompt!r}", nearest(prompt, form.prompts))
    if index >= form.run.tokens:
        remedy = f"indices run from 0 to {form.run.tokens - 1}"
        yield source.error((*path, "index"), f"index {index} is past run.tokens {form.run.tokens}", remedy)


def _contract(form: SweepForm, source: Source) -> Iterator[SpecError]:
    least = form.identity.min_tokens
    path: Path_ = ("identity", "min_tokens")
    if least is not None and form.identity.compare != "prefix":
        yield source.error(path, "min_tokens goes with compare: prefix", "a full comparison asks for every token")
    elif least is not None and least > form.run.tokens:
        yield source.error(path, f"min_tokens {least} is more than run.tokens {form.run.tokens}", "ask for fewer")
    if "batch" not in form.identity.scope and len(set(form.matrix.get("batch", ()))) < 2:
        remedy = "matrix: {batch: [1, 4]}, or name batch in it"
        yield source.error(("identity", "scope"), "a scope over batches, and the matrix has fewer than two", remedy)
    yield from _ties(form, source)


def _ties(form: SweepForm, source: Source) -> Iterator[SpecError]:
    """Near ties are listed where the contract says so, and there alone."""
    ties, listed = form.identity.ties, form.identity.near_ties == "listed"
    if listed and not ties:
        remedy = "ties: a list of {prompt, index, ids, reason}, or near_ties: refuse"
        yield source.error(("identity", "near_ties"), "no near tie is listed", remedy)
    elif ties and not listed:
        yield source.error(("identity", "ties"), "ties goes with near_ties: listed", "near_ties: listed")
    for index, tie in enumerate(ties):
        path: Path_ = ("identity", "ties", index)
        yield from _place_of_ids(form, source, path, tie.prompt, tie.index)
        if len(set(tie.ids)) < len(tie.ids):
            yield source.error(
                (*path, "ids"), "an id is there twice", "the ids that may stand for each other, once each"
            )


def _blocks(form: SweepForm, source: Source) -> Iterator[SpecError]:
    if form.blocks.deciding is not None and form.blocks.planned < LEAST_SCREENING:
        message = f"blocks.count is {form.blocks.planned}, too few to screen for the blocks that decide"
        remedy = f"write {LEAST_SCREENING} or more (8 without it), or leave blocks.deciding out"
        yield source.error(("blocks", "count"), message, remedy)


def _gate(form: SweepForm, source: Source) -> Iterator[SpecError]:
    if all(action == "off" for action in (form.gate.identity, form.gate.exact, form.gate.time)):
        remedy = "set one of identity, exact and time to block or advise"
        yield source.error(("gate",), "every gate is off: nothing would be judged", remedy)


def _plan_only(form: SweepForm, source: Source) -> Iterator[SpecError]:
    """A run without arithmetic has no tokens: nothing may be claimed of them, and no card is used."""
    if form.run.arithmetic == "full":
        return
    if form.gate.identity != "off":
        yield source.error(("gate",), "a run without arithmetic gives no tokens to judge", "gate: {identity: off}")
    if form.gate.time != "off":
        yield source.error(("gate",), "a run without arithmetic has no time to judge", "gate: {time: off}")
    if form.run.device != "sim":
        yield source.error(("run", "arithmetic"), "a run without arithmetic uses no card", "add device: sim")
    if form.locks:
        yield source.error(("locks",), "a run without arithmetic gives no ids to lock", "remove the locks")


def _roles(form: SweepForm, source: Source) -> Iterator[SpecError]:
    names = list(form.arms)
    roles = {name: role_of(form, name) for name in names}
    if len(names) < 2:
        yield source.error(("arms",), "one arm compares with nothing", "add head, or null: {like: base}")
    if roles[names[0]] != "base":
        yield source.error(("arms", names[0]), f"the first arm is {names[0]!r}, not the base", "write base first")
    if len(names) > 1 and not set(roles.values()) - {"base", "anchor"}:
        yield source.error(("arms",), "no arm is held against base", "add head: an anchor is held against head alone")
    for role in ("base", "head", "null", "anchor"):
        holders = [name for name in names if roles[name] == role]
        if len(holders) > 1:
            yield source.error(
                ("arms", holders[1]), f"{' and '.join(holders)} both have the role {role}", "role: variant for others"
            )


def _differences(form: SweepForm, source: Source) -> Iterator[SpecError]:
    base = merged(form, next(iter(form.arms)))
    for name in list(form.arms)[1:]:
        arm = merged(form, name)
        if role_of(form, name) == "null" and _made_of(arm) != _made_of(base):
            yield source.error(("arms", name), f"the null arm {name!r} differs from base", "write it as {like: base}")
            continue
        differing = [key for key in {**base.config, **arm.config} if _value(base, key) != _value(arm, key)]
        apart = [("env", arm.env != base.env), ("program", _program(arm) != _program(base))]
        for key in [*differing, *(key for key, differs in apart if differs)]:
            if key not in form.varies:
                places: dict[str, Path_] = {"env": ("arms", name, "env"), "program": ("arms", name)}
                path = places.get(key, ("arms", name, "config", key))
                yield source.error(path, f"arm {name!r} differs from base in {key}", f"name it: varies: [{key}]")


def _made_of(arm: ArmForm) -> tuple[Any, ...]:
    return (arm.source, arm.build, arm.config, arm.env, _program(arm))


def _program(arm: ArmForm) -> tuple[Any, ...]:
    """What an arm is run by: another unit or another place of a figure is another measure."""
    return (arm.adapter or "native", arm.command, arm.counters, arm.reads, arm.options or None)


def _value(arm: ArmForm, key: str) -> Any:
    """A config value as the engine will take it: what is not written has the engine's default."""
    return arm.config.get(key, getattr(engine_config.EngineConfig(), key))
