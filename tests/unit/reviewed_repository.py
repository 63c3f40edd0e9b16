"""A repository for tests of reviewed files, and a resolver that needs no engine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from jobs.provenance import ArmSource, ModelSource, ResolvedArm, ResolvedModel

SWEEP = """\
sweep: reviewed
models: {{toy: {{build: tiny, seed: 7}}}}
prompts: {{short: {{ids: [1, 2]}}}}
arms:
  base: {{source: {base}}}
  head: {{source: checkout}}
run: {{tokens: 4}}
"""
"""A sweep file without its reviewed files; `base` is to be filled in."""


@dataclass(frozen=True)
class OneCommit:
    """Resolves every arm to one commit, without an engine."""

    commit: str | None

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        return ResolvedModel(Path("/models") / name, "digest")

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        return (1,)

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        return ResolvedArm(Path("/trees"), "tree", self.commit)


def committed(folder: Path) -> str:
    """Commit all that lies in a repository; the commit's id."""
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=test", "-c", "user.email=test@example.invalid", "commit", "-qm", "why")
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *words: str) -> str:
    """Run git there; what it prints."""
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout
