"""Kernels alone: the engine of the arm's own tree as ever, asked for one kernel's rounds in place of a model's tokens.

A sweep's model is then the file of a case (sweeps/kernels), its prompt the seed of what the kernel is given, its tokens
rounds: a round has the digest of its output as an id, so that identity is equality of bytes, and the time of one run.
"""

from __future__ import annotations

from jobs.adapters.model_files import AnyModelDigests
from jobs.adapters.native import NativeAdapter
from jobs.gates import GATING, UNDECLARED
from jobs.model import Missing

NAME = "kernel"
COUNTERS = ("emitted_tokens", "step_kernels", "launch_bytes", "launch_flops")


def adapter() -> NativeAdapter:
    """The engine, asked for a kernel; what only decoding counts is Missing with that reason."""
    why = Missing(missing=f"{UNDECLARED}: one kernel alone has no steps, no weights to keep and no cache that grows")
    return NativeAdapter(models=AnyModelDigests(), command=NAME, absent=dict.fromkeys(sorted(GATING), why))
