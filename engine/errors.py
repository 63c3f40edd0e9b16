"""Why a run ended without a result: one class an exit code.

The tree::

    EngineError                 1   never raised itself
    +- BadRequest              10   the request cannot be understood
    +- ModelFilesError         11   model files unreadable or broken
    +- UnsupportedModel        12   the graph asks for what is not served
    +- Refused                 13   budget or limit too small
    +- OutOfMemory             14   the device or host ran out
    +- NonFiniteLogits         15   a step gave NaN or infinity
    +- DeviceFailure           16   driver call failed, or a device rule was broken
    +- CannotLoad              17   what another engine runs on is not on this host
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from engine.plain import plain

SHOWN_REASONS = 4
"""How many of an unsupported model's reasons its message names."""


class EngineError(Exception):
    """A run's end with a cause and a remedy.

    `message` names the thing at fault in one line, `remedy` says what the user can do about it.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "error"

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = plain(message)  # it quotes names out of models and files
        self.remedy = plain(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class BadRequest(EngineError):
    """The request is malformed: unknown key, empty prompt, zero tokens, negative budget."""

    exit_code = 10
    kind = "bad_request"


class ModelFilesError(EngineError):
    """Model files are missing, truncated, not what they claim to be, or lie outside the model folder."""

    exit_code = 11
    kind = "model_files"


class UnsupportedModel(EngineError):
    """The graph holds what the engine does not serve; `reasons` lists all of it, by node and op."""

    exit_code = 12
    kind = "unsupported"

    def __init__(self, message: str, remedy: str = "", reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy)
        self.reasons = reasons

    @classmethod
    def because(cls, what: str, reasons: Sequence[str]) -> UnsupportedModel:
        """The refusal with those reasons; its message names the first few and counts the rest."""
        more = len(reasons) - SHOWN_REASONS
        shown = "; ".join(reasons[:SHOWN_REASONS]) + (f"; and {more} more" if more > 0 else "")
        return cls(f"{what}: {shown}", "export with other options", tuple(reasons))


class Refused(EngineError):
    """A budget or limit below what the plan needs; the message gives both numbers in bytes."""

    exit_code = 13
    kind = "refused"


class OutOfMemory(EngineError):
    """The device or the host had no memory left for a named buffer."""

    exit_code = 14
    kind = "out_of_memory"


class NonFiniteLogits(EngineError):
    """A step's logits held NaN or infinity; its tokens can never become a baseline."""

    exit_code = 15
    kind = "non_finite"


class DeviceFailure(EngineError):
    """A driver call failed, or memory was touched against the device's rules (unmapped, stale, read before filled)."""

    exit_code = 16
    kind = "device"


class CannotLoad(EngineError):
    """A library, provider or program that another engine is made of is not on this host, or takes none of the model."""

    exit_code = 17
    kind = "cannot_load"


EXIT_KINDS: dict[int, str] = {
    0: "ok",
    **{
        c.exit_code: c.kind
        for c in (
            BadRequest,
            ModelFilesError,
            UnsupportedModel,
            Refused,
            OutOfMemory,
            NonFiniteLogits,
            DeviceFailure,
            CannotLoad,
        )
    },
}
"""Exit code of a run's process -> the word stored for it."""
