"""What can be seen of a card: one snapshot type, and the interface of whoever takes it.

A value that could not be read is None, never 0; a value that the card does not have is named in `unsupported`. The two
are kept apart: a card without ECC memory is healthy, and a card whose ECC counters cannot be read is not known to be.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

ProcessKind = Literal["compute", "graphics", "mps"]


@dataclass(frozen=True, slots=True)
class CardProcess:
    """One process on a card, as the driver lists it; `used_bytes` None: not told."""

    pid: int
    used_bytes: int | None = None
    kind: ProcessKind = "compute"


@dataclass(frozen=True, slots=True)
class CardName:
    """Which card: full UUID, model name, driver version, index in PCI order, all its memory (0: not known)."""

    uuid: str
    name: str
    driver: str
    index: int
    simulated: bool = False
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CardSnapshot:
    """A card at one moment. None: unknown. `unsupported`: fields that this card does not have.

    `processes` None means that no list could be read, which is not an empty list. `throttle_bits` is NVML's clock event
    bitmask. `errors` maps a field to why it could not be read.
    """

    uuid: str
    used_bytes: int | None = None
    total_bytes: int | None = None
    processes: tuple[CardProcess, ...] | None = None
    utilisation_percent: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_bits: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    mig_enabled: bool | None = None
    persistence: bool | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_generation: int | None = None
    max_pcie_width: int | None = None
    unsupported: frozenset[str] = frozenset()
    errors: tuple[tuple[str, str], ...] = ()

    def document(self) -> dict[str, Any]:
        """The snapshot for a certificate: JSON types only, unknown as null."""
        out = asdict(self)
        out["processes"] = None if self.processes is None else [asdict(process) for process in self.processes]
        out["unsupported"] = sorted(self.unsupported)
        out["errors"] = dict(self.errors)
        return out


class ProbeError(Exception):
    """A card, or the library that shows it, cannot be asked at all; `remedy` says what to do."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} ({remedy})" if remedy else message)
        self.message = message
        self.remedy = remedy


class CardHeld(ProbeError):
    """A card is locked by another process, which the message names; it may be had later."""


class CardProbe(Protocol):
    """Looks at cards without touching them: makes no CUDA context, and every look has a deadline."""

    def cards(self) -> tuple[CardName, ...]:
        """All cards of this host in PCI order. Raises ProbeError when they cannot be listed."""
        ...

    def snapshot(self, uuid: str) -> CardSnapshot:
        """The card now. Never raises for a single unreadable value; raises ProbeError for an unknown UUID."""
        ...

    def close(self) -> None:
        """Let go of the library."""
        ...
