"""A file that a command is to write, checked before anything is computed for it."""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import BadRequest


def check_out(path: Path, option: str = "--out") -> None:
    """Refuse a file that could not be written, or that is a device, pipe or folder. Raises BadRequest.

    What is there is replaced whole, and root may replace a device: `--out /dev/null` would take it from the whole host.
    """
    try:
        if not path.parent.is_dir():
            raise BadRequest(f"{option}: folder {path.parent} does not exist", "make it first, or write elsewhere")
        if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
            raise BadRequest(f"{option}: {path} cannot be written", "name a file in a folder that may be written")
    except OSError as error:
        raise BadRequest(f"{option}: {path} cannot be written: {error.strerror}", "write elsewhere") from error
