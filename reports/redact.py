"""Secrets taken out of what a run printed or was started with, before any report shows it."""

from __future__ import annotations

import re
from typing import Final

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
_USERINFO: Final = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE)
_COUNTED: Final = re.compile(r"[\d.,\[(]+")


def redact(text: str) -> str:
    """`text` with tokens of known shape, assigned secrets and credentials in addresses replaced by `HIDDEN`.

    Names that end in "tokens" and hold a number are counts, not secrets, and stay.
    """
    text = _TOKENS.sub(HIDDEN, text)
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _ASSIGNED.sub(_assigned, text)


def _assigned(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    if _COUNTED.match(value) and "token" in name.lower():
        return match.group()
    return f"{name}{sign}{HIDDEN}"
