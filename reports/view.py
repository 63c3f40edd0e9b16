"""From a verdict to what is shown: every sum, share and order is made here or in the modules it calls.

`SweepView` stands for the whole document; `CellView` is one cell's derived figures, made only for cells that a form
really shows, so that a comment over thousands of cells stays quick.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from jobs import collector
from jobs.verdict import ArmView, CellVerdict, Finding, Verdict, tested_arms
from reports import divergence, ranking, traffic
from reports.blocks import Tone
from reports.escape import slug
from reports.format import plural
from reports.wording import OUTCOMES

_EXIT_ORDER: Final = {2: 0, 1: 1, 4: 2, 3: 3, 0: 4}  # several cells: 2, then 1, then 4, then 3, then 0
_NUMBER: Final = re.compile(r"(?<=[./_])\d+(?=[./_]|$)")
"""A layer's number in a node's name: the same node of each layer stands at one place."""
_TONE_ORDER: Final[dict[Tone, int]] = {"bad": 0, "warn": 1, "good": 2, "quiet": 3}


@dataclass(frozen=True, slots=True)
class SeamCause:
    """Seams of one reason, path and operator at one place of the layers: how many plan steps in each arm."""

    reason: str
    path: str
    operator: str
    place: str
    counts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell's figures: traffic by arm, comparisons in words, seams by cause."""

    source: CellVerdict
    slug: str
    tone: Tone
    base: ArmView | None
    head: ArmView | None  # the one arm under test: the head, or where there is none the only variant
    traffic: tuple[traffic.Traffic, ...]
    comparisons: tuple[divergence.Comparison, ...]
    causes: tuple[SeamCause, ...]
    simulated: tuple[str, ...]  # arms that ran on a simulated card

    @property
    def name(self) -> str:
        """The cell's name in the manifest."""
        return self.source.cell

    @property
    def is_of_variants(self) -> bool:
        """Whether variants stand where a head would."""
        return ranking.is_of_variants(self.source)

    @property
    def under_test(self) -> str:
        """What is held against base, as a heading: the one arm's name, or that there are several."""
        return _heading(arm.arm for arm in tested_arms(self.source.arms))

    @property
    def is_different_work(self) -> bool:
        """Whether head's tokens differ from base's, so that no figure of the two compares like with like."""
        return any(item.row.what == "pair" and item.is_claimed and not item.is_equal for item in self.comparisons)

    def parted(self, arm: str) -> str:
        """How many ids an arm gave as base did before the first that is another; empty where all are the same."""
        rows = [item.row for item in self.comparisons if item.row.what == "pair" and item.row.right == arm]
        first = next((row for row in rows if row.first_difference is not None), None)
        return "" if first is None else f" after {plural(first.common_prefix, 'equal id')}"


@dataclass(frozen=True, slots=True)
class Scope:
    """How much a section may show: these cells, at most `rows` rows a table; `left_out` cells stand elsewhere.

    `deep` is the limit of rows for tables behind a fold.
    """

    cells: tuple[CellView, ...]
    rows: int
    deep: int
    left_out: int = 0

    @property
    def is_single(self) -> bool:
        """Whether one cell is all there is, so that its name need not head each table."""
        return len(self.cells) == 1 and self.left_out == 0


@dataclass(frozen=True, slots=True)
class Whole:
    """What there is in all, where a verdict holds its worst cells and first findings alone; cells by outcome, worst
    first."""

    counts: tuple[tuple[str, int], ...]
    findings: int

    @property
    def cells(self) -> int:
        """All cells."""
        return sum(count for _, count in self.counts)


