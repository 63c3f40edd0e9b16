"""Keys of a sweep file whose meaning is fixed and which nothing serves yet: refused, so that no file promises them."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.errors import SpecError
from jobs.spec.form import SweepForm
from jobs.spec.yaml_lines import Path_, Source

UNBUILT: tuple[str, ...] = ("locks.margin",)
"""What is refused, as docs/sweep-file.md lists it."""


def unbuilt(form: SweepForm, source: Source) -> Iterator[SpecError]:
    """One fault for each key that asks for what is not built; a value that changes nothing is let through."""
    for index, lock in enumerate(form.locks):
        if lock.margin is not None:
            remedy = "leave it out: the gap is only worth a lock against an oracle run"
            yield _refused(source, ("locks", index, "margin"), "locks.margin", remedy)


def _refused(source: Source, path: Path_, what: str, remedy: str) -> SpecError:
    return source.error(path, f"{what} is not built yet", remedy)
