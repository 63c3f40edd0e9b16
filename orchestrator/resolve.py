"""The words of a sweep file as things on this machine: models built into the cache, prompts as ids, arms as trees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.tokens import Tokens
from engine.zoo import MODELS, build, model_digest
from jobs.errors import SpecError
from jobs.git_trees import checkout_state, export_engine
from jobs.provenance import (
    ArmSource,
    ModelSource,
    ResolvedArm,
    ResolvedModel,
    find_checkout,
    own_root,
    snapshot,
    tree_digest,
)
from orchestrator.settings import Settings


@dataclass(frozen=True, slots=True)
class LocalResolver:
    """Resolves on this host. Raises SpecError for names and refs, EngineError for models that are broken or absent."""

    settings: Settings

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        """A folder that the user named, or one built from the zoo; its digest is computed here, from its files."""
        if source.path is not None:
            if not source.path.is_dir():
                raise SpecError(f"model {name}: no folder {source.path}", "give a model's folder, or build: NAME")
            return ResolvedModel(source.path, model_digest(source.path))
        assert source.build is not None
        if source.build not in MODELS:
            raise SpecError(f"model {name}: no model named {source.build!r} in the zoo", f"known: {', '.join(MODELS)}")
        folder = built_folder(self.settings, source)
        build(source.build, folder, seed=source.seed, cache_dir=self.settings.downloads)
        return ResolvedModel(folder, model_digest(folder))

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        """Text through the model's own tokenizer."""
        return tuple(Tokens(model.path).encode(text))

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        """An engine tree, copied aside when it could change under the runs."""
        if source.kind == "installed":
            return ResolvedArm(None, tree_digest(own_root()))
        if source.kind == "path":
            return ResolvedArm(*snapshot(Path(source.value), self.settings.trees))
        checkout = find_checkout(self.settings.cwd)
        if source.kind == "git":
            return export_engine(checkout or self.settings.cwd, source.value, self.settings.trees)
        if checkout is None:
            raise SpecError(
                f"arm {name}: no checkout with an engine at or above {self.settings.cwd}",
                "run inside the repository under test, or use source: installed",
            )
        place, digest = snapshot(checkout, self.settings.trees)
        state = checkout_state(checkout)
        commit = f"{state.commit}-dirty" if state.commit and state.is_dirty else state.commit
        return ResolvedArm(place, digest, commit)


@dataclass(frozen=True, slots=True)
class DryResolver:
    """Resolves for a look at the plan only: builds no model, and says what it would build."""

    real: LocalResolver
    absent: list[str]

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
        """The arm, for a wrong ref must show in a dry run too."""
        return self.real.arm(name, source)


def built_folder(settings: Settings, source: ModelSource) -> Path:
    """Where a zoo model stands in the cache: one folder a name and seed."""
    assert source.build is not None
    return settings.models / (source.build if source.seed is None else f"{source.build}-seed{source.seed}")
