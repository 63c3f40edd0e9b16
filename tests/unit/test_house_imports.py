"""Every module imports by itself with no GPU, no driver and no network, from this checkout, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What the engine may not even load: it runs alone on a GPU host that has none of these.
NOT_IN_ENGINE = ("ray", "sqlalchemy", "alembic", "pydantic", "typer", "rich", "jinja2", "httpx", "pynvml", "scipy")

# The parent loads the libraries once and forks a child a module: each module is then the first of ours to be imported.
PROBE = """
import ctypes, importlib, os, socket, sys, traceback

def refuse(*args, **kwargs):
    raise AssertionError(f"an import reached out: {args}")

load = ctypes.CDLL.__init__
def without_driver(self, name, *args, **kwargs):
    if name and ("libcuda" in str(name) or "libnvidia" in str(name) or "libnvrtc" in str(name)):
        raise OSError(f"{name}: no such library")
    load(self, name, *args, **kwargs)

ctypes.CDLL.__init__ = without_driver
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
root, barred, warm, *modules = sys.argv[1:]
for library in filter(None, warm.split(",")):
    importlib.import_module(library)
failed = 0
for name in modules:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            module = importlib.import_module(name)
            assert module.__file__.startswith(root + os.sep), f"{name} was loaded from {module.__file__}"
            loaded = [library for library in barred.split(",") if library in sys.modules]
            assert not loaded, f"{name} loads {loaded}"
        except BaseException:
            print(name, traceback.format_exc(), flush=True)
            os._exit(1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
print(f"{len(modules)} modules, {failed} failed")
sys.exit(failed != 0)
"""


def modules_of(checkout: Path, package: str) -> list[str]:
    files = sorted((checkout / package).rglob("*.py"))
    names = [".".join(file.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name for name in names if all(part.isidentifier() for part in name.split("."))]


def probe(root: Path, cwd: Path, modules: list[str], barred: str, warm: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", PROBE, str(root), barred, warm, *modules]
    environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("package", "barred", "warm"),
    [
        ("engine", ",".join(NOT_IN_ENGINE), "numpy,onnx,ml_dtypes"),
        ("jobs", "ray,typer,rich", "numpy,onnx,pydantic"),
        ("reports", "ray,typer", "numpy,onnx,pydantic,jinja2"),
        ("orchestrator", "", "numpy,onnx,pydantic,sqlalchemy"),
    ],
)
def test_every_module_imports_alone(checkout: Path, tmp_path: Path, package: str, barred: str, warm: str) -> None:
    modules = modules_of(checkout, package)
    done = probe(checkout, tmp_path, modules, barred, warm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(modules)} modules, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import socket; socket.create_connection(('localhost', 9))", "an import reached out"),
        ("import ctypes; ctypes.CDLL('libcuda.so.1')", "no such library"),
        ("import ray", "loads ['ray']"),
        ("x = 1", "0 failed"),
    ],
)
def test_a_module_that_reaches_out_is_seen(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "planted.py").write_text(body + "\n")
    done = probe(tmp_path, tmp_path, ["planted"], "ray", "")
    assert said in done.stdout, done.stdout + done.stderr
    assert (done.returncode == 0) is (said == "0 failed")
