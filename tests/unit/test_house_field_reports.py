"""Tests that carry a field report's number, and docs/field-reports.md: one list, in both directions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$")
ORCHESTRATION = {1, 3, 5, 7, 8, 9, 10, 11, 13, 14, 15, 17, 19, 64, 65, 67, 70, 71, 72}
"""Schedulers, cards and stores: rows without which a run could be lost, made twice or blamed wrongly."""
REQUIRED = {20, 21, 23, 25, 27, 28, 29, 30, 31, 32, 33, 35, 36, 39, 40, 41, 42, 44, 45, 47, 48, 50, 51, 52, 53, 54}
"""Comparisons, tokens and models: rows without which a wrong answer could pass for a right one."""

REPORTS = {73, 74, 75, 76, 77, 80, 81}
"""Comments and pages: rows without which a verdict could be lost, misread, or made to act for a stranger."""


@pytest.fixture(scope="module")
def listed(checkout: Path) -> list[tuple[int, str, str]]:
    """Rows of the page: number, promise, sources."""
    lines = (checkout / "docs" / "field-reports.md").read_text(encoding="utf-8").splitlines()
    return [(int(m[1]), m[2], m[3]) for m in map(ROW.match, lines) if m]


@pytest.fixture(scope="module")
def tested(checkout: Path) -> Counter[int]:
    """How many tests carry each number."""
    texts = (path.read_text(encoding="utf-8") for path in (checkout / "tests").rglob("test_*.py"))
    return Counter(int(n) for text in texts for n in re.findall(r"^ *(?:async )?def test_field_(\d+)_", text, re.M))


def test_every_test_with_a_number_has_its_row_and_every_row_a_test(
    listed: list[tuple[int, str, str]], tested: Counter[int]
) -> None:
    assert sorted(tested) == [number for number, _, _ in listed], "rows in order, each once"


def test_rows_on_comparisons_tokens_models_orchestration_and_reports_are_all_there(tested: Counter[int]) -> None:
    assert set(tested) >= REQUIRED | ORCHESTRATION | REPORTS


def test_every_row_has_a_promise_and_a_public_source(listed: list[tuple[int, str, str]]) -> None:
    for number, promise, sources in listed:
        assert promise.endswith("."), number
        assert re.fullmatch(r"(\[[\w./-]+#\d+\]\(https://github\.com/[\w./-]+/issues/\d+\)(, |$))+", sources), number
