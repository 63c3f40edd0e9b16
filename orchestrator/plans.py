"""The manifests of the sweeps that are worked on, each read from the store once."""

from __future__ import annotations

from jobs.model import ArmPlan, CellPlan, Limits, Manifest
from jobs.store import Store


class Plans:
    """What was planned for each sweep, kept until it is forgotten."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, Manifest] = {}

    def limits(self, sweep_id: str) -> Limits:
        """A sweep's limits."""
        return self._of(sweep_id).limits

    def cell(self, sweep_id: str, name: str) -> CellPlan:
        """A cell of a sweep by its name."""
        return next(cell for cell in self._of(sweep_id).cells if cell.cell == name)

    def arm(self, sweep_id: str, name: str) -> ArmPlan:
        """An arm of a sweep by its name."""
        return next(arm for arm in self._of(sweep_id).arms if arm.name == name)

    def forget(self, sweep_id: str) -> None:
        """Keep nothing of a sweep that is over."""
        self._kept.pop(sweep_id, None)

    def _of(self, sweep_id: str) -> Manifest:
        if sweep_id not in self._kept:
            self._kept[sweep_id] = self._store.manifest(sweep_id)
        return self._kept[sweep_id]
