"""What a decoder's mixtures chose: counted pass by pass and by bank, taken from a request and recorded for one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config import RunRequest
from engine.counters import Tally
from engine.errors import BadRequest, DeviceFailure
from engine.onnx_load import graph_digests
from engine.out_file import check_out
from engine.plan import Plan
from engine.routing import Bank, Choices, Given, Origin, Recorder, Seeded, banks, by_position, check, read, write


class Routing:
    """Of each bank, how many experts passes asked for; one that several tokens of a pass chose is asked for once."""

    def __init__(self, plan: Plan, sequences: int, tally: Tally) -> None:
        self.banks = banks(plan)
        self.recorder = Recorder(sequences)
        ends = np.cumsum([0, *(bank.experts for bank in self.banks)])
        self._starts = ends[:-1]
        self._asked = np.zeros(ends[-1], np.int64)
        self.asked = [self._asked[start:end] for start, end in pairwise(ends)]
        """Passes that asked for each expert so far, by bank."""
        self._bytes = np.repeat([b.expert_bytes for b in self.banks], [b.experts for b in self.banks])
        chosen = [bank.chosen for bank in self.banks]
        self._bases = np.repeat(self._starts, chosen)  # of each slot: where its bank's experts start, and how many
        self._extents = np.repeat([bank.experts for bank in self.banks], chosen)
        self.is_known = True
        """False where nothing computes choices and none were given."""
        self._tally = tally

    @property
    def asked_bytes(self) -> int:
        """Bytes of all of them, from the table by bank."""
        return sum(int(n.sum()) * bank.expert_bytes for n, bank in zip(self.asked, self.banks, strict=True))

    def count(self, written: Mapping[int, tuple[int, Choices]], *, kept: bool = True) -> NDArray[np.int64]:
        """One pass: by sequence, its first position and what the steps wrote. Raises DeviceFailure for no experts.

        A pass that is not `kept` is counted, and not taken down.

        The experts that it asked for, all banks' one after another, ascending; none where nobody knows. A host that
        does this for each token has a few tens of microseconds for it.
        """
        found = {s: (first, by_position(choices, self.banks)) for s, (first, choices) in written.items()}
        everything = np.concatenate([choices for _, choices in found.values()])
        if (everything == -1).all():  # poison: no step wrote there
            self.is_known = False
            return np.zeros(0, np.int64)
        ordered = np.sort(everything + self._bases, axis=1)
        if not ((everything >= 0) & (everything < self._extents)).all() or (ordered[:, 1:] == ordered[:, :-1]).any():
            try:
                check(everything, self.banks, "the pass")
            except BadRequest as error:
                raise DeviceFailure(error.message, "its routing cannot be used") from error
        for sequence, (first, choices) in found.items() if kept else ():
            self.recorder.take(sequence, first, choices)
        experts = ordered[0] if len(ordered) == 1 else np.unique(ordered)
        self._asked[experts] += 1
        self._tally.add("routed_experts", experts.size)
        self._tally.add("routed_bytes", int(self._bytes[experts].sum()))
        return experts

    def by_bank(self, experts: NDArray[np.int64]) -> list[list[int]]:
        """What `count` gave, by bank and by number in it; nothing where nobody knows."""
        parts = np.split(experts, np.searchsorted(experts, self._starts[1:])) if experts.size else []
        return [(part - start).tolist() for part, start in zip(parts, self._starts, strict=False)]


def given_for(request: RunRequest, plan: Plan) -> Given | None:
    """What a request gives as routing, checked, and that a record can be written. Raises BadRequest."""
    found = banks(plan)
    if (request.routing or request.routing_out) and not found:
        raise BadRequest(f"{request.model} has no mixture of experts: there is no routing", "leave it out")
    if request.routing_out is not None:
        check_out(Path(request.routing_out), "--routing-out")
    if request.routing is None:
        return None
    if request.routing.startswith("seed:"):
        if not re.fullmatch(r"seed:[0-9]{1,9}", request.routing):
            raise BadRequest(f"routing is {request.routing!r}", "give seed: and a whole number of at most nine digits")
        return Seeded(int(request.routing.removeprefix("seed:")), found)
    return read(Path(request.routing), _origin(request, found), request.tokens)


def record(request: RunRequest, routing: Routing) -> None:
    """After a run, write its trace where it is asked for. Raises DeviceFailure where a run in full left none."""
    if request.arithmetic == "full" and not routing.is_known:
        raise DeviceFailure("a mixture's step left no choice of experts", "its routing cannot be used")
    if request.routing_out is not None:
        write(Path(request.routing_out), routing.recorder.trace(), _origin(request, routing.banks))


def _origin(request: RunRequest, found: tuple[Bank, ...]) -> Origin:
    return Origin(*graph_digests(request.model), found, request.prompts)
