"""Sweep files: `load` reads and checks one, `plan` turns it into the manifest of what will run."""

from __future__ import annotations

from jobs.errors import SpecError
from jobs.spec.planning import SweepSpec, load, plan

__all__ = ["SpecError", "SweepSpec", "load", "plan"]
