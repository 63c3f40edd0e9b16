"""A child's words cut short: no word is cut, so that what is secret can still be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.adapters.capped_log import CappedLog
from jobs.adapters.child import ChildEnd
from jobs.adapters.ends import last_log_line
from jobs.arm_build import LINE_CHARS, _tail
from jobs.excerpt import GONE, first_words, last_lines
from jobs.redact import redact

PART = "abcdefgh"
SECRETS = (f"ghp_{PART * 4}", f"sk-{PART}-{PART}-{PART}", f"password={PART * 4}", f"https://me:{PART * 4}@host")


@pytest.mark.parametrize("secret", SECRETS)
def test_no_part_of_a_secret_is_left_wherever_its_line_is_cut(secret: str) -> None:
    for before in range(LINE_CHARS - len(secret), LINE_CHARS):
        end = ChildEnd(1, log_tail="x" * before + f" {secret} and more\n")
        for kept in (last_log_line(end), *_tail(end)):
            assert PART[:4] not in redact(kept), (before, kept)


@pytest.mark.parametrize("secret", [*SECRETS, f"Bearer {PART * 4}"])
def test_no_part_of_a_secret_is_left_wherever_a_log_begins(tmp_path: Path, secret: str) -> None:
    for limit in range(20, 80):
        with CappedLog(tmp_path / "log", 1000) as log:
            log.feed(f"before {secret}\nthe last line\n".encode())
        kept = log.tail_text(limit)
        assert kept.endswith("the last line\n")
        assert PART[:4] not in redact(kept), (limit, kept)


def test_a_short_text_stays_as_it_is() -> None:
    assert first_words("  two  words ", 13) == "  two  words "
    assert last_lines("one\n\ntwo\n", 9) == "one\n\ntwo\n"


def test_a_long_line_keeps_its_first_words_and_is_marked() -> None:
    assert first_words("one two-three four", 15) == f"one {GONE}"
    assert first_words("onetwothreefour five", 15) == GONE
    assert last_lines("before\n" + "one two " * 10, 15) == f"one two {GONE}"


def test_whole_lines_are_kept_at_the_end() -> None:
    assert last_lines("one\ntwo\nthree\n", 10) == "two\nthree\n"
    assert last_lines("one\ntwo\nthree\n", 9) == "three\n"
