"""What a decoder and a run ask of a pager, whichever way it holds the weights; and which one a policy's name means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from engine.counters import Tally
from engine.device.base import Device
from engine.paging.arena import minimum_budget
from engine.paging.ledger import Ledger, Pool
from engine.paging.pager import Pager
from engine.paging.staging import StagedPager
from engine.paging.traffic import Filling, KeyTraffic
from engine.paging.zero_copy import ZeroCopyPager
from engine.plan import Plan, Step


class Residency(Protocol):
    """Weights under a budget, as steps come and go."""

    fits: bool
    """Whether all keys are in, from `preload` on."""

    @property
    def traffic(self) -> Sequence[KeyTraffic]:
        """What each key did so far."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The budget in whole granules."""
        ...

    @property
    def facts(self) -> Mapping[str, int]:
        """What is worth telling of how the budget was divided."""
        ...

    @property
    def filling(self) -> Filling:
        """What the budget's granules hold now."""
        ...

    @property
    def least_bytes(self) -> int:
        """The smallest budget, in whole granules, that it can be resized to."""
        ...

    @property
    def epoch(self) -> int:
        """Changes when an address that a graph may hold, or what a graph may read without asking, no longer stands."""
        ...

    def resize(self, capacity_bytes: int) -> None:
        """Go on with another budget in whole granules, at least `least_bytes`, between two passes."""
        ...

    def steady(self, key: int) -> bool:
        """Whether a graph may read the key without asking: its address holds, and nothing has to be mapped for it."""
        ...

    def resident(self, key: int) -> bool:
        """Whether the key is in now."""
        ...

    def standing(self) -> Iterator[tuple[int, int]]:
        """Between two passes: keys whose bytes are where a step reads them, and there, the rest of a slot included."""
        ...

    def preload(self) -> None:
        """Bring in, before the first step, what is known to stay."""
        ...

    def issue(self, plan: Plan, step: Step) -> None:
        """Just before a step is launched or recorded: the copies whose turn it is."""
        ...

    def join(self) -> None:
        """Before a recording begins and before it ends: order every copy under way before what comes."""
        ...

    def place(self, key: int) -> int:
        """Where a key that is in, and steady, stands."""
        ...

    def can_hold(self, keys: Sequence[int]) -> bool:
        """Whether all of these can stand at once."""
        ...

    def touch(self, plan: Plan, step: Step, experts: Sequence[int] = ()) -> tuple[int, ...]:
        """A step of a plan reads its keys, of experts these: count it, and return their addresses."""
        ...

    def touch_all(self, plan: Plan, steps: Sequence[Step]) -> None:
        """Steps of a plan read their keys, which all fit: count them."""
        ...

    def release(self) -> None:
        """The step is over."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def least_budget(plan: Plan, policy: str, granule_bytes: int) -> int:
    """The smallest weight budget, in bytes, that this plan runs under with a policy."""
    return 0 if policy == "zero_copy" else minimum_budget(plan, granule_bytes)


def make_pager(
    device: Device,
    plan: Plan,
    policy: str,
    budget_bytes: int | None,
    ledger: Ledger,
    pool: Pool,
    tally: Tally,
    heat: Mapping[int, int] = MappingProxyType({}),
) -> Residency:
    """The pager of a policy; `heat` is how often keys were read in a run before.

    Raises Refused for a budget below the policy's least.
    """
    if policy == "staging":
        return StagedPager(device, plan, budget_bytes, ledger, pool, tally)
    if policy == "zero_copy":
        return ZeroCopyPager(device, plan, budget_bytes, ledger, pool, tally)
    return Pager(device, plan, policy, budget_bytes, ledger, pool, tally, heat)
