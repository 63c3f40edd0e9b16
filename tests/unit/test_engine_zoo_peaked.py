"""Peaked heads: what makes one unfit, and passes that go piece by piece or without a block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import BadRequest
from engine.zoo.passes import Past, through
from engine.zoo.peaked import Peak
from engine.zoo.quant import quantise_int4
from engine.zoo.seeded_weights import SeededBody, SeededDecoder, SeededHybrid
from tests.unit.test_engine_zoo_geometries import small

FIT = Peak(
    1.0,
    np.array([3, 4]),
    quantise_int4(np.ones((2, 32)), asymmetric=False),
    np.array([0.9, 2.0]),
    np.array([0.8, 0.1]),
    {"layers.0.attn": 2, "layers.0.mlp": 0, "layers.1.attn": 0, "layers.1.mlp": 1},
)


def body(name: str, layers: int) -> SeededBody:
    form = small(name, layers=layers)
    return (SeededHybrid if name == "35b-a3b" else SeededDecoder)(form.geometry, 5, peaked=False)  # type: ignore[arg-type]


def test_a_head_is_fit_while_each_gap_is_clear_and_each_layer_counts() -> None:
    assert FIT.is_fit
    assert not replace(FIT, gaps=np.array([0.4, 2.0])).is_fit
    assert not replace(FIT, changes=np.array([1.0, 0.1])).is_fit  # float16 could turn the first answer over
    assert not replace(FIT, changed_without={**FIT.changed_without, "layers.1.mlp": 0}).is_fit


def test_a_seed_without_a_fit_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.zoo.seeded_weights.peak", lambda *_: replace(FIT, gaps=np.zeros(2)))
    with pytest.raises(BadRequest, match="none of 4 draws") as caught:
        _ = body("qwen2.5-7b", 1).peak
    assert "--no-peak" in caught.value.remedy


def test_positions_one_by_one_are_positions_at_once() -> None:
    model = body("qwen2.5-0.5b", 3)
    embedded = model.embedded(np.arange(20, 29))
    feed = model.hidden_in_turn()
    parts = [feed(embedded[:4]), *(feed(embedded[n : n + 1]) for n in range(4, 9))]
    np.testing.assert_allclose(np.concatenate(parts), model.hidden(embedded), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "35b-a3b"])
def test_blocks_left_out_together_are_blocks_left_out_alone(name: str) -> None:
    model = body(name, 3)
    embedded = model.embedded(np.arange(20, 26))
    together = dict(model.hidden_without_each(embedded, model.block_names))
    assert list(together) == [None, *model.block_names]
    assert not np.array_equal(together[None], model.hidden(embedded))  # float16 it is
    for block, hidden in together.items():
        alone = through(model.blocks(model), embedded, without=block)
        off = np.linalg.norm(hidden - alone, axis=1) / np.linalg.norm(alone, axis=1)
        assert np.median(off) < 0.02, block
        if block is not None:
            assert np.abs(hidden - together[None]).max() > 0.05, block


def test_a_past_belongs_to_one_sequence() -> None:
    past = Past()
    keys = np.ones((2, 1, 4))
    assert past.joined("a", keys, keys)[0].shape == (2, 1, 4)
    assert past.joined("a", keys[:1], keys[:1])[1].shape == (3, 1, 4)
    assert past.joined("b", keys[:1], keys[:1])[0].shape == (1, 1, 4)
