"""From a sweep file to a manifest: read, check, resolve, and spell out every cell."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.errors import EngineError
from jobs.adapters.registry import PEERS
from jobs.contract import IdentityContract
from jobs.errors import SpecError
from jobs.model import (
    ArmPlan,
    BuildPlan,
    CellPlan,
    Gate,
    Invariant,
    Limits,
    Lock,
    Manifest,
    RunSettings,
    Witness,
)
from jobs.model_bounds import model_bounds
from jobs.provenance import SHELL, ArmSource, ModelSource, ResolvedArm, ResolvedModel, Resolver
from jobs.reads import Reads
from jobs.spec.checks import AXES_APART, RUN_AXES, check_sweep, merged, role_of
from jobs.spec.faults import parse
from jobs.spec.form import Scalar, SweepForm
from jobs.spec.programs import is_kernel, reads_any_model, told_counters
from jobs.spec.requests import check_requests, config_place
from jobs.spec.reviewed import OnDisk, expectations, load_reviewed, reviewed
from jobs.spec.sizes import size_names, sized
from jobs.spec.yaml_lines import Path_, Source, read_file

P = TypeVar("P", ArmPlan, CellPlan)

MOST_SHOWN = 80
"""Characters of a path in a message."""


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """A sweep file that was read and found sound. Relative paths in it count from its own folder."""

    form: SweepForm
    source: Source
    folder: Path
    disk: OnDisk


def load(path: Path, size: str | None = None) -> SweepSpec:
    """Read and check a sweep file, every size of it, and take one. Raises SpecError with file, line and remedy."""
    whole = read_file(path, "give the path of a sweep file; sweeps/ has examples")
    forms = {name: _checked(sized(whole, name)) for name in (None, *size_names(whole))}
    source = sized(whole, size)
    form = forms[size]
    folder = path.resolve().parent
    return SweepSpec(form, source, folder, load_reviewed(form, source, folder))


def _checked(source: Source) -> SweepForm:
    form = parse(SweepForm, source)
    check_sweep(form, source)
    return form


def plan(spec: SweepSpec, resolver: Resolver) -> Manifest:
    """Resolve models, prompts and arms, and spell out the cells in the matrix's order.

    Arms come last: their builds may take minutes, and what is wrong with a run's request shows without them.
    Raises SpecError: what the resolver or the engine refuses gets the line of the key that asked for it.
    """
    form = spec.form
    models = {name: _model(spec, name, resolver) for name in _axis(form, "model")}
    written = tuple(_written(spec, name) for name in form.arms)
    cells = _cells(spec, models, resolver)
    check_requests(form, spec.source, cells, written)
    cells = tuple(_with_file(spec, cell, written[0].name) for cell in cells)
    written = tuple(_with_file(spec, arm, arm.name) for arm in written)
    arms = tuple(_resolved(spec, arm, resolver) for arm in written)
    common = form.model_dump(mode="python")
    base, head = (next((arm for arm in arms if arm.role == role), None) for role in ("base", "head"))
    assert base is not None
    declared, proposed = expectations(form, spec.folder, spec.disk, base, head)
    return Manifest(
        name=form.sweep,
        description=form.description,
        source_text=spec.source.text,
        arms=arms,
        cells=cells,
        varies=form.varies,
        gate=Gate(**common["gate"]),
        identity=IdentityContract(**common["identity"]),
        limits=Limits(**common["limits"]),
        expectations=declared,
        proposed=proposed,
        reviewed=reviewed(form, spec.folder, spec.disk, base),
    )


def _axis(form: SweepForm, axis: str) -> tuple[str, ...]:
    """Values of the model or prompt axis: as written in the matrix, else everything defined."""
    return tuple(form.matrix.get(axis, tuple(form.models if axis == "model" else form.prompts)))


def _model(spec: SweepSpec, name: str, resolver: Resolver) -> ResolvedModel:
    form = spec.form.models[name]
    path = None if form.path is None else _on_disk(spec, ("models", name, "path"), form.path)
    hollow = form.hollow or (path is not None and spec.form.run.arithmetic == "none")
    programs = all(reads_any_model(merged(spec.form, arm)) for arm in spec.form.arms)
    try:
        return resolver.model(
            name, ModelSource(path, form.build, form.seed, form.layers, hollow, programs, form.poured, form.skew)
        )
    except (SpecError, EngineError) as error:
        raise _placed(spec, ("models", name, "path" if form.build is None else "build"), error) from error


def _prompt_ids(spec: SweepSpec, name: str, model: ResolvedModel, resolver: Resolver) -> tuple[int, ...]:
    form = spec.form.prompts[name]
    if form.ids is not None:
        return form.ids
    if form.length is not None:
        return drawn_ids(name, form.length, model_bounds(model.path).vocabulary)
    assert form.text is not None, name
    path: Path_ = ("prompts", name, "text")
    try:
        ids = resolver.prompt_ids(model, form.text)
    except (SpecError, EngineError) as error:
        raise _placed(spec, path, error) from error
    if not ids:
        raise spec.source.error(path, f"the prompt {name!r} is empty for this tokenizer", "give text that has a token")
    return ids


def drawn_ids(name: str, length: int, vocabulary: int | None) -> tuple[int, ...]:
    """So many ids below `vocabulary`, the same for a name everywhere; zeros before the model is there to say."""
    if vocabulary is None:
        return (0,) * length
    drawn = hashlib.shake_256(f"prompt {name}".encode()).digest(8 * length)
    return tuple(int.from_bytes(drawn[at : at + 8], "big") % vocabulary for at in range(0, len(drawn), 8))


def _written(spec: SweepSpec, name: str) -> ArmPlan:
    """An arm as the file has it: nothing is known of its tree yet."""
    arm = merged(spec.form, name)
    assert arm.source is not None, name
    return ArmPlan(
        name=name,
        role=role_of(spec.form, name),
        source=arm.source,
        adapter=arm.adapter or "native",
        config=arm.config,
        env=arm.env,
        command=() if arm.command is None else (*SHELL, arm.command),
        build=None if arm.build is None else BuildPlan(**arm.build.model_dump()),
        counters=told_counters(arm),
        reads=None if arm.reads is None else Reads(**arm.reads.model_dump(exclude_none=True)),
        options=dict(arm.options or {}),
    )


def _resolved(spec: SweepSpec, arm: ArmPlan, resolver: Resolver) -> ArmPlan:
    """The arm with its tree, which may be built for that."""
    path: Path_ = ("arms", arm.name, "source")
    kind, _, value = arm.source.partition(":")
    if kind == "path":
        value = str(_on_disk(spec, path, value))
    try:
        runs = {"program": bool(arm.command), "peer": arm.adapter in PEERS}
        found: ResolvedArm = resolver.arm(arm.name, ArmSource(kind, value, arm.build, **runs))  # type: ignore[arg-type]
    except SpecError as error:
        raise _placed(spec, path, error) from error
    told = {
        "commit": found.commit,
        "note": found.note if arm.role == "base" else "",
        "tree_digest": found.tree_digest,
        "python_path": None if found.python_path is None else str(found.python_path),
        "build": None if arm.build is None else arm.build.model_copy(update={"failure": found.failure}),
    }
    if kind == "merge-base":  # from here on it is that commit, also for the reviewed files that are read there
        told["source"] = f"git:{found.commit}"
    return arm.model_copy(update=told)


def _with_file(spec: SweepSpec, asked: P, arm: str) -> P:
    """A cell or arm with its recorded routing named from the root: like all paths it counts from the sweep's folder."""
    text = asked.config.get("hot_experts")
    if not isinstance(text, str):
        return asked
    key = config_place(spec.form, arm, "hot_experts", text)
    file = _on_disk(spec, key, text)
    if not file.is_file():
        raise spec.source.error(key, f"hot_experts: no file {file}", "record one with --routing-out")
    return asked.model_copy(update={"config": {**asked.config, "hot_experts": str(file)}})


