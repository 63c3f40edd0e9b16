"""Text to ids and back, and what is said when a model folder cannot do it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadRequest, ModelFilesError
from engine.tokens import Tokens
from engine.zoo.tokenizer_json import TINY_SPECIALS, byte_level_bpe, tiny_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "tokenizer.json").write_bytes(tiny_tokenizer(512))
    return Tokens(folder)


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        "Élan naïve, œuvre",
        "你好，世界",
        "🙂🚀 fin",
        "a  b\t\n\n c",
        " leading",
        "2024-06",
        "",
    ],
)
def test_text_survives_the_round_trip(tiny: Tokens, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert all(len(TINY_SPECIALS) <= n < 512 for n in ids)


@given(st.text(max_size=60))
@settings(max_examples=80, deadline=None)
def test_any_text_survives(tiny: Tokens, text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert len(ids) <= len(text.encode())


def test_a_prompt_of_bytes_that_are_no_text_is_refused(tiny: Tokens) -> None:
    with pytest.raises(BadRequest, match="UTF-8"):
        tiny.encode("caf\udce9")


def test_every_id_can_be_spelt(tiny: Tokens) -> None:
    spelt = [tiny.decode([n]) for n in range(512)]
    assert spelt[:3] == ["<pad>", "<s>", "</s>"]
    assert all(spelt)
    assert not any(text.startswith("<id ") for text in spelt)


def test_pairs_merge_and_digits_do_not(tiny: Tokens) -> None:
    assert len(tiny.encode("ta")) == 1
    assert len(tiny.encode("2024")) == 4


def test_special_tokens_are_recognised_and_shown(tiny: Tokens) -> None:
    assert tiny.encode("<s>ta</s>") == [1, *tiny.encode("ta"), 2]
    assert tiny.decode([1, *tiny.encode("ta"), 2]) == "<s>ta</s>"


def test_an_id_without_a_token_is_shown_by_number(tiny: Tokens) -> None:
    ta = tiny.encode("ta")
    assert tiny.decode([*ta, 900, 901, *ta]) == "ta<id 900><id 901>ta"


def test_bytes_of_one_character_join_across_ids(tiny: Tokens) -> None:
    ids = tiny.encode("你")
    assert len(ids) == 3
    assert tiny.decode(ids) == "你"


def test_merges_apply_in_their_order(tmp_path: Path) -> None:
    tokens = ["<e>", "a", "b", "c", "ab", "bc", "abc"]
    (tmp_path / "tokenizer.json").write_bytes(byte_level_bpe(tokens, ["b c", "a b", "a bc"], [0], digits=False))
    loaded = Tokens(tmp_path)
    assert loaded.encode("abc") == [6]
    assert loaded.encode("ab") == [4]


def test_no_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"has no tokenizer\.json") as caught:
        Tokens(tmp_path)
    assert "--prompt-ids" in caught.value.remedy


def test_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelFilesError, match="Git LFS pointer") as caught:
        Tokens(tmp_path)
    assert "git lfs pull" in caught.value.remedy


@pytest.mark.parametrize("content", [b"{", b'{"model": {"type": "NoSuch"}}', b"\xff\xfe", b""])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json") as caught:
        Tokens(tmp_path)
    assert "--prompt-ids" in caught.value.remedy


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizer(512))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModelFilesError, match="`tokenizers` library") as caught:
        Tokens(tmp_path)
    assert "pip install" in caught.value.remedy
