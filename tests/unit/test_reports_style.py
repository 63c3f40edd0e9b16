"""The style sheet by itself: enough contrast for every pair of ink and ground that it uses, and nothing fetched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import reports

STYLE = (Path(reports.__file__).parent / "assets" / "report.css").read_text()
LIGHT, DARK = (
    dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", part))
    for part in STYLE.split("@media (prefers-color-scheme: dark)")[:2]
)
GROUNDS = ("page", "sheet", "wash")
PAIRS = [(ink, ground) for ink in ("ink", "soft", "link") for ground in GROUNDS]
PAIRS += [(tone, f"{tone}-wash") for tone in ("good", "bad", "warn", "quiet")]
PAIRS += [(tone, "sheet") for tone in ("good", "bad", "warn", "quiet")]
PAIRS += [(ink, f"{tone}-wash") for ink in ("ink", "soft") for tone in ("good", "bad", "warn")]
FILLS = ("hit", "retained", "bypassed", "staged", "floor", "above")


def luminance(colour: str) -> float:
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_does() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("ink", "ground"), PAIRS)
def test_field_80_text_has_contrast(scheme: dict[str, str], ink: str, ground: str) -> None:
    assert contrast(scheme[ink], scheme[ground]) >= 4.5


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("fill", FILLS)
def test_bars_stand_out_from_the_sheet(scheme: dict[str, str], fill: str) -> None:
    assert contrast(scheme[fill], scheme["sheet"]) >= 2.9


def test_nothing_is_fetched() -> None:
    assert not re.search(r"url\(|@import|@font-face|https?:|expression|</", STYLE)


def test_both_schemes_name_the_same_colours() -> None:
    assert set(LIGHT) == set(DARK)