def _fits(spec: SweepSpec, model: str, found: ResolvedModel, prompt: str, ids: tuple[int, ...]) -> None:
    """Raise SpecError for a prompt that the engine would refuse in every run, or a lock that no id could ever meet."""
    bounds, tokens = model_bounds(found.path), spec.form.run.tokens
    if bounds.vocabulary is not None and max(ids) >= bounds.vocabulary:
        raise spec.source.error(
            ("prompts", prompt),
            f"the prompt {prompt!r} has the id {max(ids)}, and the vocabulary of model {model!r} ends at "
            f"{bounds.vocabulary - 1}",
            "take ids of the model's own tokenizer",
        )
    for path, of, word, given in _expected_ids(spec):
        worst = max(given)
        if of == prompt and bounds.vocabulary is not None and worst >= bounds.vocabulary:
            raise spec.source.error(
                path,
                f"{word} has the id {worst}, and the vocabulary of model {model!r} ends at {bounds.vocabulary - 1}",
                "no output can hold it: take an id of the model's own tokenizer",
            )
    if bounds.context is not None and len(ids) + tokens > bounds.context:
        raise spec.source.error(
            ("run", "tokens"),
            f"the prompt {prompt!r} and run.tokens need {len(ids) + tokens} positions, model {model!r} has "
            f"{bounds.context}",
            "ask for fewer tokens, or shorten the prompt",
        )


