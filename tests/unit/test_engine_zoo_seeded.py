"""Weights from a seed: the same rows whichever way they are asked for, in the forms that they claim."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any
from weakref import ref

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.zoo.external import ALIGNMENT_BYTES, ExternalData, Layout
from engine.zoo.quant import dequantise
from engine.zoo.seeded import CHUNK_BYTES, Seeded, Source, filled

GOLDEN = "c1b0789a8a75fc3881679462aafc31a0bcd2d7d818472b4567c98b948a6e6922"
KINDS = ("codes", "codes with 0", "scales", "zero points", "uniform", "filled")


def tensor(kind: str, seed: int = 7) -> Seeded:
    """One of each kind."""
    source = Source(seed)
    return {
        "codes": source.codes("x", (50, 5, 16), 80, symmetric=True),
        "codes with 0": source.codes("x", (10, 5, 80), 80, symmetric=False),
        "scales": source.scales("x", (50, 5), 0.1),
        "zero points": source.zero_points("x", 50, 5),
        "uniform": source.uniform("x", (50, 3), -1.0, 2.0, np.float32),
        "filled": filled((50, 3), 0.5, np.float16),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_however_it_is_asked_for(kind: str) -> None:
    made = tensor(kind)
    whole = np.concatenate(list(made.chunks()))
    assert whole.shape == (50, made.row) and whole.dtype == made.dtype
    some = np.array([49, 0, 17, 17])
    np.testing.assert_array_equal(made.rows(some), whole[some])
    assert int(np.prod(made.shape)) == whole.size


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_seed_and_a_name_decide(kind: str) -> None:
    ids = np.arange(50)
    first = tensor(kind).rows(ids)
    np.testing.assert_array_equal(tensor(kind).rows(ids), first)
    assert not np.array_equal(tensor(kind, seed=8).rows(ids), first)
    other = Source(7).uniform("y", (50, 3), -1.0, 2.0, np.float32).rows(ids)
    assert not np.array_equal(other, tensor("uniform").rows(ids))


def test_bytes_do_not_change_from_release_to_release() -> None:
    digest = hashlib.sha256()
    for kind in KINDS:
        digest.update(np.ascontiguousarray(tensor(kind).rows(np.arange(50))).tobytes())
    assert digest.hexdigest() == GOLDEN


def test_codes_and_zero_points_are_what_they_say() -> None:
    ids = np.arange(50)
    codes, plain = (tensor(k).rows(ids) for k in ("codes", "codes with 0"))
    nibbles = {
        n: np.bincount(np.concatenate([c & 15, c >> 4], axis=None), minlength=16) for n, c in enumerate((codes, plain))
    }
    assert nibbles[0][0] == 0 and nibbles[0].min(where=np.arange(16) > 0, initial=9999) > 300
    assert nibbles[0][8] > 1.5 * nibbles[0][7]
    assert nibbles[1].min() > 300
    points = tensor("zero points").rows(ids)
    assert points.shape == (50, 3)  # five blocks, two a byte
    assert {*np.unique(points & 15)} == {6, 7, 8, 9} == {*np.unique(points[:, :2] >> 4)}
    assert not (points[:, 2] >> 4).any()  # rows are padded with 0


@pytest.mark.parametrize("asymmetric", [False, True])
def test_values_are_matmulnbits_own(asymmetric: bool) -> None:
    linear = Source(3).linear("w", 300, 160, 0.5, asymmetric=asymmetric)
    ids = np.array([299, 4, 5])
    np.testing.assert_array_equal(linear.values(ids), dequantise(linear.packed(ids)))
    every = linear.values(np.arange(300))
    assert abs(float(every.std()) - 0.5) < 0.02 and abs(float(every.mean())) < 0.02
    x = np.random.default_rng(0).standard_normal((4, 160))
    np.testing.assert_allclose(linear.product(x), x @ every.T.astype(np.float64), atol=1e-12)


def test_chunks_are_small_and_let_go_before_the_next() -> None:
    made = Source(1).codes("large", (20000, 40, 16), 640, symmetric=True)
    alive: list[ref[NDArray[Any]]] = []
    for chunk in made.chunks():
        assert chunk.nbytes <= CHUNK_BYTES
        alive.append(ref(chunk))
        assert sum(r() is not None for r in alive) <= 2
    assert len(alive) > 3


class Watched:
    """A tensor that notes how many of its chunks are alive when it is asked for another."""

    dtype, shape = np.dtype(np.uint8), (8, 1000)

    def __init__(self) -> None:
        self.most_alive = 0

    def chunks(self) -> Iterator[NDArray[Any]]:
        given: list[ref[NDArray[Any]]] = []
        for n in range(8):
            self.most_alive = max(self.most_alive, sum(r() is not None for r in given))
            chunk = np.full((1, 1000), n, np.uint8)
            given.append(ref(chunk))
            yield chunk
            del chunk


def test_a_file_is_written_chunk_by_chunk_where_the_layout_said(tmp_path: Any) -> None:
    watched, plain = Watched(), np.arange(7, dtype=np.int64)
    layout = Layout("data")
    pointers = [layout.add("a", plain), layout.add("b", watched), layout.add("c", plain)]
    written = layout.write(tmp_path)
    content = (tmp_path / "data").read_bytes()
    assert (written.size_bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert layout.size_bytes == len(content)
    assert watched.most_alive <= 1
    stored: list[NDArray[Any]] = [plain, np.repeat(np.arange(8, dtype=np.uint8), 1000), plain]
    for pointer, values in zip(pointers, stored, strict=True):
        entries = {e.key: e.value for e in pointer.external_data}
        offset, length = int(entries["offset"]), int(entries["length"])
        assert offset % ALIGNMENT_BYTES == 0
        assert content[offset : offset + length] == values.tobytes()
    with ExternalData(tmp_path / "again") as data:
        assert [data.add(n, v).external_data[1].value for n, v in (("a", plain), ("b", Watched()), ("c", plain))] == [
            p.external_data[1].value for p in pointers
        ]
        data.close()
    assert (tmp_path / "again").read_bytes() == content


def test_a_hole_has_the_size_and_takes_no_space(tmp_path: Any) -> None:
    layout = Layout("data")
    layout.add("a", Source(1).codes("large", (1 << 20, 40, 16), 640, symmetric=True))
    layout.reserve(tmp_path)
    status = (tmp_path / "data").stat()
    assert status.st_size == layout.size_bytes == 640 << 20
    assert status.st_blocks * 512 < 1 << 20
