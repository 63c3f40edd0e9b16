"""One fault at one named point of a process, acted out once; a test copies it as `sitecustomize.py`.

The product has no fault switches: Python imports this module before anything else, and where CHAOS names one of the
product's functions, that function is wrapped as its module is imported. CHAOS is a JSON object: `module`, `name` (of a
function, or CLASS.METHOD), `when` (before or after a call of it), `fault`, `skip` (how many calls pass first) and
`mark`, a file that does not exist: who makes it acts, and all others of the test pass unharmed. Its content is the PID.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def kill(_given: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_given: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(_given: tuple[Any, ...]) -> None:
    time.sleep(3600)


def full(given: tuple[Any, ...]) -> None:
    """A disk without room: the store's own, where the call has a connection to it, else that of the call's files."""
    connection = _connection(given)
    if connection is None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.exec_driver_sql("CREATE TABLE more (data)")
        connection.exec_driver_sql("INSERT INTO more VALUES (zeroblob(1000000))")
    else:
        words = "could not extend file: No space left on device"
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION '{words}' USING ERRCODE = '53100'; END $$")


def drop(given: tuple[Any, ...]) -> None:
    """The server hangs up on the connection of this very transaction."""
    connection = _connection(given)
    own = connection.connection.dbapi_connection
    with type(own).connect(**{**own.info.get_parameters(), "autocommit": True}) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [own.info.backend_pid])


def cut(given: tuple[Any, ...]) -> None:
    """The connection goes after this transaction is committed and before anybody hears of it."""
    own = _connection(given).connection.dbapi_connection
    commit = own.commit

    def committed() -> None:
        commit()
        own.close()
        commit()  # raises as a closed connection does

    own.commit = committed


FAULTS: dict[str, Callable[[tuple[Any, ...]], None]] = {
    "kill": kill,
    "stop": stop,
    "hang": hang,
    "full": full,
    "drop": drop,
    "cut": cut,
}


def _connection(given: tuple[Any, ...]) -> Any:
    return next((one for one in given if type(one).__name__ == "Connection"), None)


def wrapped(own: Callable[..., Any], wish: dict[str, Any]) -> Callable[..., Any]:
    """`own` with the fault before or after it."""
    left = [wish.get("skip", 0)]

    def act(given: tuple[Any, ...]) -> None:
        left[0] -= 1
        if left[0] >= 0:
            return
        try:
            mark = os.open(wish["mark"], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(mark, str(os.getpid()).encode())
        os.close(mark)
        FAULTS[wish["fault"]](given)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if wish["when"] == "before":
            act(args)
        found = own(*args, **kwargs)
        if wish["when"] == "after":
            act(args)
        return found

    return call


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as everybody does, and wraps its function once it is there."""

    def __init__(self, wish: dict[str, Any]) -> None:
        self.wish = wish

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.wish["module"]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        own = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            own(module)
            holder: Any = module
            *above, last = self.wish["name"].split(".")
            for part in above:
                holder = getattr(holder, part)
            setattr(holder, last, wrapped(getattr(holder, last), self.wish))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "CHAOS" in os.environ:
    sys.meta_path.insert(0, Finder(json.loads(os.environ["CHAOS"])))
