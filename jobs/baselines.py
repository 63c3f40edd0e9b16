"""Which commit a change is held against: where its branch left another one, and never an earlier push of its own.

Held against its own last push, a change that grew worse push by push is never worse. The merge base is what it started
from; where that commit cannot serve, the nearest one before it can, and how far back that is must be said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import RefError
from jobs.git_trees import last_line, resolve_ref, run_git

MOST_BACK = 200
"""Commits that are tried before the merge base, along first parents."""

TRUNKS = frozenset({"main", "master", "trunk", "develop"})
"""Names of branches that others start from; so is whatever a remote calls its HEAD."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A commit to measure as base, and in words how it was found."""

    commit: str
    note: str


def merge_base(repository: Path, ref: str, *, program: bool = False) -> Baseline:
    """Where HEAD's history left that of `ref`; the nearest commit before it that holds an engine, unless a `program`
    serves.

    Raises RefError when there is none: no such ref, no history in common, or no engine in all of it.
    """
    tip = resolve_ref(repository, ref)
    found = run_git(repository, "merge-base", tip, "HEAD")
    common = found.stdout.decode().strip()
    if found.returncode or not common:
        why = f": {last_line(found.stderr)}" if found.stderr.strip() else ""
        remedy = "fetch the history, with --unshallow in a shallow clone, or name a commit: git:REF"
        raise RefError(f"{ref!r} and HEAD have no commit in common{why}", remedy)
    listed = run_git(repository, "rev-list", "--first-parent", f"--max-count={MOST_BACK}", common)
    history = listed.stdout.decode().split()
    for back, commit in enumerate(history):
        if program or not run_git(repository, "rev-parse", "--verify", "--quiet", f"{commit}:engine").returncode:
            return Baseline(commit, _words(repository, ref, tip, common, back))
    raise RefError(
        f"neither the merge base {common[:12]} of {ref!r} and HEAD nor the {len(history) - 1} before it hold an engine",
        "name a commit that has the engine in it: git:REF",
    )


def earlier_push(repository: Path, commit: str) -> str:
    """A word of warning where a base is a commit that only what is under test holds; empty where others hold it too,
    and of HEAD, which is no earlier one.
    """
    if commit == _head(repository) or not is_own(repository, commit):
        return ""
    return (
        f"{commit[:12]} is a commit of this branch alone, such as an earlier push of it: what grows worse push by "
        "push would not show; source: merge-base:main is what the branch started from"
    )


def is_own(repository: Path, commit: str) -> bool:
    """Whether a commit is HEAD or before it, and only what is under test holds it: nobody else has reviewed it."""
    head = _head(repository)
    if not head or not _is_before(repository, commit, head):
        return False
    places = ("refs/heads", "refs/remotes", "refs/tags")
    listed = run_git(repository, "for-each-ref", f"--contains={commit}", "--format=%(refname) %(symref)", *places)
    holders = [row.split() for row in listed.stdout.decode(errors="replace").splitlines()]
    for name, *of_remote in holders:
        if of_remote or _branch(name) in TRUNKS or name.startswith("refs/tags/"):
            return False
        if not (_is_before(repository, name, head) or _is_before(repository, head, name)):
            return False
    return True


def _head(repository: Path) -> str:
    return run_git(repository, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").stdout.decode().strip()


def _words(repository: Path, ref: str, tip: str, common: str, back: int) -> str:
    counted = run_git(repository, "rev-list", "--count", f"{common}..{tip}").stdout.decode().strip()
    told = f"the merge base of {ref} and HEAD"
    if counted not in ("", "0"):
        told += f", which {ref} is {counted} commit{'s' * (counted != '1')} ahead of"
    if back:
        told += f"; it holds no engine, so the nearest one before it serves, {back} commit{'s' * (back != 1)} back"
    return told


def _branch(ref: str) -> str:
    """A branch by its own name, its remote's apart: `fix/main` is no trunk."""
    return ref.removeprefix("refs/heads/") if ref.startswith("refs/heads/") else "/".join(ref.split("/")[3:])


def _is_before(repository: Path, commit: str, later: str) -> bool:
    return run_git(repository, "merge-base", "--is-ancestor", commit, later).returncode == 0
