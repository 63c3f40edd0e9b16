"""The external data file of an ONNX model: written one tensor at a time, or laid out first and filled later."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

ALIGNMENT_BYTES = 256
"""Offsets are multiples of this: what the arena packs at, and more than any vector load asks for."""


class Lazy(Protocol):
    """A tensor whose values are made when they are asked for, a chunk at a time."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        ...

    def chunks(self) -> Iterator[NDArray[Any]]:
        """All values in C order, in pieces of a few MB."""
        ...


Values = NDArray[Any] | Lazy


class Sink(Protocol):
    """What takes a graph's tensors and hands back where each of them stands."""

    def add(self, name: str, values: Values) -> TensorProto:
        """Take a tensor; the `TensorProto` that points at it."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file: its size and the sha256 of its bytes, both taken while writing."""

    name: str
    size_bytes: int
    sha256: str


class ExternalData:
    """Appends tensors to one file at once.

    No tensor is kept: memory stays at one tensor, however large the model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("xb")
        self._offset_bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, name: str, values: Values) -> TensorProto:
        """Write `values` (C order, little endian) at the next aligned offset."""
        self._append(b"\0" * (-self._offset_bytes % ALIGNMENT_BYTES))
        tensor = _pointer(name, values, self._path.name, self._offset_bytes)
        for chunk in [values] if isinstance(values, np.ndarray) else values.chunks():
            self._append(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        return tensor

    def close(self, *, durable: bool = True) -> WrittenFile:
        """Report size and digest; `durable`: once all of it is on the disk."""
        self._file.flush()
        if durable:
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


class Layout:
    """Notes where each tensor will stand, without its bytes; `write` makes the file from the tensors noted."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._noted: list[tuple[str, Values]] = []
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._size_bytes

    def add(self, name: str, values: Values) -> TensorProto:
        """Note a tensor at the next aligned offset."""
        start_bytes = -(-self._size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._size_bytes = start_bytes + _nbytes(values)
        self._noted.append((name, values))
        return _pointer(name, values, self._location, start_bytes)

    def write(self, folder: Path, *, durable: bool = True) -> WrittenFile:
        """Make every tensor and write it, each at the offset that was told."""
        with ExternalData(folder / self._location) as data:
            for name, values in self._noted:
                data.add(name, values)
            written = data.close(durable=durable)
        assert written.size_bytes == self._size_bytes, "a tensor made other bytes than it said"
        return written

    def reserve(self, folder: Path) -> None:
        """Make a file of the right size that takes no space: a hole, which reads as zeros."""
        with (folder / self._location).open("xb") as file:
            file.truncate(self._size_bytes)


def write_file(path: Path, content: bytes) -> WrittenFile:
    """Write a small file whole, flushed to disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(content), hashlib.sha256(content).hexdigest())


def _nbytes(values: Values) -> int:
    return math.prod(values.shape) * values.dtype.itemsize


def _pointer(name: str, values: Values, location: str, start_bytes: int) -> TensorProto:
    assert values.dtype.byteorder in "=|<", f"{name}: {values.dtype} is not little endian"
    tensor = TensorProto(
        name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), data_location=TensorProto.EXTERNAL
    )
    tensor.dims.extend(values.shape)
    for key, value in (("location", location), ("offset", str(start_bytes)), ("length", str(_nbytes(values)))):
        tensor.external_data.add(key=key, value=value)
    return tensor
