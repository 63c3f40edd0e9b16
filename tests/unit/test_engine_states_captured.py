"""State that goes on from step to step under a graph: recurrent buffers, and a cache that was taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import BadRequest
from tests.unit.engine_mixture import PROMPT, asked, built
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny

STEPS = 64


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of gated delta attention with recurrent and convolution state, and one of attention."""
    return built(tmp_path_factory.mktemp("hybrid") / "m")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def test_field_33_recurrent_state_gives_the_same_64_tokens_with_graphs_on_and_off(hybrid: Path) -> None:
    """Three generations, so that a graph also replays over state that was zeroed under it."""
    on, off = (asked(hybrid, tokens=STEPS, generations=3, config={"capture": capture}) for capture in (True, False))
    assert on.streams == off.streams
    assert [len(ids) for ids, _ in on.streams] == [STEPS] * 3
    assert on.streams[0] == on.streams[1] == on.streams[2]
    assert on.counters["replays"] > 3 * (STEPS - 4) and off.counters["replays"] == 0
    assert on.broken_equations() == off.broken_equations() == []


def test_field_33_state_that_cannot_be_taken_back_is_refused_by_name(hybrid: Path) -> None:
    b = Bench(hybrid, rows=(len(PROMPT),))
    b.prefill(PROMPT)
    with pytest.raises(BadRequest, match=f"state '{b.plan.states[0].name}' holds all positions in one"):
        b.decoder.rewind(len(PROMPT) - 1)
    b.close()


def test_field_33_a_cache_taken_back_by_five_goes_on_alike_with_graphs_on_and_off(tiny: Path) -> None:
    assert after_rewind(tiny, capture=True) == after_rewind(tiny, capture=False)


def after_rewind(model: Path, *, capture: bool) -> list[object]:
    """What nine ids give, what five others give in the place of the last five, and those five again."""
    fed, others = [4, 5, 6, 7, 8, 9, 10, 11, 12], [12, 1, 2, 3, 4]
    b = Bench(model, rows=(len(TINY_PROMPT),), capture=capture)
    b.prefill(TINY_PROMPT)
    first = [(b.force(token), b.logits().tobytes()) for token in fed]
    b.decoder.rewind(len(TINY_PROMPT) + 4)
    between = [(b.force(token), b.logits().tobytes()) for token in others]
    b.decoder.rewind(len(TINY_PROMPT) + 4)
    again = [(b.force(token), b.logits().tobytes()) for token in fed[4:]]
    assert again == first[4:] and between != first[4:]
    assert bool(b.tally.read().get("replays", 0)) is capture
    b.close()
    return [*first, *between, *again]
