"""The external data file of an ONNX model, written one tensor at a time."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

ALIGNMENT_BYTES = 256
"""Offsets are multiples of this: what the arena packs at, and more than any vector load asks for."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file: its size and the sha256 of its bytes, both taken while writing."""

    name: str
    size_bytes: int
    sha256: str


class ExternalData:
    """Appends tensors to one file and hands back the `TensorProto` that points at each.

    No tensor is kept: memory stays at one tensor, however large the model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("xb")
        self._offset_bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, name: str, values: NDArray[Any]) -> TensorProto:
        """Write `values` (C order, little endian) at the next aligned offset."""
        self._append(b"\0" * (-self._offset_bytes % ALIGNMENT_BYTES))
        start_bytes = self._offset_bytes
        assert values.dtype.byteorder in "=|<", f"{name}: {values.dtype} is not little endian"
        self._append(np.ascontiguousarray(values).data.cast("B"))
        tensor = TensorProto(
            name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), data_location=TensorProto.EXTERNAL
        )
        tensor.dims.extend(values.shape)
        for key, value in (
            ("location", self._path.name),
            ("offset", str(start_bytes)),
            ("length", str(values.nbytes)),
        ):
            tensor.external_data.add(key=key, value=value)
        return tensor

    def close(self) -> WrittenFile:
        """Flush to disk and report size and digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return WrittenFile(self._path.name, self._offset_bytes, self._sha256.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _append(self, chunk: bytes | memoryview) -> None:
        self._file.write(chunk)
        self._sha256.update(chunk)
        self._offset_bytes += len(chunk)


def write_file(path: Path, content: bytes) -> WrittenFile:
    """Write a small file whole, flushed to disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(content), hashlib.sha256(content).hexdigest())
