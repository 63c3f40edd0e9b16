"""What names say of layers, keys and values: a check on what the graph's structure says, and never more than that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_ROLE = re.compile(r"(?:past|present|new|cache|kv)*(?:(k|keys?)|(v|val|values?))?(?:cache|state)*")
_LAYER = re.compile(r"(?:layers?|blocks?|\bh)[._/](\d+)", re.IGNORECASE)
_SPEAKING = re.compile(r"past|present|cache|key|val|state|conv|layer|kv|\b[kv]\b", re.IGNORECASE)


def contradictions(kinds: Sequence[Sequence[str]]) -> list[str]:
    """How layer numbers in names contradict: `kinds` are past keys and values, then present ones (or past, present).

    Each lists its names in the order of data flow. Numbers count where a kind's names differ in one number alone and
    speak of caches: an automatic name's do not. They must grow along the layers and be one layer's in each kind.
    """
    read = [(names, *_numbers(names)) for names in kinds]
    found = [f"layers run in the order {', '.join(names)}" for names, _, numbers in read if not _grow(numbers)]
    for first, second in ((0, 1), (2, 3), (0, 2), (1, 3)):
        if second >= len(read) or not read[first][2] or not read[second][2]:
            continue
        (names, words, numbers), (others, other_words, other) = read[first], read[second]
        pairs = list(zip(numbers, other, strict=True))
        counted_on = words == other_words and _grow([number for pair in pairs for number in pair])  # past_0, past_1
        wrong = [i for i, (left, right) in enumerate(pairs) if left != right]
        if wrong and not counted_on:
            found.append(f"one layer has {names[wrong[0]]} and {others[wrong[0]]}")
    return found


def _grow(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def layer_of(*names: str) -> int | None:
    """The layer that the first of these names to speak of one is of; for a reader, since nothing is decided by it."""
    found = next(filter(None, map(_LAYER.search, names)), None)
    return int(found[1]) if found else None


def are_crossed(key: str, value: str) -> bool:
    """Whether the words in which two names differ say that the key is the value, or the value the key."""
    left, right = _words(key), _words(value)
    return "value" in {_role(w) for w in left - right} or "key" in {_role(w) for w in right - left}


def _role(word: str) -> str:
    found = _ROLE.fullmatch(word)
    if found is None:
        return ""
    return "key" if found[1] else "value" if found[2] else ""


def _words(name: str) -> set[str]:
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    return set(re.findall(r"[a-z]+", apart))


def _numbers(names: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Words around the layer's number, and that number for each name; none where the names do not say."""
    split = [re.split(r"(\d+)", name) for name in names]
    words = {tuple(parts[::2]) for parts in split}
    if len(words) != 1 or not _SPEAKING.search(re.sub(r"[_\d]", " ", names[0])):
        return (), []
    columns = list(zip(*(parts[1::2] for parts in split), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) != 1:
        return (), []
    return words.pop(), [int(number) for number in varying[0]]
