"""Which bytes hold what: spans of addresses with a tag, kept disjoint."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from engine.device.base import Tag


class Spans:
    """Disjoint half-open spans [start, end), each with a tag; a later span cuts what it overlaps."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: dict[int, tuple[int, Tag]] = {}

    def put(self, start: int, end: int, tag: Tag) -> None:
        """Say that [start, end) now holds `tag`; whatever overlapped it is no longer whole and goes.

        The piece of the same key that comes before it, or after it, grows by it.
        """
        if start == end:
            return
        self.drop(start, end)
        after = self._spans.get(end)
        if after is not None and after[1] == Tag(tag.key, tag.offset_bytes + end - start):
            self.drop(end, after[0])
            end = after[0]
        at = bisect_left(self._starts, start) - 1
        if at >= 0:
            first = self._starts[at]
            until, before = self._spans[first]
            if until == start and tag == Tag(before.key, before.offset_bytes + start - first):
                self.drop(first, until)
                start, tag = first, before
        self._starts.insert(bisect_left(self._starts, start), start)
        self._spans[start] = (end, tag)

    def drop(self, start: int, end: int) -> None:
        """Forget every span that overlaps [start, end): a part overwritten or unmapped is no whole any more."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._spans[self._starts[first]][0] <= start:
            first += 1
        last = bisect_left(self._starts, end)
        for gone in self._starts[first:last]:
            del self._spans[gone]
        del self._starts[first:last]

    def whole(self, start: int, end: int, offset_bytes: int = 0) -> Tag | None:
        """The tag of [start, end) where all of it is one key's, from `offset_bytes` on; what is around it may too."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        first = self._starts[at]
        until, tag = self._spans[first]
        held = Tag(tag.key, tag.offset_bytes + start - first)
        return held if end <= until and held.offset_bytes == offset_bytes else None
