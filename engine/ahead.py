"""Steps asked for before the tokens of the one in front are read, so that a card need not wait for its host.

Where an end id may come the step ahead may be one too many. It is then taken back: what it cost is counted, as a
`discarded_steps`, and neither ids nor anything that is read later shows that it was.
"""

from __future__ import annotations

from typing import Literal

from engine.batch import Emitted, Pass
from engine.decode import Decoder

Further = Literal["yes", "maybe", "no"]
"""Whether another step comes: whatever this one gives, unless this one gives an end id, or not at all."""


class Ahead:
    """The steps of one generation, at most one of them ahead.

    Where a step is done when it was asked for, as on the simulator, none is asked for ahead, but one that would have
    been one too many is run and taken back all the same: counters of a plan are equal on every device.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._asked: Pass | None = None
        self._owed = False

    @property
    def is_under_way(self) -> bool:
        """Whether there is a step whose tokens nobody read."""
        return self._asked is not None or self._owed

    def step(self, further: Further) -> list[Emitted]:
        """A step's tokens, as `Decoder.step` gives them; the next one may be under way then."""
        decoder = self._decoder
        asked, self._asked = self._asked or decoder.ask_step(), None
        goes_ahead = further != "no" and decoder.may_ask_ahead(certain=further == "yes")
        if goes_ahead and decoder.queues:
            self._asked = decoder.ask_step()
        self._owed = goes_ahead and further == "maybe" and not decoder.queues
        return decoder.take_step(asked)

    def end(self) -> None:
        """The generation is over: take back what was asked for in vain."""
        asked = self._decoder.ask_step() if self._owed else self._asked
        self._asked, self._owed = None, False
        if asked is not None:
            self._decoder.take_back(asked)