class SweepView:
    """The whole verdict as shown, or its beginning; derived parts are made once, when first asked for."""

    def __init__(self, verdict: Verdict, store: str = "", whole: Whole | None = None) -> None:
        self.verdict = verdict
        self._store = store
        self._whole = whole

    @property
    def cells_left_out(self) -> int:
        """Cells that stand elsewhere, none of them worse than those that are in view."""
        return 0 if self._whole is None else self._whole.cells - len(self.verdict.cells)

    @property
    def findings_left_out(self) -> int:
        """Findings that stand elsewhere."""
        return 0 if self._whole is None else max(0, self._whole.findings - len(self.verdict.findings))

    def command(self, *words: str) -> str:
        """A command line that finds this sweep's store: with the option that names it, unless it is the default one."""
        return f"assay {shlex.join(words)}{self._store}"

    @property
    def tone(self) -> Tone:
        """The tone of the verdict."""
        return OUTCOMES[self.verdict.outcome][0]

    @cached_property
    def cells(self) -> tuple[CellVerdict, ...]:
        """Cells, worst first: by exit code in the order that decides the sweep's, then by tone."""
        return tuple(sorted(self.verdict.cells, key=_severity))

    @cached_property
    def under_test(self) -> str:
        """The same of all cells."""
        return _heading(arm.arm for cell in self.verdict.cells for arm in tested_arms(cell.arms))

    @property
    def other_engines(self) -> bool:
        """Whether engines are compared, and not builds of one."""
        return "program" in self.verdict.varies

    @cached_property
    def of_ids(self) -> dict[tuple[str, str], list[Finding]]:
        """What was found of ids, by cell and arm."""
        return self.verdict.of_ids()

    @cached_property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """Outcome and number of cells that have it, worst first."""
        if self._whole is not None:
            return self._whole.counts
        counted = Counter(cell.outcome for cell in self.cells)
        return tuple(counted.items())

    @cached_property
    def ranked(self) -> tuple[ranking.Ranked, ...]:
        """Moved rows, worst first."""
        with collector.paused():
            return ranking.rank(self.verdict)

    @cached_property
    def worse(self) -> tuple[ranking.Ranked, ...]:
        """Of the moved rows, those that are worse or leave something unknown."""
        return tuple(row for row in self._telling if row.is_worse)

    @cached_property
    def others(self) -> tuple[ranking.Ranked, ...]:
        """Those that are better, or moved as declared."""
        return tuple(row for row in self._telling if not row.is_worse and not row.is_usual)

    @cached_property
    def _telling(self) -> tuple[ranking.Ranked, ...]:
        with collector.paused():
            return ranking.rank(self.verdict, usual=False)

    @cached_property
    def run_ids(self) -> tuple[str, ...]:
        """Every run that a row or finding cites, each once, in the order cited."""
        cited: dict[str, None] = {}
        for finding in self.verdict.findings:
            cited |= dict.fromkeys(finding.run_ids)
        for cell in self.verdict.cells:
            cells_runs = [row.run_ids for row in cell.identity]
            cells_runs += [row.run_ids for row in cell.exact] + [row.run_ids for row in cell.time]
            for run_ids in cells_runs:
                cited |= dict.fromkeys(run_ids)
        return tuple(cited)

    def first_cells(self, limit: int) -> tuple[CellView, ...]:
        """The `limit` worst cells."""
        return tuple(build_cell(cell) for cell in self.cells[:limit])


def build_cell(cell: CellVerdict) -> CellView:
    """The derived figures of one cell."""
    return CellView(
        source=cell,
        slug=slug(cell.cell),
        tone=OUTCOMES[cell.outcome][0],
        base=next((arm for arm in cell.arms if arm.role == "base"), None),
        head=next(iter(tested), None) if len(tested := tested_arms(cell.arms)) == 1 else None,
        traffic=tuple(traffic.build(arm) for arm in cell.arms),
        comparisons=tuple(divergence.build(row) for row in cell.identity),
        causes=_causes(cell),
        simulated=tuple(arm.arm for arm in cell.arms if is_simulated(arm)),
    )


def is_simulated(arm: ArmView) -> bool:
    """Whether an arm ran on a simulated card, whose uuid says so."""
    return arm.uuid.startswith("SIM-") or arm.card.startswith("sim")


def _heading(names: Iterable[str]) -> str:
    different = set(names)
    return different.pop() if len(different) == 1 else "under test" if different else "head"


def _severity(cell: CellVerdict) -> tuple[int, int]:
    return _EXIT_ORDER.get(cell.exit_code, 0), _TONE_ORDER[OUTCOMES[cell.outcome][0]]


def _causes(cell: CellVerdict) -> tuple[SeamCause, ...]:
    counts: dict[tuple[str, str, str, str], Counter[str]] = {}
    for arm in cell.arms:
        for seam in arm.seams:
            cause = (seam.reason, seam.path, seam.op, _NUMBER.sub("*", seam.node))
            counts.setdefault(cause, Counter())[arm.arm] += 1
    order = sorted(counts, key=lambda cause: -max(counts[cause].values()))
    return tuple(SeamCause(*cause, tuple((arm.arm, counts[cause][arm.arm]) for arm in cell.arms)) for cause in order)
