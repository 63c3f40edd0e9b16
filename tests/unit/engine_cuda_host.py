"""A kernel's CUDA text, compiled for the host and run there (cuda_on_host.h): what it computes, without a card."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import kernels
from engine.kernels.cuda import argument, prepare, source
from engine.plan import Step

HEADER = Path(__file__).with_name("cuda_on_host.h")
_OPTIONS = ("-std=c++20", "-O1", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fPIC", "-shared")
_MAIN = """
extern "C" void run(int columns, int rows_of_blocks, int seed, SIGNATURE) {{
  run_grid(columns, rows_of_blocks, {threads}, seed, [=]() {{ {function}(PASSED); }});
}}
"""


def run_on_host(
    step: Step,
    arrays: Mapping[str, NDArray[Any]],
    strides: Mapping[str, tuple[int, int]],
    into: Path,
    seed: int,
    tickets: NDArray[np.uint32],
) -> None:
    """Launch a step of one form over arrays; turns are as `seed` draws. Skips the test without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("skipped: no g++")
    [form] = kernels.get(step.kernel).forms
    made = prepare(form, step, strides)
    assert source("support") in made.variant.text
    text = made.variant.text.replace(source("support"), f'#include "{HEADER}"\n')
    text = re.sub(r"\bkey_t\b", "of_key_t", text)  # the host's own headers have one
    text += _MAIN.format(threads=made.geometry.threads, function=made.variant.function)
    library = into / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not library.exists():
        command = [compiler, *_OPTIONS, "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=text, text=True, check=True)
    given = [ctypes.c_int(n) for n in (*made.geometry.blocks, seed)]
    pointers = [ctypes.c_void_p(arrays[name].ctypes.data) for name in made.operands]
    counted = [ctypes.c_void_p(tickets.ctypes.data)] if made.geometry.tickets else []
    ctypes.CDLL(str(library)).run(*given, *pointers, *map(argument, made.scalars), *counted)
