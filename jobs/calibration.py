"""Calibration: a sweep's base run against itself, through the real path, and the noise that it shows, card by card.

What an A/A sweep finds is the noise of everything but the change: the card, the host, the order of runs. A sweep of the
same scenario on that card shows it beside its times, so that a reader sees what its few blocks could have found.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs import compare, stats
from jobs.errors import SpecError
from jobs.judge_arm import ArmEvidence, weigh
from jobs.metrics import METRICS
from jobs.model import ArmPlan, CellInput, CellPlan, Gate, JudgeInput, Manifest, Missing
from jobs.noise import Calibration
from jobs.reviewed import Reviewed
from jobs.verdict import CellVerdict

AGAIN = "again"
DEFAULT_BLOCKS = 24
MODELLED = "modelled_ms_per_token"
"""The modelled clock of a simulated card: exact, so that its noise is none, and kept apart from wall time."""

METRIC_NAMES = (*compare.TIME_METRICS, MODELLED)


def against_itself(manifest: Manifest, blocks: int) -> Manifest:
    """The same cells with base and base again as the only arms. Raises SpecError where nothing is timed."""
    if any(plan.settings.plan_only for plan in manifest.cells):
        raise SpecError("a sweep of plans alone has no times to calibrate", "calibrate one with run.arithmetic: full")
    base = next(arm for arm in manifest.arms if arm.role == "base")
    again = base.model_copy(update={"name": AGAIN if base.name != AGAIN else f"{AGAIN}-2", "role": "head"})
    return manifest.model_copy(
        update={
            "arms": (base, again),
            "cells": tuple(_cell(plan, base, again, blocks) for plan in manifest.cells),
            "varies": (),
            "gate": Gate(),
            "expectations": (),
            "proposed": (),
            "reviewed": Reviewed(),
        }
    )


def is_against_itself(manifest: Manifest) -> bool:
    """Whether a sweep is base and base again, and nothing else."""
    made = [arm.model_copy(update={"name": "", "role": "base"}) for arm in manifest.arms]
    return [arm.role for arm in manifest.arms] == ["base", "head"] and made[0] == made[1] and not manifest.varies


def measured(doc: JudgeInput, cell: CellInput) -> tuple[Calibration, ...]:
    """The noise of an A/A sweep's cell: each metric on each card that has blocks enough to decide at all."""
    arms = [_arm(doc, cell, arm) for arm in doc.manifest.arms]
    base, again = (next(arm for arm in arms if arm.plan.role == role) for role in ("base", "head"))
    found = []
    for uuid in sorted({_uuid(run) for run in base.measured.runs}):
        here = [
            compare.measured_arm(arm.name, [r for r in arm.measured.runs if _uuid(r) == uuid]) for arm in (base, again)
        ]
        for metric in METRIC_NAMES:
            told = _calibrated(metric, here[0], here[1], cell.plan.blocks)
            if told is not None and here[0].runs:
                blocks, sigma, least = told
                found.append(
                    Calibration(
                        cell=cell.plan.cell,
                        metric=metric,
                        card=here[0].runs[0].record.card_name,
                        uuid=uuid,
                        blocks=blocks,
                        sigma=sigma,
                        smallest_detectable=least,
                        budget_blocks=DEFAULT_BLOCKS,
                        sweep=doc.stamp.sweep_id,
                        at="",
                    )
                )
    return tuple(found)


def with_noise(cell: CellVerdict, known: Sequence[Calibration]) -> CellVerdict:
    """The cell with the noise that is known beside its times: of the card that it ran on, else of another like it."""
    base = next((arm for arm in cell.arms if arm.role == "base"), None)
    if base is None:
        return cell
    here = [one for one in known if one.uuid == base.uuid] or [one for one in known if one.card == base.card]
    by_metric = {one.metric: one for one in sorted(here, key=lambda one: (one.at, one.uuid))}
    rows = tuple(row.model_copy(update={"calibrated": by_metric.get(row.metric)}) for row in cell.time)
    return cell.model_copy(update={"time": rows})


def _cell(plan: CellPlan, base: ArmPlan, again: ArmPlan, blocks: int) -> CellPlan:
    """The cell with both arms; a witness of other arms says nothing here, and no block is to decide on a change."""
    witnesses = tuple(
        row.model_copy(update={"arms": ()}) for row in plan.witnesses if not row.arms or base.name in row.arms
    )
    changed = {"arms": (base.name, again.name), "blocks": blocks, "fresh_blocks": 0, "witnesses": witnesses}
    return plan.model_copy(update=changed)


def _arm(doc: JudgeInput, cell: CellInput, arm: ArmPlan) -> ArmEvidence:
    return weigh(cell.plan, arm, cell.runs, doc.manifest.identity.scope)


def _on_card(arm: ArmEvidence, uuid: str) -> compare.MeasuredArm:
    return compare.measured_arm(arm.name, [run for run in arm.measured.runs if _uuid(run) == uuid])


def _uuid(run: compare.MeasuredRun) -> str:
    return str(run.record.device.get("uuid", ""))


def _calibrated(
    metric: str, base: compare.MeasuredArm, again: compare.MeasuredArm, planned: int
) -> tuple[int, float, float | None] | None:
    """Blocks, sigma and smallest detectable change; None where too few blocks hold both arms."""
    blocks = compare.block_times(metric, base, again, range(planned))
    sigma = stats.spread(blocks)
    counted = sum(1 for block in blocks if block.base and block.head)
    if sigma is None or counted < stats.LEAST_PLANNED:
        return None
    deciding = DEFAULT_BLOCKS - stats.screening_blocks(DEFAULT_BLOCKS)
    floor = compare.floor_of(METRICS[metric].unit, base.value(metric))
    least = stats.detectable(sigma, deciding, rows=len(compare.TIME_METRICS), floor=floor)
    return counted, sigma, None if isinstance(least, Missing) else least
