"""A GGUF file's metadata and raw tensors, through the `gguf` library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_files import LFS_MARK

if TYPE_CHECKING:
    from gguf import ReaderTensor


def refuse_pointer(path: Path) -> None:
    """Raise ModelFilesError when `path` is a Git LFS pointer, not the file it stands for."""
    with path.open("rb") as file:
        if file.read(len(LFS_MARK)) == LFS_MARK:
            raise ModelFilesError(
                f"{path} is a Git LFS pointer, not the file itself", "run `git lfs pull` where it lies"
            )


class GgufFile:
    """Read-only view of one GGUF; tensors stay in the memory mapping until asked for.

    Raises ModelFilesError when the file is missing, a Git LFS pointer or no GGUF, or the `gguf` library is absent.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelFilesError(f"no GGUF at {path}", "give the path of an existing .gguf file")
        refuse_pointer(path)
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelFilesError(
                f"{path} is not a GGUF file: it starts with {magic!r}", "give the path of a .gguf file"
            )
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ModelFilesError(
                "reading a GGUF needs the `gguf` library, which is not installed", "pip install 'gpu-assay[zoo]'"
            ) from error
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ModelFilesError(f"{path} is damaged: {error}", "fetch it again") from error
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.path = path

    def field(self, key: str) -> Any:
        """A metadata value as plain Python; raises UnsupportedModel when the key is absent."""
        found = self._reader.get_field(key)
        if found is None:
            raise UnsupportedModel(f"{self.path.name} has no metadata key {key}", "use a GGUF of a llama decoder")
        return found.contents()

    def tensor(self, name: str, kind: str) -> NDArray[Any]:
        """Rows of tensor `name`: fp32 values for kind F32, uint8 blocks [rows, bytes] for Q4_1 and Q8_0.

        Raises UnsupportedModel when the tensor is absent or of another kind.
        """
        found = self._tensors.get(name)
        if found is None:
            raise UnsupportedModel(f"{self.path.name} has no tensor {name}", "use a GGUF of a llama decoder")
        if found.tensor_type.name != kind:
            raise UnsupportedModel(
                f"{self.path.name}: tensor {name} is {found.tensor_type.name}, not {kind}",
                f"use a GGUF that stores {name} as {kind}",
            )
        # A plain array over the mapping: memmap's own slicing costs more than the repacking of a small tensor.
        return np.asarray(found.data)
