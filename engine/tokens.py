"""Text to ids and back, by the tokenizer.json in a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BadRequest, ModelFilesError
from engine.model_files import inside, refuse_pointer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
_IDS_INSTEAD = "give the prompt as ids (--prompt-ids) instead"


class Tokens:
    """The tokenizer of one model folder.

    Raises ModelFilesError when tokenizer.json is missing, outside the folder, a Git LFS pointer or unreadable, or when
    the `tokenizers` library is not installed.
    """

    def __init__(self, folder: Path) -> None:
        path = inside(folder, TOKENIZER_FILE)
        try:
            if not path.is_file():
                raise ModelFilesError(f"{folder} has no {TOKENIZER_FILE}", _IDS_INSTEAD)
            refuse_pointer(path)
        except OSError as error:
            raise ModelFilesError(f"{path} cannot be read: {error.strerror}", _IDS_INSTEAD) from error
        self._tokenizer = _read(path)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with whatever ids the tokenizer itself puts before or after; special tokens are recognised.

        Raises BadRequest where `text` holds half of a surrogate pair: what a shell's bytes that are no UTF-8 come as.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the prompt is not UTF-8 text", _IDS_INSTEAD) from error
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; an id without a token reads `<id N>`.

        Models pad their vocabulary, so such an id is the model's to choose and no fault of the files.
        """
        parts: list[str] = []
        for known, group in groupby(ids, key=lambda n: self._tokenizer.id_to_token(n) is not None):
            run = list(group)
            parts += [self._tokenizer.decode(run, skip_special_tokens=False)] if known else [f"<id {n}>" for n in run]
        return "".join(parts)


def _read(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelFilesError(
            "reading a tokenizer needs the `tokenizers` library, which is not installed",
            f"pip install 'gpu-assay[zoo]', or {_IDS_INSTEAD}",
        ) from error
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}", _IDS_INSTEAD) from error
    try:
        return Tokenizer.from_str(content)
    except Exception as error:
        # The library raises bare Exception for any document it does not understand.
        raise ModelFilesError(f"{path} is no tokenizer: {error}", _IDS_INSTEAD) from error
