"""Compile variants with NVRTC, and keep the code on disk by what it was made from."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from engine.device.cuda_driver import bindings, call
from engine.errors import DeviceFailure
from engine.kernels.cuda import Variant

_OPTIONS = ("--std=c++17", "--fmad=false")


def compiler_version() -> str:
    """Of the NVRTC that is loaded: "13.0"."""
    _, nvrtc = bindings()
    return ".".join(map(str, call(nvrtc.nvrtcVersion)))


def compile_variant(variant: Variant, architecture: str) -> bytes:
    """Machine code for an architecture such as sm_90. Raises DeviceFailure with the compiler's log."""
    _, nvrtc = bindings()
    program = call(nvrtc.nvrtcCreateProgram, variant.text.encode(), f"{variant.function}.cu".encode(), 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), *(o.encode() for o in _OPTIONS)]
    try:
        call(nvrtc.nvrtcCompileProgram, program, len(options), options)
        image = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
        call(nvrtc.nvrtcGetCUBIN, program, image)
    except DeviceFailure as error:
        log = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
        call(nvrtc.nvrtcGetProgramLog, program, log)
        raise DeviceFailure(f"{variant.function} does not compile for {architecture}: {log.decode()}") from error
    finally:
        call(nvrtc.nvrtcDestroyProgram, program)
    return bytes(image)


class CubinCache:
    """Compiled variants by source, architecture, options and compiler; a cache that cannot be written is no failure."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self._folder = folder
        self._architecture = architecture
        self._suffix = "|".join((architecture, *_OPTIONS, compiler_version()))
        self.compiled = 0
        self.found = 0

    def get(self, variant: Variant) -> bytes:
        """The code of a variant, compiled now unless it was before."""
        name = hashlib.sha256(f"{variant.text}|{self._suffix}".encode()).hexdigest()
        path = self._folder / f"{name}.cubin"
        try:
            code = path.read_bytes()
            self.found += 1
            return code
        except OSError:
            pass
        code = compile_variant(variant, self._architecture)
        self.compiled += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.tmp")
            part.write_bytes(code)
            part.replace(path)
        except OSError:
            pass
        return code


def cache_folder() -> Path:
    """Where compiled kernels are kept: under ASSAY_CACHE_DIR, or the user's cache."""
    own = os.environ.get("ASSAY_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
    return base / "cubins"
