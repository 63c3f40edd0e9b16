"""Secrets taken out of what a run printed or was started with, before anything stores or shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "[redacted]"

_TOKENS: Final = re.compile(
    r"""
      \bgh[pousr]_[A-Za-z0-9]{16,}                     # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bglpat-[A-Za-z0-9_-]{16,}                       # GitLab
    | \bhf_[A-Za-z0-9]{16,}                            # Hugging Face
    | \bsk-[A-Za-z0-9_-]{16,}
    | \bxox[abprs]-[A-Za-z0-9-]{10,}                   # Slack
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                    # AWS
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}
    """,
    re.VERBOSE,
)
_BEARER: Final = re.compile(r"(?i)\b(bearer|basic|token)\s+[A-Za-z0-9+/=._~-]{12,}")
_ASSIGNED: Final = re.compile(
    r"(?i)\b([A-Z0-9_.-]*(?:secret|token|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credential)"
    r"[A-Z0-9_.-]*)([\"']?\s*[=:]\s*[\"']?)([^\s\"',;&]{4,})"
)
_OPTION_NAME: Final = (
    r"(?i)(--[a-z0-9-]*(?:secret|token|passw(?:or)?d|passphrase|api-?key|access-?key|private-?key|credential)s?)"
)
_OPTION: Final = re.compile(_OPTION_NAME + r"(\s+['\"]?)([^\s\"']{4,})")
_OPTION_WORD: Final = re.compile(_OPTION_NAME)
_AUTHORIZED: Final = re.compile(r"(?i)\b(authorization[\"']?\s*[=:]\s*[\"']?(?:[a-z]+\s+)?)[^\s\"',;]+")
_USERINFO: Final = re.compile(r"\b([a-z][a-z0-9+.-]*://)(?:[^\s/@]+|[^\s/@:]+:[^\s@]+)@", re.IGNORECASE)
_SECRETS: Final = r"(?i)secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credential"
_HOLDS_SECRETS: Final = re.compile(_SECRETS)
_SECRET_NAME: Final = re.compile(_SECRETS + r"|token(?!s)")
_COUNTED: Final = re.compile(r"[\d.,:\[\](){}-]+")
_VARIABLES: Final = re.compile(r"(?:\$\{?[A-Z_][A-Z0-9_]*\}?[:/]?)+")
_WORD: Final = re.compile(r"[a-z]+")


def redact(text: str) -> str:
    """`text` with tokens of known shape, assigned secrets and credentials in addresses replaced by `HIDDEN`.

    Names of tokens that hold a number are counts, and "tokens: identical" is a sentence: those stay, and so does the
    name of a variable.
    """
    text = _TOKENS.sub(HIDDEN, text)
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    text = _AUTHORIZED.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _ASSIGNED.sub(_assigned, _OPTION.sub(_assigned, text))


def redacted(document: Any, name: str = "") -> Any:
    """The same of every text of a document that JSON can hold; a text is judged with the `name` that it stands under.

    What stands inside of a list or mapping that a secret's name is given to is judged by that name, and a word of a
    command by the option before it.
    """
    if isinstance(document, str):
        return as_told(name, document)
    inner = name if _HOLDS_SECRETS.search(name) else ""
    if isinstance(document, Mapping):
        return {key: redacted(value, inner or key) for key, value in document.items()}
    if not isinstance(document, list | tuple):
        return document
    before = ["", *(one if isinstance(one, str) and _OPTION_WORD.fullmatch(one) else "" for one in document)]
    return [redacted(one, inner or option) for one, option in zip(document, before, strict=False)]


def as_told(name: str, value: str) -> str:
    """A value as it may be told under its name: all of it is hidden where the name is a secret's."""
    is_secret = _SECRET_NAME.search(name) and len(value) > 3 and not _COUNTED.fullmatch(value)
    return HIDDEN if is_secret else redact(value)


def _assigned(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    is_count = "token" in name.lower() and _COUNTED.fullmatch(value)
    is_sentence = "tokens" in name and sign.endswith(" ") and _WORD.fullmatch(value)
    is_plain = is_count or is_sentence or _VARIABLES.fullmatch(value)
    return match.group() if is_plain else f"{name}{sign}{HIDDEN}"
