"""What is taken out of a document before it is shown, and what is left as it stands."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.redact import HIDDEN, redact, redacted


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        (["--api-key", "s3cretvalue99", "--tokens", "128"], ["--api-key", HIDDEN, "--tokens", "128"]),
        ({"api_keys": ["plainvalue77", {"of": "plainvalue78"}]}, {"api_keys": [HIDDEN, {"of": HIDDEN}]}),
        ({"password": {"value": "open sesame"}}, {"password": {"value": HIDDEN}}),
        ({"bytes_per_token": {"unit": "B/token"}}, {"bytes_per_token": {"unit": "B/token"}}),
        ({"token_stream": ["length", "eos"]}, {"token_stream": ["length", "eos"]}),
    ],
)
def test_what_stands_inside_of_a_secret_or_behind_its_option_is_hidden(document: Any, shown: Any) -> None:
    assert redacted(document) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p/w@h/db", f"postgresql://{HIDDEN}@h/db"),
        ("Authorization: Bearer abc", f"Authorization: Bearer {HIDDEN}"),
        ("'authorization': 'xyz', next", f"'authorization': '{HIDDEN}', next"),
        ("https://h/path?q=1", "https://h/path?q=1"),
        ("tokens: identical", "tokens: identical"),
    ],
)
def test_credentials_in_a_text_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
