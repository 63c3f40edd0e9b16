"""Experts as keys of their own: which banks can be split, where each expert's bytes are, and the plan that results.

A bank's step becomes two: `route`, which leaves the chosen experts where the host can read them, and one that reads
those alone, as the bank's step would. A bank that cannot be split is read whole, as one key an initialiser, and says
why. What was decided is data and is checked before it is used: a plan that does not fit its bank is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.errors import Refused
from engine.graph import Weight, stored_bytes
from engine.paging.policy import aligned
from engine.plan import Experts, Key, Operand, Part, Piece, Plan, Ref, Step
from engine.routing import ROUTED, bank_operands, routed

WHOLE = {"moe": "experts", "mixture": "mixture_experts"}
"""Kernels of a bank that is read whole, as each target has it, and those that read its experts one by one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One expert's bytes in an initialiser of its bank: [start, end)."""

    expert: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BankPlan:
    """What becomes of a bank: `whole` says why it is read whole, or `cuts` has each expert's bytes, by initialiser."""

    node: str
    experts: int
    whole: str = ""
    cuts: Mapping[str, Sequence[Cut]] | None = None

    @property
    def is_split(self) -> bool:
        """Whether its experts are keys of their own."""
        return not self.whole


def decide(plan: Plan, why_whole: str = "") -> tuple[BankPlan, ...]:
    """What becomes of each bank, in the order of the steps; `why_whole` is a reason that stands against all of them."""
    readers = Counter(k for step in plan.steps for k in step.keys)
    names = Counter(step.node for step in _bank_steps(plan))
    return tuple(
        _decide(plan, step, readers, why_whole or "another bank has its name" * (names[step.node] > 1))
        for step in _bank_steps(plan)
    )


def check(plan: Plan, decided: Sequence[BankPlan]) -> None:
    """Hold decisions against the banks that they are about. Raises Refused for the first that does not fit, by name."""
    steps = {step.node: step for step in _bank_steps(plan)}
    there, planned = (Counter(one.node for one in some) for some in (_bank_steps(plan), decided))
    for node, times in planned.items():
        if times > there[node]:
            raise _refused(node, "is planned twice" if node in steps else "is no bank of experts")
    if missing := there - planned:
        raise _refused(min(missing), "is not planned")
    for bank in decided:
        if bank.is_split and there[bank.node] > 1:
            raise _refused(bank.node, "is the name of more than one bank")
        if bank.is_split:
            _check_split(plan, steps[bank.node], bank)
        elif bank.cuts:
            raise _refused(bank.node, "is read whole and cut too")


def split(plans: Mapping[int, Plan], decided: Sequence[BankPlan]) -> dict[int, Plan]:
    """The plans with each split bank's experts as keys, the same ones in all plans. Raises Refused as `check` does."""
    check(plans[1], decided)
    banks = {bank.node: bank for bank in decided if bank.is_split}
    if not banks:
        return dict(plans)
    steps = {step.node: step for step in _bank_steps(plans[1]) if step.node in banks}
    of_key = {operand.ref.index: step for step in steps.values() for operand in bank_operands(step)}
    keys: list[Key] = []
    moved: dict[int, int] = {}
    experts: dict[str, Experts] = {}
    for key in plans[1].keys:
        step = of_key.get(key.index)
        if step is None:
            moved[key.index] = len(keys)
            keys.append(replace(key, index=len(keys)))
        elif step.node not in experts:
            experts[step.node] = _experts(plans[1], step, len(keys))
            keys += _expert_keys(plans[1], step, banks[step.node], experts[step.node])
    return {rows: _rewritten(plan, tuple(keys), moved, experts) for rows, plan in plans.items()}


def _bank_steps(plan: Plan) -> list[Step]:
    return [step for step in plan.steps if step.kernel in WHOLE and routed(step) is not None]


def _decide(plan: Plan, step: Step, readers: Counter[int], why_whole: str) -> BankPlan:
    choice = routed(step)
    assert choice is not None
    experts, chosen = _extent(step, "router"), choice.ref.shape[-1]
    why = why_whole or _objection(plan, step, experts, chosen, readers)
    if why:
        return BankPlan(step.node, experts, why)
    cuts = {}
    for key in (operand.ref.index for operand in bank_operands(step)):
        each = plan.keys[key].nbytes // experts
        cuts[plan.keys[key].name] = [Cut(e, e * each, (e + 1) * each) for e in range(experts)]
    return BankPlan(step.node, experts, cuts=cuts)


def _objection(plan: Plan, step: Step, experts: int, chosen: int, readers: Counter[int]) -> str:
    """What stands against splitting a bank; empty for nothing."""
    if chosen == experts:
        return "each token chooses every expert"
    for operand in bank_operands(step):
        key, extents = plan.keys[operand.ref.index], operand.ref.shape
        if readers[key.index] > 1:
            return f"{key.name} is read more than once"
        if len(extents) < 2 or extents[0] != experts:
            return f"{key.name} of shape {list(extents)} does not hold one expert after another"
        if key.nbytes % experts:
            return f"the {key.nbytes} bytes of {key.name} are no whole number for each of {experts} experts"
    return ""


