"""The full acceptance matrix on the real model, each cell a child process of its own, two at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from engine.config import POLICIES
from tests.unit.engine_child import Ended, parent
from tests.unit.engine_rig import FRANCE_GREEDY, FRANCE_IDS, smollm2

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1800)]

BUDGETS = (None, "75%", "50%", "35%")
CELLS = list(product(BUDGETS, POLICIES, (True, False)))
REFUSED = [("25%", policy, True) for policy in POLICIES if policy != "zero_copy"]
GENERATIONS = 3
Cell = tuple[str | None, str, bool]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Ended]:
    """Every cell's child, run to its end."""
    folder = tmp_path_factory.mktemp("accept")
    model = smollm2(folder)

    def one(cell: Cell) -> Ended:
        budget, policy, capture = cell
        scratch = folder / "-".join(map(str, cell)).replace("%", "")
        scratch.mkdir()
        return parent(
            scratch,
            {
                "protocol": 1,
                "model": str(model),
                "prompt_ids": list(FRANCE_IDS),
                "tokens": 32,
                "generations": GENERATIONS,
                "ignore_eos": True,
                "config": {"weight_budget": budget, "policy": policy, "capture": capture},
            },
        )

    cells = [*CELLS, *REFUSED]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(cells, pool.map(one, cells), strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_every_cell_gives_the_one_list_of_ids(ended: dict[Cell, Ended], cell: Cell) -> None:
    child = ended[cell]
    assert child.code == 0, child.err
    generations = [line for line in child.lines if line["type"] == "generation"]
    assert [g["ids"] for g in generations] == [list(FRANCE_GREEDY)] * GENERATIONS
    result = child.last()
    assert [e for e in result["equations"] if not e["holds"]] == []
    check_counters(result["counters"], cell)


def check_counters(counters: dict[str, Any], cell: Cell) -> None:
    """That the cell took the path it is named for."""
    budget, policy, capture = cell
    steps = [counters[n] for n in ("warm_steps", "captures", "replays", "fallbacks")]
    assert steps == ([1, 1, 31 * GENERATIONS - 2, 0] if capture else [0, 0, 0, 0])
    if budget is None:
        assert counters["page_ins"] == 0
        assert (counters["segments"], counters["seams"]) == ((1, 0) if capture else (0, 0))
        return
    assert counters["zero_copy_bytes" if policy == "zero_copy" else "htod_bytes"] > 0
    assert counters["device_zero_copy_bytes"] == counters["zero_copy_bytes"]
    assert counters["device_htod_bytes"] == counters["htod_bytes"]
    if policy == "lru":
        assert counters["bypassed_page_ins"] == 0 and counters["evictions"] > 0
    if policy in ("stable_slot", "staging", "zero_copy"):
        assert counters["evictions"] == 0 and counters["vmm_calls_steady"] == 0


def test_gaps_are_the_same_numbers_in_every_cell(ended: dict[Cell, Ended]) -> None:
    """Not the ids alone: the distances between the two best logits, to the last bit."""
    gaps = {tuple(line["gaps"]) for c in CELLS for line in ended[c].lines if line["type"] == "generation"}
    assert len(gaps) == 1


@pytest.mark.parametrize("cell", REFUSED, ids=lambda c: "-".join(map(str, c)))
def test_a_quarter_is_refused_with_both_numbers(ended: dict[Cell, Ended], cell: Cell) -> None:
    child = ended[cell]
    assert child.code == 13
    line = child.last()
    assert "27904320" in line["message"] and "28311552" in line["message"] and line["remedy"]
