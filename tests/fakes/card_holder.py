"""Memory of a card, held through the driver alone: what a run's engine or somebody else's program looks like to NVML.

As a program, `CUDA_VISIBLE_DEVICES=GPU-... python card_holder.py BYTES` prints its PID once it holds, and ends with its
stdin.
"""

from __future__ import annotations

import ctypes
import os
import sys


def hold(nbytes: int) -> None:
    """Take so much of the first visible card, until this process ends. Raises OSError where the driver refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()

    def call(name: str, *given: object) -> None:
        code = getattr(cuda, name)(*given)
        if code:
            raise OSError(f"{name}: CUDA error {code}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))


if __name__ == "__main__":
    hold(int(sys.argv[1]))
    print(os.getpid(), flush=True)
    sys.stdin.read()