def _check_split(plan: Plan, step: Step, bank: BankPlan) -> None:
    experts, cuts = _extent(step, "router"), bank.cuts or {}
    if bank.experts != experts:
        raise _refused(bank.node, f"has {experts} experts, not {bank.experts}")
    bank_keys = [plan.keys[operand.ref.index] for operand in bank_operands(step)]
    sizes = {key.name: key.nbytes for key in bank_keys}
    for name in sorted(cuts.keys() ^ sizes.keys()):
        raise _refused(bank.node, f"{name!r} is {'not cut' if name in sizes else 'none of its initialisers'}")
    for name, nbytes in sizes.items():
        _check_cuts(bank.node, name, nbytes, experts, cuts[name])


def _check_cuts(node: str, name: str, nbytes: int, experts: int, cuts: Sequence[Cut]) -> None:
    """Each expert once, all of the same size, and together every byte once."""
    wrong = next((c.expert for c in cuts if not 0 <= c.expert < experts), None)
    if wrong is not None:
        raise _refused(node, f"expert {wrong} in {name!r} is not among its {experts}")
    twice = [expert for expert, times in Counter(c.expert for c in cuts).items() if times > 1]
    if twice:
        raise _refused(node, f"expert {twice[0]} is twice in {name!r}")
    if len(cuts) != experts:
        absent = min(set(range(experts)) - {c.expert for c in cuts})
        raise _refused(node, f"expert {absent} is missing from {name!r}")
    at = 0
    for cut in sorted(cuts, key=lambda c: (c.start, c.end)):
        if cut.start != at or cut.end - cut.start != nbytes // experts:
            raise _refused(
                node, f"expert {cut.expert} of {name!r} has bytes {cut.start} to {cut.end}, not from {at} on"
            )
        at = cut.end
    if at != nbytes:
        raise _refused(node, f"{nbytes - at} bytes of {name!r} are no expert's")


def _experts(plan: Plan, step: Step, first_key: int) -> Experts:
    """Where the parts of an expert lie in its key: in the order of the operands, at aligned offsets."""
    choice = routed(step)
    assert choice is not None
    parts, at, count = [], 0, _extent(step, "router")
    for operand in bank_operands(step):
        parts.append(Part(operand.name, operand.ref.dtype, operand.ref.shape[1:], at))
        at += aligned(plan.keys[operand.ref.index].nbytes // count)
    return Experts(first_key, count, choice.ref.shape[-1], tuple(parts))


def _expert_keys(plan: Plan, step: Step, bank: BankPlan, experts: Experts) -> list[Key]:
    assert bank.cuts is not None
    operands = bank_operands(step)
    weights = [plan.keys[o.ref.index].weight for o in operands]
    places = [{cut.expert: cut for cut in bank.cuts[weight.name]} for weight in weights]
    made = []
    for expert in range(experts.count):
        pieces = [
            Piece(part.offset_bytes, Weight(weight.name, part.dtype, part.shape, weight.data[cut.start : cut.end]))
            for part, weight, cut in zip(experts.parts, weights, (of[expert] for of in places), strict=True)
        ]
        index = experts.first_key + expert
        label = f"{step.node} expert {expert}"
        made.append(Key(index, pieces[0].weight, -1 - index, tuple(pieces[1:]), label))  # records of others are from 0
    return made


def _rewritten(plan: Plan, keys: tuple[Key, ...], moved: Mapping[int, int], experts: Mapping[str, Experts]) -> Plan:
    steps: list[Step] = []
    for step in plan.steps:
        of = experts.get(step.node) if step.kernel in WHOLE else None
        made = [replace(step, operands=_moved(step.operands, moved))] if of is None else _halves(step, of, moved)
        steps += [replace(one, index=len(steps) + n) for n, one in enumerate(made)]
    return replace(plan, steps=tuple(steps), keys=keys)


def _moved(operands: tuple[Operand, ...], moved: Mapping[int, int]) -> tuple[Operand, ...]:
    if not any(o.ref.kind == "key" for o in operands):
        return operands
    return tuple(
        replace(o, ref=replace(o.ref, index=moved[o.ref.index])) if o.ref.kind == "key" else o for o in operands
    )


def _halves(step: Step, of: Experts, moved: Mapping[int, int]) -> list[Step]:
    """One that routes and one that reads what was chosen.

    Where the bank's step has a norm in it, the norm's factors go to its scratch before: they are a key, which must not
    have to stand beside experts, and no sum may be another than the bank's step has it.
    """
    bank = {o.name for o in bank_operands(step)}
    by_name = {o.name: o for o in _moved(tuple(o for o in step.operands if o.name not in bank), moved)}
    factors: list[Step] = []
    if "gamma" in by_name:
        gamma, room = by_name["gamma"].ref, by_name["hidden"].ref
        behind = room.offset_bytes + stored_bytes(room.dtype, math.prod(room.shape))
        copy = Ref("buffer", room.index, gamma.dtype, gamma.shape, room.name, behind)
        factors = [replace(step, kernel="copy", operands=(Operand("a", gamma), Operand("y", copy, "w")), params={})]
        by_name["gamma"] = Operand("gamma", copy)
    choice = by_name[ROUTED]
    rest = tuple(replace(o, access="r") if o is choice else o for o in by_name.values())
    return [
        *factors,
        replace(step, kernel="route", operands=(by_name["router"], choice)),
        replace(step, kernel=WHOLE[step.kernel], operands=rest, experts=of),
    ]


def _extent(step: Step, name: str) -> int:
    ref: Ref = next(o.ref for o in step.operands if o.name == name)
    return ref.shape[-1]


def _refused(node: str, why: str) -> Refused:
    return Refused(f"the plan of experts does not fit: {node} {why}", "run with experts whole")
