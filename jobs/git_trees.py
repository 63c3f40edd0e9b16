"""Engine trees by git ref: resolve the ref, export its engine into a cache, say what a checkout holds.

No `git worktree`: that writes into the repository under test and breaks when two sweeps run at once.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import RefError, SpecError
from jobs.provenance import ResolvedArm, publish, tree_digest

GIT_TIMEOUT_S = 120
# Set inside git hooks; they would point every command at another repository or index.
HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True, slots=True)
class CheckoutState:
    """What a working tree holds: HEAD's commit (None: no git, or no commit yet) and whether its engine differs."""

    commit: str | None
    is_dirty: bool


def resolve_ref(repository: Path, ref: str) -> str:
    """The full commit id of a branch, tag or commit.

    Raises RefError "no such git ref" with the nearest names, or for a name that a branch and a tag of different commits
    share (git takes one of them and only warns), or SpecError when `repository` is not one.
    """
    _require_repository(repository)
    done = run_git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    commit = done.stdout.decode().strip()
    if done.returncode or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise RefError(f"no such git ref: {ref!r} in {repository}", _ref_remedy(repository, ref))
    shared = [f"refs/{kind}/{ref}" for kind in ("heads", "tags", "remotes")]
    listed = run_git(repository, "for-each-ref", "--format=%(refname) %(objectname) %(*objectname)", *shared)
    rows = [row.split() for row in listed.stdout.decode(errors="replace").splitlines()]
    meant = {name: ids[-1] for name, *ids in rows if name in shared}
    if len(set(meant.values())) > 1:
        raise RefError(f"git ref {ref!r} is ambiguous in {repository}", f"write {' or '.join(meant)}")
    return commit


def export_engine(repository: Path, ref: str, cache: Path) -> ResolvedArm:
    """The engine tree of a ref, exported once into `cache` and reused while it is intact.

    The cache's key is git's own hash of the tree `engine/`, so commits with the same engine share one export. Raises
    RefError when the ref is unknown or its commit holds no engine.
    """
    commit, tree = engine_of(repository, ref)
    place = cache / f"git-{tree}"
    digest = _recorded(place)
    if digest is None:
        publish(place, lambda folder: _fill(repository, commit, folder), lambda folder: _recorded(folder) is not None)
        digest = _recorded(place)
    if digest is None:
        raise RefError(f"git ref {ref!r} ({commit[:12]}) could not be exported to {place}", "remove that folder")
    return ResolvedArm(python_path=place, tree_digest=digest, commit=commit)


def toplevel(folder: Path) -> Path | None:
    """The root of the working tree around a folder; None where there is none."""
    if shutil.which("git") is None:
        return None
    done = run_git(folder, "rev-parse", "--show-toplevel")
    root = os.fsdecode(done.stdout).rstrip("\n")
    return None if done.returncode or not root else Path(root)


def engine_of(repository: Path, ref: str) -> tuple[str, str]:
    """A ref's commit, and git's own hash of the tree `engine/` in it. Raises RefError when there is none."""
    commit = resolve_ref(repository, ref)
    done = run_git(repository, "rev-parse", "--verify", "--quiet", f"{commit}:engine")
    tree = done.stdout.decode().strip()
    if done.returncode or not tree:
        raise RefError(f"git ref {ref!r} ({commit[:12]}) holds no engine/", "name a commit that has the engine in it")
    return commit, tree


def checkout_state(checkout: Path, below: Sequence[str] = ("engine",)) -> CheckoutState:
    """HEAD's commit of a working tree, and whether anything `below` (pathspecs) differs, untracked files included."""
    if shutil.which("git") is None or run_git(checkout, "rev-parse", "--git-dir").returncode:
        return CheckoutState(commit=None, is_dirty=False)
    head = run_git(checkout, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if head.returncode:
        return CheckoutState(commit=None, is_dirty=True)
    changes = run_git(checkout, "status", "--porcelain", "--untracked-files=all", "--", *below).stdout
    return CheckoutState(commit=head.stdout.decode().strip(), is_dirty=bool(changes.strip()))


def _fill(repository: Path, commit: str, folder: Path) -> None:
    done = run_git(repository, "archive", "--format=tar", commit, "engine")
    if done.returncode:
        raise RefError(f"git archive of {commit[:12]} failed: {last_line(done.stderr)}", "check the repository")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "tree.sha256").write_text(tree_digest(folder), encoding="ascii")


def _recorded(place: Path) -> str | None:
    """The digest of an export whose files are still what was exported; None when absent or changed."""
    try:
        digest = (place / "tree.sha256").read_text(encoding="ascii")
        return digest if tree_digest(place) == digest else None
    except (OSError, SpecError):
        return None


def _require_repository(repository: Path) -> None:
    if shutil.which("git") is None:
        raise SpecError("git is not installed", "install git, or give arms as path:DIR")
    if not repository.is_dir() or (done := run_git(repository, "rev-parse", "--git-dir")).returncode:
        why = last_line(done.stderr) if repository.is_dir() else "no such folder"
        raise SpecError(f"{repository} is not a git repository: {why}", "run inside the repository under test")


def _ref_remedy(repository: Path, ref: str) -> str:
    listed = run_git(repository, "for-each-ref", "--format=%(refname:short)").stdout.decode(errors="replace")
    close = difflib.get_close_matches(ref, listed.split(), n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "run git fetch first, with --unshallow in a shallow clone, or check the spelling"


def run_git(repository: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """One git command in a repository, unled by a hook's variables. Raises SpecError when it does not end."""
    environment = {name: value for name, value in os.environ.items() if name not in HOOK_VARIABLES}
    command = ["git", *words]
    try:
        return subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, check=False, timeout=GIT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise SpecError(f"git {words[0]} took more than {GIT_TIMEOUT_S} s in {repository}", "check the disk") from error


def last_line(text: bytes) -> str:
    """The last line that a command printed."""
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
