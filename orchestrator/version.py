"""Which assay this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def harness_version() -> str:
    """The installed distribution's version; "unknown" when run from a bare folder."""
    try:
        return version("gpu-assay")
    except PackageNotFoundError:
        return "unknown"
