"""tokenizer.json files: byte-level BPE as the `tokenizers` library reads it, written without that library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "Ġ"
TINY_SPECIALS = ("<pad>", "<s>", "</s>")


def byte_level_bpe(tokens: Sequence[str], merges: Iterable[str], specials: Iterable[int], *, digits: bool) -> bytes:
    """A tokenizer.json of byte-level BPE without prefix space.

    `tokens` in id order, `merges` as "left right", `specials` the ids never split or merged; `digits` cuts every
    digit off on its own first, as the SmolLM tokenizers do.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    cuts: dict[str, Any] = byte_level
    if digits:
        cuts = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": tokens[n], **flags} for n in specials],
        "normalizer": None,
        "pre_tokenizer": cuts,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return json_bytes(document)


def tiny_tokenizer(vocabulary: int) -> bytes:
    """A tokenizer.json of exactly `vocabulary` ids (259 to 512): three specials, all bytes, common letter pairs.

    Pairs are a space with a letter, then a vowel with a consonant either way round: enough that text has fewer ids
    than bytes, and every id can be spelt.
    """
    vowels = "aeiou"
    pairs = [(_SPACE, letter) for letter in _LETTERS + _LETTERS.upper()]
    for vowel in vowels:
        for letter in (c for c in _LETTERS if c not in vowels):
            pairs += [(vowel, letter), (letter, vowel)]
    alphabet = _byte_alphabet()
    merges = pairs[: vocabulary - len(TINY_SPECIALS) - len(alphabet)]
    tokens = [*TINY_SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    assert len(tokens) == vocabulary, f"the tiny tokenizer has {len(tokens)} ids, not {vocabulary}"
    return byte_level_bpe(tokens, (" ".join(pair) for pair in merges), range(len(TINY_SPECIALS)), digits=True)


def json_bytes(document: Any) -> bytes:
    """A JSON file's content: two-space indent, characters as they are, one newline at the end."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE gives each byte, in byte order (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
