"""Where things lie and which store is meant: the one place that reads folders and the environment."""

from __future__ import annotations

import errno
import shlex
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from jobs.errors import SpecError
from jobs.store.connect import shown_url

STORE_FILE = Path(".assay/store.db")
OUT_FOLDER = Path(".assay/report")


@dataclass(frozen=True, slots=True)
class Settings:
    """Folders, store and host of this process.

    `cache` holds models and engine trees that can be made again; `state` holds the spool, which cannot.
    """

    cwd: Path
    store_url: str = field(repr=False)
    out: Path
    cache: Path
    state: Path
    host: str
    environ: Mapping[str, str] = field(repr=False)
    store_words: str = ""
    """The option that names the store, for commands to be copied; empty for the default one."""

    @property
    def store_shown(self) -> str:
        """The store's URL without its password, for all that is printed."""
        return shown_url(self.store_url)

    @property
    def spool(self) -> Path:
        """Outcomes that no store has acknowledged yet."""
        return self.state / "spool"

    @property
    def locks(self) -> Path:
        """Card locks, shared by all users of the host."""
        return Path(tempfile.gettempdir()) / "assay-cards"

    @property
    def models(self) -> Path:
        """Models built on demand."""
        return self.cache / "models"

    @property
    def downloads(self) -> Path:
        """Files fetched for building models."""
        return self.cache / "downloads"

    @property
    def packs(self) -> Path:
        """Engine trees that were shipped here."""
        return self.cache / "packs"

    @property
    def trees(self) -> Path:
        """Engine trees exported from git refs and checkouts."""
        return self.cache / "trees"


def settings(
    environ: Mapping[str, str], cwd: Path | None = None, store: str | None = None, out: Path | None = None
) -> Settings:
    """Settings for a command: `store` is a URL or a file's path, default `.assay/store.db` under `cwd`."""
    here = cwd or _cwd()
    return Settings(
        cwd=here,
        store_url=store_url(store, here),
        out=here / (out or OUT_FOLDER),
        cache=Path(platformdirs.user_cache_dir("assay", appauthor=False)),
        state=Path(platformdirs.user_state_dir("assay", appauthor=False)),
        host=socket.gethostname(),
        environ=environ,
        store_words=store_words(store),
    )


def store_url(store: str | None, cwd: Path) -> str:
    """A store's URL from what a user writes: a URL, or the path of an SQLite file. Raises SpecError."""
    if store is None:
        return f"sqlite:///{cwd / STORE_FILE}"
    if "://" in store:
        return store
    if not store.strip():
        raise SpecError("--store is empty", "name a store: a URL or an SQLite file")
    try:
        return f"sqlite:///{cwd / Path(store).expanduser()}"
    except RuntimeError as error:  # ~nobody/x
        raise SpecError(f"--store {store!r}: there is no such user's folder", "write the path out") from error


def store_words(store: str | None) -> str:
    """The option as given, without a password: that the database's own library takes from the environment too."""
    if not store:
        return ""
    if "://" not in store or (shown := shown_url(store)) == store:
        return f" --store {shlex.quote(store)}"
    return f" --store {shlex.quote(shown)}  # set PGPASSWORD, or write the password into the URL: it is not shown"


def _cwd() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise OSError(errno.ENOENT, "the current folder is gone (change to one that exists)") from error
