"""What holds for every file of a model folder: it lies inside, links resolved, and is the file and no pointer to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine.errors import ModelFilesError

LFS_MARK = b"version https://git-lfs.github.com/spec/"
AGAIN = "export the model again"


def inside(folder: Path, location: str, owner: str = "") -> Path:
    """The file at `location` in a model folder, links resolved. Raises ModelFilesError where it lies elsewhere."""
    root = folder.resolve()
    bad = not location or "\\" in location or not can_be_path(location) or Path(location).is_absolute()
    path = Path(os.path.realpath(root / location)) if not bad else root  # unlike resolve(), calm about loops of links
    if bad or not path.is_relative_to(root) or path == root:
        raise ModelFilesError(f"{owner}location {location!r} is not a file inside the model folder", AGAIN)
    return path


def can_be_path(text: str) -> bool:
    """Whether a text from a document can name a file at all: no NUL, and nothing that has no bytes."""
    try:
        return "\0" not in text and bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def refuse_pointer(path: Path) -> None:
    """Refuse a Git LFS pointer in a file's place. Raises ModelFilesError."""
    with path.open("rb") as file:
        if file.read(len(LFS_MARK)) == LFS_MARK:
            raise ModelFilesError(f"{path} is a Git LFS pointer, not the file", "run `git lfs pull`")


def read_object(folder: Path, name: str, remedy: str = AGAIN) -> dict[str, Any] | None:
    """A JSON object in the folder, or None where there is no such file. Raises ModelFilesError for any other file."""
    path = inside(folder, name)
    try:
        if not path.is_file():
            return None
        refuse_pointer(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}", remedy) from error
    if not isinstance(found, dict):
        raise ModelFilesError(f"{path} does not hold an object", remedy)
    return found
