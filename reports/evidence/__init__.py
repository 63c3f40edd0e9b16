"""What stands behind one cell: runs in order, readings, samples, tokens, certificates, host, log, command."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.model import CellInput, JudgeInput
from jobs.verdict import IdentityRow
from reports.blocks import Section
from reports.escape import anchor_of
from reports.evidence import diff, keys, readings, runs, surroundings, timeline, tokens
from reports.units import unit_of


def anchors(cell: CellInput) -> frozenset[str]:
    """The places on a cell's page that an `EvidenceRef` may lead to."""
    records = [record for _, record in runs.measured(cell)]
    names = {name for one in records for family in (one.facts, one.counters, one.metrics) for name in family}
    return frozenset({"tokens", *map(anchor_of, names)})


def sections(
    doc: JudgeInput, cell: CellInput, identity: Sequence[IdentityRow], metric: str | None
) -> tuple[Section, ...]:
    """The evidence of one cell, section by section; `identity` are the comparisons that the verdict holds of it.

    Raises SpecError when `metric` is given and no run has it.
    """
    measured = runs.measured(cell)
    if metric is not None:
        timed = (readings.samples(measured),) if unit_of(metric).startswith(("ms", "ns", "tokens/s")) else ()
        return (runs.build(cell), readings.build(measured, metric), *timed, runs.reruns(doc, cell))
    return (
        runs.build(cell),
        readings.build(measured, None),
        keys.build(measured),
        readings.samples(measured),
        diff.build(doc, cell, identity),
        tokens.build(measured),
        surroundings.certificates(measured),
        timeline.build(measured),
        surroundings.hosts(measured),
        surroundings.logs(measured),
        runs.reruns(doc, cell),
    )