def _expected_ids(spec: SweepSpec) -> Iterator[tuple[Path_, str, str, tuple[int, ...]]]:
    """Ids of outputs that the file names: where, of which prompt, in what, and which."""
    for index, lock in enumerate(spec.form.locks):
        yield ("locks", index, "expected"), lock.prompt, "a lock", (lock.expected,)
        if lock.allowed:
            yield ("locks", index, "allowed"), lock.prompt, "a lock", lock.allowed
    for index, tie in enumerate(spec.form.identity.ties):
        yield ("identity", "ties", index, "ids"), tie.prompt, "a near tie", tie.ids


def _on_disk(spec: SweepSpec, key: Path_, text: str) -> Path:
    """A path that the file names. Raises SpecError where it cannot be one: no such user, a loop, a name too long."""
    try:
        path = (spec.folder / Path(text).expanduser()).resolve()
        path.exists()  # Python passes over a path that is not there, and raises for one that cannot be
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).partition(" from ")[0].rstrip(".")
        shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
        raise spec.source.error(key, f"the path {shown!r} cannot be used: {why}", "give a folder's path") from error
    return path


def _placed(spec: SweepSpec, path: Path_, error: SpecError | EngineError) -> SpecError:
    """The same error, of the same class where that is ours, pointing into the sweep file unless it points somewhere."""
    if isinstance(error, EngineError):
        return spec.source.error(path, error.message, error.remedy)
    if error.file:
        return error
    return type(error)(error.message, error.remedy, file=spec.source.file, line=spec.source.line(path))


def _cells(spec: SweepSpec, models: Mapping[str, ResolvedModel], resolver: Resolver) -> tuple[CellPlan, ...]:
    form = spec.form
    prompts = _axis(form, "prompt")
    ids = {(m, p): _prompt_ids(spec, p, models[m], resolver) for m in models for p in prompts}
    for (model, prompt), taken in ids.items():
        _fits(spec, model, models[model], prompt, taken)
    axes = {name: values for name, values in form.matrix.items() if name not in AXES_APART or name in RUN_AXES}
    cells = []
    for model, prompt in itertools.product(models, prompts):
        for values in itertools.product(*axes.values()):
            config = dict(zip(axes, values, strict=True))
            at = prompts.index(prompt)
            turned = [ids[model, name] for name in (*prompts[at:], *prompts[:at])]
            cells.append(_cell(spec, model, models[model], prompt, turned[: _widest(form, config)], config))
    return tuple(cells)


def _widest(form: SweepForm, config: Mapping[str, Scalar]) -> int:
    """The largest batch of any arm in a cell."""
    asked = [{**config, **merged(form, name).config}.get("batch") for name in form.arms]
    return max(batch if isinstance(batch, int) else 1 for batch in asked)


def _cell(
    spec: SweepSpec,
    model: str,
    found: ResolvedModel,
    prompt: str,
    ids: Sequence[tuple[int, ...]],
    config: dict[str, Scalar],
) -> CellPlan:
    """A cell; `ids` are the prompts of its sequences, its own prompt's first."""
    form = spec.form
    at = {"model": model, "prompt": prompt, **config}
    alone = all(is_kernel(merged(form, name)) for name in form.arms)
    run = {name: config[name] for name in RUN_AXES if name in config}
    return CellPlan(
        cell="/".join([model, prompt, *(f"{name}={_shown(value)}" for name, value in config.items())]),
        kind="kernel" if alone else "decode",
        model=model,
        model_path=str(found.path),
        model_digest=found.digest,
        prompt=prompt,
        prompt_ids=ids[0],
        further_prompts=tuple(ids[1:]),
        card_class=form.cards.class_,
        card_memory_bytes=form.cards.memory_bytes,
        config={name: value for name, value in config.items() if name not in run},
        settings=RunSettings(**{**form.run.model_dump(), **run}),
        arms=tuple(form.arms),
        blocks=form.blocks.planned,
        fresh_blocks=form.blocks.deciding or 0,
        order=form.blocks.order,
        repeats=form.blocks.repeats,
        witnesses=tuple(
            Witness(expr=row.expr, arms=row.arms) for row in form.witnesses if row.where.items() <= at.items()
        ),
        invariants=tuple(Invariant(**row.model_dump()) for row in form.invariants),
        locks=tuple(Lock(**row.model_dump()) for row in form.locks if row.prompt == prompt),
    )


def _shown(value: Scalar) -> str:
    """A config value in a cell's name: booleans as on and off, an absent bound as none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
