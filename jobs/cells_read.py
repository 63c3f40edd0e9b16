"""A sweep's cells one after another: what stands around them, and what is kept of each once it has passed.

Ten thousand cells weigh more than all that is said of them: a judge that holds them needs twice the memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jobs.document import Document
from jobs.model import CellInput, JudgeInput, RunRecord


@dataclass(frozen=True, slots=True)
class CellsRead:
    """A judge's input whose cells are read one after another, in the manifest's order.

    `around`: all but them; `further`: how many kinds of further runs they were given; `names_cards`: whether the stamp
    of `around` has their cards already.
    """

    around: JudgeInput
    cells: Iterator[CellInput]
    further: int
    names_cards: bool = False


class Passed:
    """What is known of cells that have passed: the digest of their input, their cards, and how these were watched."""

    def __init__(self, around: JudgeInput) -> None:
        before, _ = text_of(around).split('"cells":[]', 1)
        self._digest = hashlib.sha256(f'{before}"cells":['.encode())
        self._comma = ""
        self.cards: set[str] = set()
        self.simulated = False
        self.foreign_unseen = False
        """Whether of some card the processes on it could not all be told apart."""

    def add(self, cell: CellInput) -> None:
        """Another cell, with its runs in their order."""
        self._digest.update(f"{self._comma}{text_of(cell)}".encode())
        self._comma = ","
        for record in (run.record for run in cell.runs if run.record is not None):
            self.cards.add(card_of(record))
            self.simulated |= record.device.get("kind") == "sim"
            certificate = record.certificate
            self.foreign_unseen |= certificate is not None and certificate.grade in ("memory", "none")

    def digest(self, around: JudgeInput) -> str:
        """sha256 of the whole input. Like `Document.digest`, but a NaN in a broken record does not stop it.

        `around` is what it was begun with, or that with the cards that passed: they stand behind the cells.
        """
        _, after = text_of(around).split('"cells":[]', 1)
        whole = self._digest.copy()
        whole.update(f"]{after}".encode())
        return whole.hexdigest()


def cards_of(cells: Iterable[CellInput]) -> tuple[str, ...]:
    """The cards that cells ran on, in order."""
    records = (run.record for cell in cells for run in cell.runs if run.record is not None)
    return tuple(sorted({card_of(record) for record in records} - {""}))


def card_of(record: RunRecord) -> str:
    """The card of a run by its certificate, or as the engine says; empty where neither does."""
    return record.certificate.uuid if record.certificate is not None else str(record.device.get("uuid") or "")


def text_of(piece: Document) -> str:
    """A piece's canonical form; what holds a NaN has none, and is dumped."""
    try:
        return piece.canonical()
    except ValueError:
        return json.dumps(piece.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
