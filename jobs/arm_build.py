"""An arm's build: one shell command in its whole tree, its outputs checked, its log kept, its result reused.

A build stands in the cache under a key made of the tree's hash, the command and the declared outputs. It is made at the
very place where it is used, since builds write their own path into what they make::

    build-KEY/tree            the source, and what the command made of it
    build-KEY/log             what the command printed, head and tail
    build-KEY/built.sha256    the digest of engine and outputs; written last, absent after a failure
    build-KEY/lock            held while building: two processes build once
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from jobs.adapters.child import ChildEnd, ChildOrder, allowed_environment, run_child
from jobs.errors import SpecError
from jobs.excerpt import first_words
from jobs.model import BuildFailure, BuildPlan
from jobs.provenance import SHELL
from jobs.whole_trees import WholeTree

ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
"""Variables that reach a build: where the host's tools are. What decides the result stands in the command, by which a
build is cached; and no store URL, no token."""

LOG_CAP_BYTES = 1 << 20
TAIL_LINES = 20
LINE_CHARS = 300
LOCK_GRACE_S = 60.0  # beyond the other's deadline: copying the tree, ending its processes
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True)
class Built:
    """A tree that is ready, and the digest of its engine and outputs."""

    tree: Path
    digest: str


def build_place(tree: WholeTree, plan: BuildPlan, cache: Path) -> Path:
    """The folder in `cache` of this command on this tree; its log is the file `log` there."""
    key = json.dumps([tree.hash, plan.command, list(plan.outputs)])
    return cache / f"build-{hashlib.sha256(key.encode()).hexdigest()[:40]}"


def find_built(tree: WholeTree, place: Path, plan: BuildPlan) -> Built | None:
    """What an earlier build left at `place`; None when there is none, or when its files are no longer what it made."""
    folder = place / "tree"
    try:
        digest = (place / "built.sha256").read_text(encoding="ascii")
        return Built(folder, digest) if tree.digest(folder, plan.outputs) == digest else None
    except (OSError, SpecError):
        return None


def build_tree(
    tree: WholeTree,
    plan: BuildPlan,
    cache: Path,
    environ: Mapping[str, str],
    tell: Callable[[str], None] = lambda _line: None,
) -> Built | BuildFailure:
    """Run the command of `plan` in `tree`, unless that was done before.

    `environ` is drawn on as `ENVIRONMENT` allows; `tell` hears that a build begins. Raises SpecError when the tree
    cannot be copied, or when another process holds the build for longer than it may take.
    """
    place = build_place(tree, plan, cache)
    place.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(place / "lock", timeout=plan.timeout_s + LOCK_GRACE_S):
            found = find_built(tree, place, plan)
            return found or _build(tree, plan, place, environ, tell)
    except Timeout as error:
        raise SpecError(f"another process is still building in {place}", "wait for it, or end it") from error


def _build(
    tree: WholeTree, plan: BuildPlan, place: Path, environ: Mapping[str, str], tell: Callable[[str], None]
) -> Built | BuildFailure:
    done, folder = place / "built.sha256", place / "tree"
    done.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tree.fill(folder)
    tell(f"building with {plan.command!r}, log in {place / 'log'}")
    try:
        end = run_child(_order(plan, place, environ))
    except OSError as error:
        return BuildFailure(reason=f"the command could not be started: {error}")
    tail = _tail(end)
    reason = _reason(end, tail)
    if not reason:
        try:
            digest = tree.digest(folder, plan.outputs)
        except SpecError as error:
            reason = error.message
    if reason:
        shutil.rmtree(folder, ignore_errors=True)
        return BuildFailure(reason=reason, log_tail="\n".join(tail))
    draft = place / "built.draft"
    draft.write_text(digest, encoding="ascii")
    draft.rename(done)
    return Built(folder, digest)


def _order(plan: BuildPlan, place: Path, environ: Mapping[str, str]) -> ChildOrder:
    own = {"GIT_CEILING_DIRECTORIES": str(place)}  # the tree has no .git: a repository around the cache is not its own
    # The blank before the command: a word that begins with a brace is a place for a descriptor to the child's launcher.
    return ChildOrder(
        argv=(*SHELL, f" {plan.command}"),
        env={**allowed_environment(environ, ENVIRONMENT), **own},
        cwd=place / "tree",
        log_path=place / "log",
        timeout_s=plan.timeout_s,
        log_cap_bytes=LOG_CAP_BYTES,
    )


def _reason(end: ChildEnd, tail: tuple[str, ...]) -> str:
    """Why the command failed, in one line that ends with its last; empty when it did not."""
    last = f": {tail[-1]}" if tail else ", and it printed nothing"
    if end.timed_out:
        return f"no end within {end.wall_s:.0f} s{last}"
    if end.signal is not None:
        return f"ended by signal {end.signal}{last}"
    return f"exit {end.exit_code}{last}" if end.exit_code else ""


def _tail(end: ChildEnd) -> tuple[str, ...]:
    lines = (_COLOUR.sub("", line).rstrip() for line in end.log_tail.splitlines())
    return tuple(first_words(line, LINE_CHARS) for line in lines if line)[-TAIL_LINES:]
