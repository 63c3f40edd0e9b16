"""Which sweep `--resume` goes on with, and why it cannot when it cannot."""

from __future__ import annotations

from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.store import Store, SweepRow


def open_by_id(store: Store, prefix: str, harness: str, store_words: str) -> tuple[str, Manifest]:
    """An unjudged sweep by its id. Raises SpecError when it is judged, or was begun by another state of assay.

    `store_words`: the option that names the store, for the commands to be copied.
    """
    row = store.sweep(prefix)
    if row.state != "open":
        raise _judged(store, row, store_words)
    if row.harness_digest != harness:
        raise SpecError(
            f"sweep {row.id} was begun by another state of assay ({row.harness_digest[:12]}, now {harness[:12]})",
            "its runs could not be compared with new ones: start the sweep anew without --resume",
        )
    return row.id, store.manifest(row.id)


def open_by_manifest(store: Store, manifest: Manifest, harness: str, store_words: str) -> str:
    """The newest unjudged submission of exactly this. Raises SpecError that says what differs from the nearest one."""
    found = store.find_open(manifest.digest(), harness)
    if found is not None:
        return found
    named = [row for row in store.sweeps() if row.name == manifest.name and row.state == "open"]
    if not named:
        done = [row for row in store.sweeps() if row.name == manifest.name]
        if done:
            raise _judged(store, done[0], store_words)
        raise SpecError(f"no unjudged sweep {manifest.name!r} in this store", "leave --resume out")
    differs = changes(store.manifest(named[0].id), manifest)
    if named[0].harness_digest != harness:
        differs.append("assay itself")
    raise SpecError(
        f"sweep {named[0].id} is open but was begun with another state of: {', '.join(differs)}",
        "restore that state, or start anew without --resume",
    )


def _judged(store: Store, row: SweepRow, store_words: str) -> SpecError:
    verdict = store.verdict(row.id)
    told = f": {verdict.outcome}, exit {verdict.exit_code}" if verdict is not None else ""
    return SpecError(
        f"sweep {row.id} is judged already{told}; it has no run left to make",
        f"run the sweep anew: assay run SWEEP without --resume; or read it: assay report {row.id}{store_words}",
    )


def changes(then: Manifest, now: Manifest) -> list[str]:
    """What differs between two submissions of a sweep, in words."""
    differs = [] if then.source_text == now.source_text else ["the sweep file"]
    trees = {arm.name: arm.tree_digest for arm in then.arms}
    differs += [f"the engine of arm {a.name}" for a in now.arms if trees.get(a.name, a.tree_digest) != a.tree_digest]
    builds = {arm.name: arm.build for arm in then.arms}
    differs += [f"the build of arm {a.name}" for a in now.arms if builds.get(a.name, a.build) != a.build]
    models = {cell.model: cell.model_digest for cell in then.cells}
    for cell in now.cells:
        if models.get(cell.model, cell.model_digest) != cell.model_digest:
            differs.append(f"model {cell.model}")
            models[cell.model] = cell.model_digest
    if not differs and then.digest() != now.digest():
        differs.append("folders of models or engines")
    return differs
