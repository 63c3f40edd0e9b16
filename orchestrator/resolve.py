"""The words of a sweep file as things on this machine: models built into the cache, prompts as ids, arms as trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.onnx_load import recorded_digest
from engine.tokens import Tokens
from engine.zoo import MODELS, build, model_digest
from jobs.adapters.model_files import AnyModelDigests
from jobs.arm_build import Built, build_place, build_tree, find_built
from jobs.baselines import Baseline, earlier_push, merge_base
from jobs.errors import SpecError
from jobs.git_trees import CheckoutState, checkout_state, export_engine, toplevel
from jobs.model import BuildFailure, BuildPlan
from jobs.provenance import (
    ArmSource,
    ModelSource,
    ResolvedArm,
    ResolvedModel,
    find_checkout,
    harness_digest,
    own_root,
    snapshot,
    tree_digest,
)
from jobs.redact import redact
from jobs.whole_trees import OURS, WholeTree, place_program, whole_folder, whole_ref
from orchestrator.settings import Settings

_ANOTHER_CACHE = "set XDG_CACHE_HOME to another folder"


@dataclass(frozen=True, slots=True)
class LocalResolver:
    """Resolves on this host. Raises SpecError for names and refs, EngineError for models that are broken or absent.

    `tell` hears what takes long. A model is read once by the same resolver, and an arm that could not be built is not
    tried again: its null arm would only fail as slowly.
    """

    settings: Settings
    tell: Callable[[str], None] = lambda _line: None
    _failed: dict[Path, BuildFailure] = field(default_factory=dict)
    _models: dict[ModelSource, ResolvedModel] = field(default_factory=dict)

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        """A folder that the user named, or one built from the zoo; its digest is computed here, from its files."""
        if source not in self._models:
            self._models[source] = self._read_model(name, source)
        return self._models[source]

    def _read_model(self, name: str, source: ModelSource) -> ResolvedModel:
        if source.path is not None:
            if source.any_files and source.path.exists():
                return ResolvedModel(source.path, AnyModelDigests()(source.path))
            if not source.path.is_dir():
                raise SpecError(f"model {name}: no folder {source.path}", "give a model's folder, or build: NAME")
            digest = model_digest(source.path, hollow=source.hollow)
            recorded = None if source.hollow else recorded_digest(source.path)
            if recorded is not None and recorded != digest:
                raise SpecError(
                    f"model {name}: the files of {source.path} are {digest[:12]}, its zoo.json says {recorded[:12]}",
                    f"they were changed after it was built: see `assay models check {source.path}`, or build it again",
                )
            return ResolvedModel(source.path, digest)
        assert source.build is not None
        if source.build not in MODELS:
            raise SpecError(f"model {name}: no model named {source.build!r} in the zoo", f"known: {', '.join(MODELS)}")
        folder = built_folder(self.settings, source)
        facts = build(  # every byte of it was just written or just read
            source.build,
            folder,
            seed=source.seed,
            layers=source.layers,
            hollow=source.hollow,
            poured=source.poured,
            skew=source.skew,
            cache_dir=self.settings.downloads,
            elsewhere=_ANOTHER_CACHE,
        )
        return ResolvedModel(folder, facts.model_digest)

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        """Text through the model's own tokenizer."""
        return tuple(Tokens(model.path).encode(text))

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        """An engine tree, copied aside when it could change under the runs; built there when the arm asks for that."""
        if source.kind == "merge-base":
            base = self._merge_base(source)
            return replace(self.arm(name, replace(source, kind="git", value=base.commit)), note=base.note)
        if source.peer:
            return ResolvedArm(None, harness_digest(own_root()))
        found = self._arm(name, source)
        if source.kind == "git" and found.commit is not None:
            return replace(found, note=earlier_push(self._holder(source), found.commit))
        return found

    def _arm(self, name: str, source: ArmSource) -> ResolvedArm:
        if source.build is not None:
            return self._built(name, source, source.build)
        if source.program:
            tree, commit = self.whole(name, source)
            return ResolvedArm(*place_program(tree, self.settings.trees), commit)
        if source.kind == "installed":
            return ResolvedArm(None, tree_digest(own_root()))
        if source.kind == "path":
            return ResolvedArm(*snapshot(Path(source.value), self.settings.trees))
        if source.kind == "git":
            return export_engine(self._repository(), source.value, self.settings.trees)
        checkout = self._checkout(name)
        place, digest = snapshot(checkout, self.settings.trees)
        return ResolvedArm(place, digest, _commit_words(checkout_state(checkout)))

    def whole(self, name: str, source: ArmSource) -> tuple[WholeTree, str | None]:
        """All of an arm's source, as a build or a program needs it, and its commit where it has one."""
        if source.kind == "path":
            return whole_folder(Path(source.value), program=source.program), None
        if source.kind == "merge-base":
            source = replace(source, kind="git", value=self._merge_base(source).commit)
        if source.kind == "git":
            return whole_ref(self._holder(source), source.value, program=source.program)
        assert source.kind == "checkout", source
        checkout = self._around() if source.program else self._checkout(name)
        return whole_folder(checkout, program=source.program), _commit_words(
            checkout_state(checkout, (".", f":(exclude){OURS}"))
        )

    def _built(self, name: str, source: ArmSource, build: BuildPlan) -> ResolvedArm:
        tree, commit = self.whole(name, source)
        place = build_place(tree, build, self.settings.trees)
        failure = self._failed.get(place)
        if failure is None:
            done = build_tree(
                tree, build, self.settings.trees, self.settings.environ, lambda line: self.tell(f"arm {name}: {line}")
            )
            if isinstance(done, Built):
                return ResolvedArm(done.tree, done.digest, commit)
            failure = BuildFailure(reason=redact(done.reason), log_tail=redact(done.log_tail))
            self._failed[place] = failure
        self.tell(f"arm {name}: build failed: {failure.reason} (log in {place / 'log'})")
        return ResolvedArm(None, "", commit, failure)

    def _merge_base(self, source: ArmSource) -> Baseline:
        return merge_base(self._holder(source), source.value, program=source.program)

    def _holder(self, source: ArmSource) -> Path:
        """The repository that holds an arm's commits."""
        return self._around() if source.program else self._repository()

    def _around(self) -> Path:
        """The working tree around the current folder, or that folder: what a program's checkout is."""
        return toplevel(self.settings.cwd) or self.settings.cwd

    def _repository(self) -> Path:
        return find_checkout(self.settings.cwd) or self.settings.cwd

    def _checkout(self, name: str) -> Path:
        checkout = find_checkout(self.settings.cwd)
        if checkout is None:
            raise SpecError(
                f"arm {name}: no checkout with an engine at or above {self.settings.cwd}",
                "run inside the repository under test, or use source: installed",
            )
        return checkout


