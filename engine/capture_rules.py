"""Rules by which operators came to be recorded, each by name; a plan can be cut as it was before any of them.

Production has all of them in force, and then this table says nothing. Left out, a rule makes seams of the steps that it
had made recordable, with the reason that stood against them before (onnx-genai sections 2.3 to 2.5): so that a sweep
can show what each was worth.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.errors import BadRequest
from engine.plan import SeamReason, Step

ALL = "all"
NONE = "none"

Objection = tuple[SeamReason, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a rule lets in, in words; and what stood against a step before there was the rule, None for nothing."""

    meaning: str
    before: Callable[[Step], Objection | None]


def _reads_sizes(step: Step) -> Objection | None:
    if step.kernel != "split":
        return None
    return "KernelCaptureUnsupported", "reads its sizes on the host, then waits for its stream"


def _is_not_flat(step: Step) -> Objection | None:
    """The older test of a one-token step: a pointwise operand had to be [1, 1, n], whatever its symbols said."""
    if step.op.rpartition("::")[2] not in _POINTWISE:
        return None
    shapes = [o.ref.shape for o in step.operands if o.ref.kind == "buffer"]
    odd = next((s for s in shapes if len(s) != 3 or s[:2] != (1, 1)), None)
    if odd is None:
        return None
    return "KernelCaptureUnsupported", f"shape {list(odd)} is not that of a one-token step, [1, 1, n]"


def _waits_behind(step: Step) -> Objection | None:
    if step.op.rpartition("::")[2] != "LinearAttention":
        return None
    return "CaptureRecordingFailed", "waits on the host for its stream behind its kernel"


_POINTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Exp", "Neg", "Sigmoid", "Tanh", "Softplus", "Silu", "Swish"),
        *("Where", "PRelu", "LpNormalization"),
    }
)
"""Operators that shared that test. LpNormalization is here for the Sqrt and the Div that it is written as elsewhere."""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "split_sizes": Rule("Split takes its sizes from its outputs' shapes", _reads_sizes),
        "growing_symbols": Rule("pointwise steps are recorded unless a symbol of theirs grows", _is_not_flat),
        "stream_order": Rule("a recurrent step leaves its order to the stream", _waits_behind),
    }
)
"""In the order in which they were found; a sweep that adds them up one by one goes by it."""


def parse_rules(text: object) -> frozenset[str]:
    """Names of the rules in force: "all", "none", or some of them joined by "+".

    Raises BadRequest for anything else, an unknown name with the nearest known one.
    """
    if text == ALL:
        return frozenset(RULES)
    if text == NONE:
        return frozenset()
    names = text.split("+") if isinstance(text, str) else []
    remedy = f"{ALL}, {NONE}, or rules joined by +: {', '.join(RULES)}"
    if not names or len(set(names)) != len(names):
        raise BadRequest(f"capture_rules is {text!r}", f"give {remedy}")
    for name in names:
        if name not in RULES:
            near = difflib.get_close_matches(name, RULES, n=1)
            raise BadRequest(
                f"capture_rules names {name!r}, which is no rule",
                f"did you mean {near[0]!r}?" if near else f"give {remedy}",
            )
    return frozenset(names)


def left_out(in_force: frozenset[str]) -> tuple[Rule, ...]:
    """The rules that are not in force."""
    return tuple(rule for name, rule in RULES.items() if name not in in_force)


def objection(step: Step, without: tuple[Rule, ...]) -> Objection | None:
    """What stands against recording a step without these rules."""
    for rule in without:
        found = rule.before(step)
        if found is not None:
            return found
    return None
