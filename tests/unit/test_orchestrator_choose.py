"""Which cards a sweep gets: real by UUID, simulated where there are none, refusals that name the entry."""

from __future__ import annotations

import pytest

from orchestrator import choose
from orchestrator.cards import CardName, CardProbe, ProbeError
from orchestrator.choose import choose_cards, fit, only_visible, resolve_visible
from orchestrator.scripted import ScriptedProbe

A = CardName("GPU-aaaa-1", "H200", "580", 0)
B = CardName("GPU-abbb-2", "H200", "580", 1)


class TwoCards(ScriptedProbe):
    """A probe that shows two real cards."""

    def __init__(self) -> None:
        super().__init__([A.uuid, B.uuid], lambda: 0.0)

    def cards(self) -> tuple[CardName, ...]:
        return (A, B)


REAL: CardProbe = TwoCards()


@pytest.mark.parametrize(
    ("value", "chosen"),
    [(None, (A, B)), ("1", (B,)), ("GPU-aaaa-1", (A,)), ("GPU-ab", (B,)), ("1,0", (B, A)), ("", ())],
)
def test_field_1_index_full_uuid_and_prefix_name_the_same_cards(
    value: str | None, chosen: tuple[CardName, ...]
) -> None:
    assert resolve_visible(value, (A, B)) == chosen


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("7", "'7' names 0 cards"),
        ("GPU-a", "names 2 cards"),
        ("0,0", "twice"),
        ("MIG-1", "MIG slice"),
        ("x", "names 0"),
    ],
)
def test_phantom_duplicate_and_mig_entries_are_refused_by_name(value: str, words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        resolve_visible(value, (A, B))


@pytest.mark.parametrize("value", [None, "", "0,1"])
def test_field_3_a_worker_that_does_not_see_exactly_one_card_is_refused(value: str | None) -> None:
    with pytest.raises(ProbeError, match="exactly one card"):
        only_visible(value, (A, B))
    assert only_visible("1", (A, B)) == B


def test_without_a_driver_cards_are_simulated_one_or_as_many_as_asked() -> None:
    (one,) = choose_cards(None, "auto", None, "no driver", None, "host")
    three = choose_cards(3, "auto", None, "no driver", None, "host")
    assert one.simulated
    assert three[0].uuid == one.uuid
    assert len({card.uuid for card in three}) == 3


def test_simulated_cards_serve_a_sweep_of_device_sim_also_beside_real_ones() -> None:
    assert choose_cards(None, "sim", REAL, "", None, "host")[0].simulated


@pytest.mark.parametrize("installed", [True, False])
def test_auto_takes_a_real_card_only_where_the_engine_can_call_it(
    monkeypatch: pytest.MonkeyPatch, *, installed: bool
) -> None:
    monkeypatch.setattr(choose, "cards_can_be_called", lambda: installed)
    found = choose_cards(None, "auto", REAL, "", None, "host")
    assert [card.simulated for card in found] == ([False, False] if installed else [True])
    assert choose_cards(None, "auto", None, "no driver", None, "host")[0].simulated


def test_real_cards_are_used_for_device_cuda() -> None:
    assert choose_cards(None, "cuda", REAL, "", None, "host") == (A, B)
    assert choose_cards(1, "cuda", REAL, "", "1", "host") == (B,)


def test_field_7_more_cards_than_there_are_is_refused_with_both_numbers() -> None:
    with pytest.raises(ProbeError, match=r"9 cards asked, 2 visible"):
        choose_cards(9, "cuda", REAL, "", None, "host")


def test_device_cuda_without_a_card_is_refused_with_the_cause() -> None:
    with pytest.raises(ProbeError, match="NVML is missing"):
        choose_cards(None, "cuda", None, "NVML is missing", None, "host")


C = CardName("GPU-cccc-3", "NVIDIA A100-SXM4-80GB", "580", 2)


class MixedHost(ScriptedProbe):
    """A probe that shows cards of two models."""

    def __init__(self) -> None:
        super().__init__([A.uuid, C.uuid], lambda: 0.0)

    def cards(self) -> tuple[CardName, ...]:
        return (A, C)


@pytest.mark.parametrize(
    ("card_class", "chosen"), [("any", (A, C)), ("h200", (A,)), ("H200", (A,)), ("a100", (C,)), ("A100-SXM4", (C,))]
)
def test_a_class_of_cards_chooses_by_the_models_name(card_class: str, chosen: tuple[CardName, ...]) -> None:
    assert choose_cards(None, "cuda", MixedHost(), "", None, "host", card_class) == chosen


def test_a_class_is_sought_among_visible_cards_only() -> None:
    with pytest.raises(ProbeError, match=r"class 'a100', and here are: H200 "):
        choose_cards(None, "cuda", MixedHost(), "", "0", "host", "a100")


def test_field_7_a_class_that_is_not_here_is_refused_with_the_names_that_are() -> None:
    with pytest.raises(ProbeError, match=r"class 'B300', and here are: H200, NVIDIA A100-SXM4-80GB"):
        choose_cards(None, "cuda", MixedHost(), "", None, "host", "B300")
    with pytest.raises(ProbeError, match=r"2 cards asked, 1 visible of class 'h200'"):
        choose_cards(2, "cuda", MixedHost(), "", None, "host", "h200")


def test_field_7_memory_chooses_among_cards_and_what_none_has_is_refused_with_what_there_is() -> None:
    small, large = (CardName(f"GPU-{n}", "NVIDIA H200", "580", n, memory_bytes=n * 10**9) for n in (80, 141))
    untold = CardName("GPU-0", "NVIDIA H200", "580", 0)
    assert fit("any", 0, (untold, small, large)) == (untold, small, large)
    assert fit("h200", 81 * 10**9, (untold, small, large)) == (large,)
    with pytest.raises(
        ProbeError, match=r"with 142,000,000,000 bytes or more, and here are: NVIDIA H200 \(141,000"
    ) as no:
        fit("any", 142 * 10**9, (large, untold))
    assert "NVIDIA H200 (memory unknown)" in str(no.value)
    with pytest.raises(ProbeError, match=r"cards with 200,000,000,000 bytes or more, and here are: sim-h200"):
        choose_cards(None, "sim", None, "", None, "host", "any", 200 * 10**9)


def test_simulated_cards_have_a_class_too() -> None:
    (card,) = choose_cards(None, "sim", None, "", None, "host", "H200")
    assert card.simulated
    with pytest.raises(ProbeError, match=r"class 'A100', and here are: sim-h200"):
        choose_cards(None, "sim", None, "", None, "host", "A100")