@dataclass(frozen=True, slots=True)
class DryResolver:
    """Resolves for a look at the plan only: builds no model and no arm, and says what it would build."""

    real: LocalResolver
    absent: list[str]
    unbuilt: dict[str, str] = field(default_factory=dict)  # arm -> the command

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        """The model if it stands already, else its place, noted in `absent`."""
        if source.path is None and source.build in MODELS:
            folder = built_folder(self.real.settings, source)
            if not folder.exists():
                self.absent.append(f"{name} ({source.build})")
                return ResolvedModel(folder, "")
        return self.real.model(name, source)

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        """Ids if the model stands; one stand-in id otherwise, since only their presence matters for a look."""
        return self.real.prompt_ids(model, text) if model.digest else (0,)

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        """The arm, for a wrong ref must show in a dry run too; one that is not built yet is noted in `unbuilt`."""
        if source.build is None:
            return self.real.arm(name, source)
        tree, commit = self.real.whole(name, source)
        found = find_built(tree, build_place(tree, source.build, self.real.settings.trees), source.build)
        if found is None:
            self.unbuilt[name] = source.build.command
            return ResolvedArm(None, "", commit)
        return ResolvedArm(found.tree, found.digest, commit)


def _commit_words(state: CheckoutState) -> str | None:
    return f"{state.commit}-dirty" if state.commit and state.is_dirty else state.commit


def built_folder(settings: Settings, source: ModelSource) -> Path:
    """Where a zoo model stands in the cache: one folder a name, seed, count of layers, and what of its weights."""
    assert source.build is not None
    parts = (("seed", source.seed), ("layers", source.layers), ("skew", source.skew or None))
    told = "".join(f"-{word}{number}" for word, number in parts if number is not None)
    return settings.models / (source.build + told + "-hollow" * source.hollow + "-poured" * source.poured)
