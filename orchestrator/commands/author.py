"""Who does something that others will read about: as git knows them, else the user of this host."""

from __future__ import annotations

from jobs.git_trees import run_git
from orchestrator.settings import Settings


def author(given: Settings) -> str:
    """`Name <mail>` from git's settings here, else the user's name."""
    asked = (run_git(given.cwd, "config", key).stdout for key in ("user.name", "user.email"))
    name, mail = (told.decode(errors="replace").strip() for told in asked)
    return f"{name} <{mail}>".strip() if mail else name or user(given)


def user(given: Settings) -> str:
    """The user's name on this host."""
    return given.environ.get("USER") or given.environ.get("LOGNAME") or "somebody"
