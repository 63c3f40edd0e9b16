"""Every module imports, in any order, with no GPU, no driver and no network, from this checkout, from any folder."""

from __future__ import annotations

import graphlib
import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

# What the engine may not even load: it runs alone on a GPU host that has none of these.
NOT_IN_ENGINE = ("ray", "sqlalchemy", "alembic", "pydantic", "typer", "rich", "jinja2", "httpx", "pynvml", "scipy")

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
root, barred, *modules = sys.argv[1:]
failed = 0
for name in modules:
    try:
        module = importlib.import_module(name)
        assert module.__file__.startswith(root + os.sep), f"{name} was loaded from {module.__file__}"
        loaded = [library for library in barred.split(",") if library in sys.modules]
        assert not loaded, f"{name} loads {loaded}"
    except BaseException:
        print(name, traceback.format_exc(), flush=True)
        failed += 1
print(f"{len(modules)} modules, {failed} failed")
sys.exit(failed != 0)
"""


def modules_of(checkout: Path, package: str) -> list[str]:
    files = sorted((checkout / package).rglob("*.py"))
    names = [".".join(file.relative_to(checkout).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return [name for name in names if all(part.isidentifier() for part in name.split("."))]


def probe(root: Path, cwd: Path, modules: list[str], barred: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", PROBE, str(root), barred, *modules]
    environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)


def order_of(root: Path, *packages: str) -> list[str]:
    """Modules, each after all that it imports: so any of them may be the first of ours to be imported.

    To import a module is to import the packages above it too, unless the importer stands in them.
    Raises graphlib.CycleError with the modules that import each other.
    """
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph(*packages, exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.remove(str(root))
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for module in graph.modules:
        order.add(module)
        for imported in graph.find_modules_directly_imported_by(module):
            parts = imported.split(".")
            above = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
            order.add(module, *(name for name in above if not f"{module}.".startswith(f"{name}.") or name == imported))
    return list(order.static_order())


def test_no_module_needs_another_to_be_imported_first(checkout: Path) -> None:
    assert len(order_of(checkout, "engine", "jobs", "reports", "orchestrator")) > 200


@pytest.mark.parametrize(
    "files",
    [
        {"one": "import knot.two", "two": "import knot.one"},
        {"__init__": "from knot.one import x", "one": "from knot import y"},
        {"one": "from knot.deep.leaf import x", "deep/__init__": "import knot.one", "deep/leaf": "x = 1"},
    ],
)
def test_a_knot_of_imports_is_seen(tmp_path: Path, files: dict[str, str]) -> None:
    for name, body in {"__init__": "", **files}.items():
        (tmp_path / "knot" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "knot" / f"{name}.py").write_text(body + "\n")
    with pytest.raises(graphlib.CycleError, match="knot"):
        order_of(tmp_path, "knot")


@pytest.mark.parametrize(
    ("package", "barred"),
    [("engine", ",".join(NOT_IN_ENGINE)), ("jobs", "ray,typer,rich"), ("reports", "ray,typer"), ("orchestrator", "")],
)
def test_every_module_imports(checkout: Path, tmp_path: Path, package: str, barred: str) -> None:
    modules = modules_of(checkout, package)
    done = probe(checkout, tmp_path, modules, barred)
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
    done = probe(tmp_path, tmp_path, ["planted"], "ray")
    assert said in done.stdout, done.stdout + done.stderr
    assert (done.returncode == 0) is (said == "0 failed")
