"""Numbers as shown: exact where exact, never a false zero, a lost sign or a missing reading passed off as one."""

from __future__ import annotations

import pytest

from jobs.model import Missing
from reports.format import (
    bytes_binary,
    bytes_decimal,
    bytes_exact,
    change,
    exact,
    integer,
    number,
    percent,
    plural,
    points,
    show,
    signed_percent,
)

LARGE = 2**53 + 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.000 kB"),
        (2_349_010_944, "2.349 GB"),
        (999_999, "1.000 MB"),
        (-1500, "−1.500 kB"),
    ],
)
def test_decimal_bytes_keep_four_digits(value: int, shown: str) -> None:
    assert bytes_decimal(value) == shown


def test_binary_and_exact_bytes_state_their_unit() -> None:
    assert bytes_binary(2 * 2**20) == "2.000 MiB"
    assert bytes_exact(2_349_010_944) == "2,349,010,944 B"


def test_field_81_integers_beyond_2_to_53_stay_exact() -> None:
    assert integer(LARGE) == "9,007,199,254,740,993"
    assert exact(LARGE, "bytes") == "9,007,199,254,740,993 B"
    assert change(LARGE - 1, LARGE, "count").startswith("+1 ")


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (-0.0004, "−0.04 %"),
        (0.0000004, "+0.00004 %"),
        (0, "0 %"),
        (-0.0, "0 %"),
        (0.106, "+10.6 %"),
        (1.00004 - 1, "+0.004 %"),
    ],
)
def test_field_81_small_changes_are_no_negative_zero(share: float, shown: str) -> None:
    assert signed_percent(share) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.701612, "70.16 %"),
        (0.9999, "99.99 %"),
        (0.9999999, "99.99999 %"),
        (0.00004, "0.004 %"),
        (0.004, "0.40 %"),
    ],
)
def test_a_share_that_is_not_whole_never_shows_as_whole(share: float, shown: str) -> None:
    assert percent(share) == shown


def test_points_and_floats() -> None:
    assert points(-0.2071) == "−20.71 pp"
    assert points(0.00001) == "+0.001 pp"
    assert number(0.000123456) == "0.0001235"
    assert number(1234.5678) == "1,235"
    assert number(float("nan")) == "not finite"


def test_figures_of_a_column_keep_their_digits() -> None:
    assert [show(value, "ms") for value in (1.8, 12.5, 0.0)] == ["1.800 ms", "12.50 ms", "0.000 ms"]
    assert show(1.0, "x") == "1.000×"


def test_field_81_a_ratio_beside_one_is_not_shown_as_one() -> None:
    shown = [show(ratio, "x") for ratio in (0.004, 0.9999, 1.00004, 1 + 1e-9, 1 - 1e-9, 1.0, 1)]
    assert shown == ["0.004000×", "0.9999×", "1.00004×", ">1×", "<1×", "1.000×", "1.000×"]


def test_missing_is_its_reason_and_compares_with_nothing() -> None:
    gone = Missing(missing="varies 3 to 5")
    assert show(gone, "bytes") == "n/a: varies 3 to 5"
    assert show(None, "bytes") == "not recorded"
    assert change(gone, 5, "count") == "no comparison"
    assert change(5, None, "count") == "no comparison"


@pytest.mark.parametrize(
    ("base", "head", "unit", "shown"),
    [
        (100, 100, "count", "unchanged"),
        (0, 30, "count", "+30 (from 0)"),
        (1, 31, "count", "+30 (31×)"),
        (200, 100, "bytes", "−100 B (−50.0 %)"),
        (0.5, 0.75, "ratio", "+25.00 pp"),
        (10, 12, "bytes/token", "+2 B/token (+20.0 %)"),
    ],
)
def test_change_states_difference_and_proportion(base: float, head: float, unit: str, shown: str) -> None:
    assert change(base, head, unit) == shown


def test_plural() -> None:
    assert [plural(0, "run"), plural(1, "run"), plural(2, "witness", "witnesses")] == ["0 runs", "1 run", "2 witnesses"]
