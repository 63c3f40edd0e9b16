"""Spans of tagged bytes, against a plain array that remembers for each byte which write it came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.base import Tag
from engine.device.spans import Spans

SIZE = 48


@dataclass(slots=True)
class Plain:
    """A byte is the last write's; a stretch is whole when one write put it there and none of it was touched since."""

    bytes_of: list[int] = field(default_factory=lambda: [0] * SIZE)
    writes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    count: int = 0

    def put(self, start: int, end: int, key: int) -> None:
        self.count += 1
        self.writes[self.count] = (start, end, key)
        for at in range(start, end):
            self.bytes_of[at] = self.count

    def drop(self, start: int, end: int) -> None:
        for at in range(start, end):
            self.bytes_of[at] = 0

    def whole(self, start: int, end: int) -> Tag | None:
        found = set(self.bytes_of[start:end])
        if len(found) != 1 or found == {0}:
            return None
        first, last, key = self.writes[found.pop()]
        untouched = set(self.bytes_of[first:last]) == set(self.bytes_of[start:end])
        return Tag(key) if untouched and first == start and end <= last else None


STRETCH = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda ends: (min(ends), max(ends)))
ACTS = st.lists(st.tuples(st.sampled_from(["put", "drop"]), STRETCH, st.integers(0, 5)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(acts=ACTS)
def test_spans_are_a_byte_array_with_memory(acts: list[tuple[str, tuple[int, int], int]]) -> None:
    spans, plain = Spans(), Plain()
    for act, (start, end), key in acts:
        if act == "put":
            spans.put(start, end, Tag(key))
            plain.put(start, end, key)
        elif start < end:
            spans.drop(start, end)
            plain.drop(start, end)
    for start in range(SIZE):
        for end in range(start + 1, SIZE + 1):
            assert spans.whole(start, end) == plain.whole(start, end), (start, end)


def test_neighbours_are_left_alone() -> None:
    spans = Spans()
    spans.put(0, 10, Tag(1))
    spans.put(10, 20, Tag(2))
    spans.put(20, 30, Tag(3))
    spans.drop(10, 20)
    assert [spans.whole(a, a + 10) for a in (0, 10, 20)] == [Tag(1), None, Tag(3)]


def test_a_part_overwritten_by_the_very_same_key_is_no_whole() -> None:
    spans = Spans()
    spans.put(0, 10, Tag(1))
    spans.put(4, 6, Tag(1))
    assert spans.whole(0, 10) is None and spans.whole(4, 6) == Tag(1)


def test_field_50_an_empty_span_holds_nothing_and_harms_nothing() -> None:
    spans = Spans()
    spans.put(10, 10, Tag(1))
    spans.put(10, 20, Tag(2))
    spans.put(10, 10, Tag(3))
    spans.drop(5, 30)
    spans.drop(5, 30)
    assert spans.whole(10, 20) is None and spans.whole(10, 10) is None


def test_pieces_that_grew_together_go_as_one() -> None:
    spans = Spans()
    for start, end in ((0, 4), (8, 12), (4, 8)):
        spans.put(start, end, Tag(3, start))
    assert spans.whole(0, 12) == Tag(3)
    spans.drop(2, 3)
    assert spans.whole(0, 12) is None
    spans.put(0, 12, Tag(4))
    assert spans.whole(0, 12) == Tag(4)
