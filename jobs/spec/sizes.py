"""Sizes of a sweep: what each changes, laid over the rest of the file.

A file that stands for a simulator and names its full size under `sizes` is one experiment in two sizes: what they share
is written once, and which one ran is in the sweep's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.errors import SpecError
from jobs.spec.faults import kind_of, nearest
from jobs.spec.yaml_lines import Path_, Source

SIZES, LIKE = "sizes", "like"


def size_names(source: Source) -> tuple[str, ...]:
    """The sizes that a file has beside the one it stands for. Raises SpecError where `sizes` does not name any."""
    held = source.values.get(SIZES, {}) if isinstance(source.values, dict) else {}
    if not isinstance(held, dict):
        raise source.error((SIZES,), f"sizes: expected a mapping (name: what changes), got {kind_of(held)}")
    for name, changes in held.items():
        if not isinstance(changes, dict):
            raise source.error((SIZES, name), f"sizes.{name}: expected a mapping of keys, got {kind_of(changes)}")
        like, seen = changes.get(LIKE), [name]
        while like is not None:
            if like not in held or like in seen:
                told = f"no size {like!r}" if like not in held else f"size {name!r} is like itself"
                raise source.error((SIZES, name, LIKE), told, nearest(str(like), held.keys() - {name}))
            seen.append(like)
            like = held[like].get(LIKE) if isinstance(held[like], dict) else None
    return tuple(held)


def sized(source: Source, size: str | None) -> Source:
    """The document in a size, with the lines at which its values stand; None is what the file holds without any.

    Mappings are laid over key by key, anything else takes the other's place, and nothing (`key:`, `null`) takes a key
    away; a size that is `like` another is laid over that one. The sweep is then called NAME-SIZE unless the size names
    it. Raises SpecError for a size that is not there.
    """
    names = size_names(source)
    if not isinstance(source.values, dict):
        return source
    whole = {key: value for key, value in source.values.items() if key != SIZES}
    if size is None:
        return Source(source.file, source.text, whole, source.lines)
    if size not in names:
        remedy = nearest(size, names) if names else "leave --size out: the file has one size"
        raise SpecError(f"the sweep file has no size {size!r}", remedy, file=source.file)
    over: dict[str, Any] = source.values[SIZES][size]
    below = sized(source, over.get(LIKE))
    made = _laid_over(below.values, {key: value for key, value in over.items() if key != LIKE})
    if "sweep" not in over and isinstance(whole.get("sweep"), str):
        made["sweep"] = f"{whole['sweep']}-{size}"
    top: Path_ = (SIZES, size)
    own = {path[2:]: line for path, line in source.lines.items() if path[:2] == top and len(path) > 2}
    return Source(source.file, source.text, made, {**below.lines, **own})


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(below)
    for key, value in above.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = _laid_over(made[key], value)
        else:
            made[key] = value
    return made
