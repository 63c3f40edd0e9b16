"""What a run's bounds leave for weights, and how these are then held: each decision with its source and reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.banks import ALL_FIT, why_whole
from engine.batch import fixed_bytes
from engine.config import RunRequest, Source, parse_share
from engine.errors import BadRequest, Refused
from engine.graph import Graph
from engine.kv_layout import Buckets, Forecast, forecast
from engine.paging.arena import enough, pack
from engine.paging.experts import BankPlan, decide, split
from engine.paging.residency import least_budget
from engine.plan import Plan

AUTOMATIC = "staging"
"""What streams where a limit is given and no policy: it copies least, and maps nothing while it does."""
ROUTED = "stable_slot"
"""The same for a model whose experts can be read one by one, which the schedule of `staging` cannot."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that was decided before the run, by whom and why."""

    name: str
    value: int | str | None
    source: Source
    reason: str

    def line(self) -> dict[str, Any]:
        """As it stands in hello."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Choice:
    """Everything that is settled before memory is asked for; sizes in bytes."""

    policy: str
    budget_bytes: int | None
    """Nominal: what weights may take at first, None without a bound."""
    limit_bytes: int | None
    """Of the vram limit, what is left for weights and KV cache."""
    buckets: Buckets
    kv: Forecast
    decisions: tuple[Decision, ...]
    banks: tuple[BankPlan, ...] = ()
    """What becomes of each bank of experts."""


def choose(request: RunRequest, graph: Graph, plans: Mapping[int, Plan], granule: int) -> Choice:
    """Settle policy and budget for a device with granules of a size.

    Raises Refused where a bound is too small, BadRequest where the cache asked for is larger than the model.
    """
    config, plan = request.config, plans[1]
    lengths = [len(prompt) for prompt in request.prompts]
    longest, last = max(lengths), max(lengths) + request.tokens - 1
    buckets = _buckets(request, last, graph.info.context_length)
    kv = foreseen(request, plan, buckets, granule, request.tokens - 1)
    asked = config.weight_budget
    nominal = int(parse_share(asked) * plan.weight_bytes) if isinstance(asked, str) else asked
    source: Source = "request" if "weight_budget" in request.given else "default"
    reason = "weights have no bound of their own"
    if nominal is not None:
        reason = f"{asked} of all weights" if isinstance(asked, str) else "as asked"
    packed = _packed(plan, granule)
    limit = None
    if config.vram_limit is not None:
        fixed = fixed_bytes(plans, len(lengths))
        limit = config.vram_limit - fixed
        first = _committed(request, plan, buckets, granule, min(buckets.of(longest), last))
        if nominal is None or limit - first < nominal:
            nominal, source = limit - first, "derived"
            reason = f"vram_limit less {fixed} for workspace, states and tables and {first} for the first KV bucket"
    streams = limit is not None and packed > limit - kv.peak_bytes
    policy, of_policy = _policy(request, plan, streams=streams)
    stays = nominal is None or packed <= (nominal if limit is None else min(nominal, limit - kv.peak_bytes))
    banks = decide(plan, ALL_FIT if stays else _why_whole(request, policy))
    paged = split({1: plan}, banks)[1]
    if limit is not None and config.vram_limit is not None:

        def room(size: int) -> tuple[int, int]:
            kv_bytes = foreseen(request, plan, buckets, size, request.tokens - 1).peak_bytes
            return kv_bytes, least_budget(paged, policy, size)

        _check_limit(config.vram_limit, limit, plan.weight_bytes, granule, room)
    packed = _packed(paged, granule)
    held = packed if nominal is None else min(packed, nominal // granule * granule)
    decisions = (
        _strategy(packed, nominal, None if limit is None else limit - kv.peak_bytes),
        of_policy,
        Decision("weight_budget_nominal", nominal, source, reason),
        Decision(
            "weight_budget_physical", held, "derived", f"whole granules of {granule}, at most all weights, packed"
        ),
        *_lent(limit, kv, held),
        *_experts(request, banks),
    )
    return Choice(policy, nominal, limit, buckets, kv, decisions, banks)


def foreseen(request: RunRequest, plan: Plan, buckets: Buckets, granule: int, steps: int) -> Forecast:
    """What the caches of all sequences come to after `steps` one-token steps."""
    longest = max(map(len, request.prompts))
    return _forecast(request, plan, buckets, granule, range(longest, longest + steps + 1))


def _forecast(request: RunRequest, plan: Plan, buckets: Buckets, granule: int, lengths: range) -> Forecast:
    prompts = [len(prompt) for prompt in request.prompts]
    behind = [max(prompts) - prompt for prompt in prompts]
    return forecast(plan.kv, request.config.kv_layout, buckets, lengths, granule, behind)


def _committed(request: RunRequest, plan: Plan, buckets: Buckets, granule: int, length: int) -> int:
    """What the caches commit when the longest has so many positions."""
    return _forecast(request, plan, buckets, granule, range(length, length + 1)).committed_bytes


def _buckets(request: RunRequest, positions: int, context: int | None) -> Buckets:
    """What the cache grows through; without a capacity asked for, up to what the run needs within the context.

    Raises BadRequest for a capacity beyond the context, which no position could fill.
    """
    asked, least = request.config.kv_capacity, request.config.kv_min_bucket
    if asked is not None and context is not None and asked > context:
        raise BadRequest(f"kv_capacity {asked} is above the {context} positions of the model", "give that or less")
    if asked is None:
        return Buckets(Buckets(context or positions, least).of(positions), least)
    return Buckets(asked, least)


def _packed(plan: Plan, granule: int) -> int:
    """Bytes of the whole granules that all keys lie on."""
    return (max((v.last for v in pack(plan.keys, granule)), default=-1) + 1) * granule


def _why_whole(request: RunRequest, policy: str) -> str:
    knows_routing = request.arithmetic == "full" or request.routing is not None
    return why_whole(policy, request.config.experts, knows_routing=knows_routing)


def _experts(request: RunRequest, banks: Sequence[BankPlan]) -> tuple[Decision, ...]:
    """How banks are read, where there are any."""
    if not banks:
        return ()
    split_banks = sum(bank.is_split for bank in banks)
    whole = dict.fromkeys(bank.whole for bank in banks if bank.whole)
    source: Source = "request" if "experts" in request.given and request.config.experts == "whole" else "derived"
    reason = "; ".join(whole) or "each expert is a key of its own"
    return (Decision("expert_banks", f"{split_banks} of {len(banks)} banks one by one", source, reason),)


def _policy(request: RunRequest, plan: Plan, *, streams: bool) -> tuple[str, Decision]:
    """The policy, chosen here where a limit is given and neither policy nor budget is, and not all weights fit."""
    policy = request.config.policy
    if "policy" in request.given:
        return policy, Decision("policy", policy, "request", "as asked")
    if not streams or request.config.weight_budget is not None:
        why = "a budget was asked for without one" if request.config.weight_budget is not None else "all weights stay"
        return policy, Decision("policy", policy, "default", why)
    if any(bank.is_split for bank in decide(plan, _why_whole(request, ROUTED))):
        why = "weights stream under the limit, and of experts it copies those alone that were chosen"
        return ROUTED, Decision("policy", ROUTED, "derived", why)
    why = "weights stream under the limit, and of the policies served here it copies least"
    return AUTOMATIC, Decision("policy", AUTOMATIC, "derived", why)


def _strategy(packed: int, nominal: int | None, at_last: int | None) -> Decision:
    """Whether all weights stay, from first to last."""
    if nominal is not None and packed > nominal:
        reason = f"{packed} bytes of weights, packed in whole granules, do not fit into {nominal}"
        return Decision("strategy", "streaming", "derived", reason)
    if at_last is not None and packed > at_last:
        reason = (
            f"{packed} bytes of weights fit beside the first KV bucket and not beside the last: {at_last} are left then"
        )
        return Decision("strategy", "streaming", "derived", reason)
    bound = "there is no bound" if nominal is None else f"{packed} bytes of weights, packed in whole granules, fit"
    return Decision("strategy", "resident", "derived", bound)


def _lent(limit: int | None, kv: Forecast, held: int) -> tuple[Decision, ...]:
    if limit is None:
        return ()
    back = max(0, held + kv.peak_bytes - limit)
    reason = f"the KV cache will have {kv.peak_bytes} at most; what is lent goes back to it as it grows"
    return (Decision("lent_to_weights", back, "derived", reason),)


def _check_limit(asked: int, limit: int, weights: int, granule: int, room: Callable[[int], tuple[int, int]]) -> None:
    """Refuse a limit that cannot hold the widest step beside what the KV cache will need, before anything runs.

    `room`: what these two take, the cache first, in granules of a size.
    """
    kv, step = room(granule)
    fixed = asked - limit
    if limit - kv < step:
        raise Refused(
            f"vram limit {asked} bytes leaves {max(limit - kv, 0)} for weights beside {fixed + kv} for KV cache, "
            f"workspace and tables; the widest step needs {step}",
            enough(asked, fixed + kv + weights, granule, lambda size: fixed + sum(room(size))),
        )
