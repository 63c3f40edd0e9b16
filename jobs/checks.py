"""Checks on one run by itself: how it ended, whether it is complete, finite, closed, and on a clear card."""

from __future__ import annotations

import math
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, cast

from engine.counters import COUNTERS
from engine.errors import EXIT_KINDS
from jobs import expressions
from jobs.gates import CLOSING, TOUCHES, TOUCHES_IN_PLACE
from jobs.metrics import NOT_RECORDED, given_tokens, is_finite
from jobs.model import (
    ArmPlan,
    AttemptFact,
    CellPlan,
    Certificate,
    Equation,
    Generation,
    KeyBytes,
    Missing,
    Reading,
    RunFact,
    RunRecord,
    SequenceTokens,
)

EndKind = Literal["measured", "engine", "infrastructure", "contaminated", "absent"]

ENGINE_KINDS: frozenset[str] = frozenset(EXIT_KINDS.values()) - {"ok"} | {"crash", "timeout", "protocol", "error"}
"""Words for an end that the engine under test brought about."""

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that a host or a person sends; a program does not crash by these."""

_RELATIONS = {
    "==": lambda lhs, rhs: lhs == rhs,
    "<=": lambda lhs, rhs: lhs <= rhs,
    ">=": lambda lhs, rhs: lhs >= rhs,
}


MOST = 2**63 - 1
"""Largest figure that a counter can hold; the store holds no larger one."""

IMPOSSIBLE = ("not a storable number", "not finite")
"""How a reading begins that was replaced because it could not be: the store keeps no NaN."""


_WHOLE = {int}

_FLAGGED_GAPS = re.compile(r"generations\.\d+\.(further\.\d+\.)?gaps\b")
_FLAGGED_FIGURE = re.compile(r"generations\.\d+\.counters\b|equations\b")


class Ending(NamedTuple):
    """How a run of the manifest ended. `word` is the engine's own kind of end, such as refused or non_finite."""

    kind: EndKind
    word: str = ""
    detail: str = ""


class Evaluated(NamedTuple):
    """One equation on one run; `equation` is None when it could not be evaluated, `note` then says why."""

    name: str
    equation: Equation | None
    holds: bool
    note: str = ""


def ending(run: RunFact) -> Ending:
    """How a run ended, from its state, its record and its attempts.

    A record without a clear certificate is contaminated: unknown is not clear. A throttled card leaves tokens and
    bytes valid, so its run counts; its times do not (`word` is then "throttled").
    """
    if run.retracted is not None:
        return Ending("absent", "retracted", f"retracted: {run.retracted}")
    if run.state == "pending":
        return Ending("absent", "pending", "it has not run to its end")
    if run.state == "exhausted":
        return _from_attempts(run)
    if run.record is None:
        return Ending("infrastructure", "no record", "it is complete and holds no record")
    failure = _from_record(run.record)
    return failure or _certified(run.record)


def own_ends(run: RunFact) -> list[str]:
    """How earlier attempts at a run ended by the engine's own doing, each in words."""
    failed = [attempt for attempt in run.attempts if attempt.state in ("refused", "failed")]
    return [end.detail for end in (_from_attempt(run, attempt) for attempt in failed) if end.kind == "engine"]


def generation_faults(plan: CellPlan, arm: ArmPlan, record: RunRecord) -> list[str]:
    """Generations and sequences that are missing, doubled, too many or misplaced against what was asked.

    Arms are compared index by index, so that generations counted from elsewhere would meet no other, or the wrong one.
    """
    faults = []
    for word, warmup, asked in (
        ("measured generation", False, plan.settings.generations),
        ("warm-up", True, plan.settings.warmups),
    ):
        given = sum(1 for generation in record.generations if generation.warmup is warmup)
        if given != asked:
            faults.append(f"{given} of {asked} {word}{'s' * (asked != 1)} given")
    indices = [generation.index for generation in record.generations]
    if len(set(indices)) != len(indices):
        faults.append("two generations carry one index")
    elif sorted(indices) != list(range(len(indices))):
        faults.append(
            f"generations carry the indices {', '.join(map(str, sorted(indices)))}, which do not count from 0"
        )
    faults += [
        f"generation {generation.number} is {'a' if generation.warmup else 'no'} warm-up, and warm-ups come first"
        for generation in record.generations
        if not faults and generation.warmup is not (generation.index < plan.settings.warmups)
    ]
    batch = plan.batch(arm)
    faults += [
        f"generation {generation.number} has {len(generation.sequences)} of {batch} sequences"
        for generation in record.generations
        if len(generation.sequences) != batch
    ]
    asked = plan.settings.tokens
    faults += [  # without ids there is no length to judge, so the steps are
        f"generation {generation.number} has {1 + len(generation.step_ns)} of {asked} tokens planned"
        for generation in record.generations
        if plan.settings.plan_only and 1 + len(generation.step_ns) != asked
    ]
    return faults


def length_fault(plan: CellPlan, tokens: SequenceTokens) -> str:
    """Why a sequence's length is not what was asked; empty when it is, or when a declared stop ended it.

    A plan alone has no ids: `generation_faults` counts its steps.
    """
    asked, given = plan.settings.tokens, len(tokens.ids)
    if plan.settings.plan_only:
        return ""
    if given == asked and tokens.stop_reason is not None:
        return ""
    if given > asked:
        return f"{given} tokens where {asked} were asked"
    if tokens.stop_reason is None:
        return f"{given} of {asked} tokens, cut off without a stop reason"
    if tokens.stop_reason == "length":
        return f"{given} of {asked} tokens with no declared stop"
    if plan.settings.ignore_eos:
        return f"{given} of {asked} tokens: it stopped at the end id, which was to be ignored"
    return ""


def invalid_figures(record: RunRecord) -> list[str]:
    """Figures that cannot be: NaN and infinities anywhere, negative or fractional counts and bytes.

    The flags of a record say what could not be kept as it came; gaps among them are `non_finite_logits`.
    """
    faults = [f"{name} is {value}" for name, value in _impossible(record.counters)]
    odd = [(name, value) for name, value in record.facts.items() if type(value) is not int or abs(value) > MOST]
    faults += [f"fact {name} is {value}" for name, value in sorted(odd) if not _possible_fact(value)]
    for generation in record.generations:
        where = f"generation {generation.number}"
        faults += [
            f"{where}: {phase} {name} is {value}"
            for phase, counters in sorted(generation.counters.items())
            for name, value in _impossible(counters)
        ]
        if generation.prefill_ns < 0 or min(generation.step_ns, default=0) < 0:
            faults.append(f"{where}: a negative time")
        faults += [
            f"{where}: {len(tokens.gaps)} top-2 gaps of {len(tokens.ids)} ids, the least {min(tokens.gaps)}"
            for tokens in generation.sequences
            if tokens.gaps and (len(tokens.gaps) != len(tokens.ids) or -math.inf < min(tokens.gaps) < 0)
        ]
        faults += [f"{where}: {fault}" for fault in _odd_steps(generation)]
    faults += [f"key {row.key}: {name} is {value}" for row in record.keys for name, value in _negative(row)]
    if (record.peak_rss_bytes or 0) < 0:
        faults.append(f"peak_rss_bytes is {record.peak_rss_bytes}")
    return faults + [flag for flag in record.flags if _FLAGGED_FIGURE.match(flag)]


def _negative(row: KeyBytes) -> list[tuple[str, int]]:
    """Figures of a key below zero."""
    least = min(row.nbytes, row.hits, row.retained, row.bypassed, row.evicted, row.staged, row.in_place)
    if least >= 0 and row.gathered_bytes >= 0:
        return []
    return [(name, value) for name, value in row if isinstance(value, int) and value < 0]


def _odd_steps(generation: Generation) -> list[str]:
    """Steps that took no time, and as many as the ids do not need; a plan alone has neither ids nor times."""
    longest = max(len(sequence.ids) for sequence in generation.sequences)
    if not longest or not generation.step_ns:
        return []
    found = ["a step took 0 ns"] if min(generation.step_ns) == 0 else []
    if len(generation.step_ns) != longest - 1:
        found.append(f"{len(generation.step_ns)} steps were timed, and {longest} ids take {longest - 1}")
    return found


def non_finite_logits(record: RunRecord) -> str:
    """Where a top-2 gap or an id shows that logits were not numbers; empty when all are."""
    if told := next((flag for flag in record.flags if _FLAGGED_GAPS.match(flag)), ""):
        return told
    for generation in record.generations:
        for number, tokens in enumerate(generation.sequences, start=1):
            of = f"generation {generation.number}" + (f", sequence {number}" if generation.further else "")
            if not all(map(math.isfinite, tokens.gaps)):
                index, gap = next((index, gap) for index, gap in enumerate(tokens.gaps) if not math.isfinite(gap))
                return f"{of}, index {index}: the top-2 gap is {gap}"
            if min(tokens.ids, default=0) < 0:
                index, token = next((index, token) for index, token in enumerate(tokens.ids) if token < 0)
                return f"{of}, index {index}: id {token} is no token"
    return ""


def evaluate_equations(
    plan: CellPlan, record: RunRecord, values: Mapping[str, Reading], *, keeps_all: bool = True
) -> list[Evaluated]:
    """The engine's equations re-evaluated, the judge's own from the counters, and the sweep's invariants.

    `keeps_all`: the engine keeps every counter and states its equations, as the native one does. What is absent then
    was lost; of another engine it is left out, for counters that it does not keep close nothing.
    """
    found = [_restated(equation) for equation in record.equations]
    if keeps_all and not record.equations:
        found.append(Evaluated("the engine's own equations", None, False, "not evaluated: the run states none"))
    in_place = not isinstance(values.get("zero_copy_reads", NOT_RECORDED), Missing)
    for text in CLOSING:
        text = TOUCHES_IN_PLACE if in_place and text == TOUCHES else text
        closed = _equation(sys.intern(f"recomputed: {text}"), text, values)  # one text, however many rows hold it
        if closed.equation or keeps_all:
            found.append(closed)
    if keeps_all and "emitted_tokens" not in record.counters:
        found.append(_closed("emitted_tokens == ids given out", Missing(missing="not recorded"), 0))
    found += _sums(record)
    found += [_equation(invariant.expr, invariant.expr, values) for invariant in plan.invariants]
    return found


# ---- endings -----------------------------------------------------------------------------------------------------


def _from_record(record: RunRecord) -> Ending | None:
    if record.signal is not None:
        return _by_signal(record.signal, record.error)
    if record.exit_code is None:
        return Ending("infrastructure", "no exit code", "its exit code is unknown")
    if record.exit_code != 0:
        word = EXIT_KINDS.get(record.exit_code, "crash")
        return Ending("engine", word, record.error or f"exit code {record.exit_code}")
    if record.error:
        return Ending("engine", _word_of(record.error) or "error", record.error)
    return None


def _by_signal(number: int, error: str | None) -> Ending:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    detail = f"ended by {name}" + (f": {error}" if error else "")
    if error and _word_of(error) == "timeout":  # ended from outside because it ran too long
        return Ending("engine", "timeout", error)
    if number in _FROM_OUTSIDE:
        return Ending("infrastructure", "killed", detail)
    return Ending("engine", "crash", detail)


def _certified(record: RunRecord) -> Ending:
    certificate = record.certificate
    if certificate is None:
        return Ending("contaminated", "no certificate", "nothing says that the card was clear")
    if certificate.verdict in ("clear", "throttled") and (unproven := _unproven(certificate)):
        return Ending("contaminated", "unproven", f"the certificate says {certificate.verdict}, and {unproven}")
    if certificate.verdict == "throttled":
        return Ending("measured", "throttled", "; ".join(certificate.reasons))
    if certificate.verdict != "clear":
        reasons = "; ".join(certificate.reasons) or "no reason given"
        return Ending("contaminated", certificate.verdict, f"card {certificate.verdict}: {reasons}")
    return Ending("measured")


def _unproven(certificate: Certificate) -> str:
    """What a certificate lacks to prove its own word; empty when it lacks nothing. Unknown is not clear."""
    lacks = []
    if certificate.verdict == "clear" and (
        against := certificate.reasons or [row.what for row in certificate.intervals]
    ):
        lacks.append(f"against that speaks what it holds itself: {against[0]}")
    if certificate.grade == "none":
        lacks.append("foreign processes could not be told apart at all")
    lacks += [f"nothing was read {when} the run" for when in ("before", "after") if not getattr(certificate, when)]
    if certificate.samples < 1:
        lacks.append("no sample was taken during the run")
    return "; ".join(lacks)


def _from_attempts(run: RunFact) -> Ending:
    ended = [a for a in sorted(run.attempts, key=lambda a: a.number) if a.state not in ("measured", "cancelled")]
    if not ended:
        return Ending("absent", "no attempt", "no attempt was made, or all were cancelled")
    if all(attempt.state == "contaminated" for attempt in ended):
        return Ending("contaminated", "contaminated", f"all {len(ended)} attempts: {ended[-1].reason or 'no reason'}")
    telling = [attempt for attempt in ended if attempt.state != "contaminated"][-1]
    if telling.state in ("refused", "failed"):
        return _from_attempt(run, telling)
    return Ending("infrastructure", telling.state, telling.reason or f"its last attempt was {telling.state}")


def _from_attempt(run: RunFact, attempt: AttemptFact) -> Ending:
    """A refused or failed attempt: the engine's doing when its record or its reason says so, else ours."""
    record = run.record
    if record is not None and record.attempt_id in ("", attempt.attempt_id):
        end = _from_record(record)
        if end:
            return end
    word = _word_of(attempt.reason)
    sent = re.search(r"\bsignal (\d+)", attempt.reason)
    if word == "crash" and sent and int(sent[1]) in _FROM_OUTSIDE:
        return Ending("infrastructure", "killed", attempt.reason)
    if word:
        return Ending("engine", word, attempt.reason)
    return Ending("infrastructure", attempt.state, attempt.reason or f"its last attempt was {attempt.state}")


def _word_of(text: str) -> str:
    """The engine's kind at the beginning of "kind: message"; empty for any other text."""
    word = text.split(":", 1)[0].strip().lower().replace(" ", "_")
    return word if word in ENGINE_KINDS else ""


# ---- figures and equations ---------------------------------------------------------------------------------------


def _possible_fact(value: int | float | str) -> bool:
    if isinstance(value, str):
        return not value.startswith(IMPOSSIBLE)
    return is_finite(value) and abs(value) <= MOST


def _impossible(counters: Mapping[str, Reading]) -> list[tuple[str, Reading]]:
    """Counters whose value cannot be, by name; of whole numbers that a store holds every one can."""
    if {*map(type, counters.values())} == _WHOLE:  # as nearly always, and this is by far the fastest way to see it
        whole = cast("Iterable[int]", counters.values())
        if min(whole) >= 0 and max(whole) <= MOST:
            return []
    odd = [(name, value) for name, value in counters.items() if not (type(value) is int and 0 <= value <= MOST)]
    return sorted((name, value) for name, value in odd if not _possible(name, value))


def _possible(name: str, value: Reading) -> bool:
    if isinstance(value, Missing):
        return not value.missing.startswith(IMPOSSIBLE)
    if not is_finite(value) or abs(value) > MOST:
        return False
    counter = COUNTERS.get(name)
    whole = counter is not None and counter.unit in ("count", "bytes")
    return not whole or (value >= 0 and value == int(value))


def _restated(equation: Equation) -> Evaluated:
    """An equation of the engine's: it holds only when it says so AND its two numbers do."""
    name = f"{equation.name}: {equation.text}"
    if not (is_finite(equation.lhs) and is_finite(equation.rhs)):
        return Evaluated(name, None, False, "not evaluated: a side is not finite")
    true = _RELATIONS[equation.relation](equation.lhs, equation.rhs)
    note = "" if true == equation.holds else f"the engine says holds = {equation.holds}, its numbers say {true}"
    return Evaluated(name, equation, true and equation.holds, note)


def _equation(name: str, text: str, values: Mapping[str, Reading]) -> Evaluated:
    try:
        parts = expressions.sides(text)
        sides = (parts[0], parts[2]) if parts else (text,)
        found = [expressions.evaluate(side, values) for side in sides]
    except expressions.ExpressionError as error:
        return Evaluated(name, None, False, f"cannot be read: {error}")
    known = [value for value in found if type(value) is not Missing]
    if len(known) < len(found):
        missing = next(value for value in found if type(value) is Missing)
        return Evaluated(name, None, False, f"not evaluated: {missing.missing}")
    relation, (lhs, rhs) = (parts[1], known) if parts else ("==", (int(known[0] is True), 1))
    holds = _RELATIONS[relation](lhs, rhs)
    return Evaluated(name, Equation.made(name=name, text=text, relation=relation, lhs=lhs, rhs=rhs, holds=holds), holds)


def _sums(record: RunRecord) -> list[Evaluated]:
    """Totals of a run against the sums over its measured generations, and the count of ids given out."""
    measured = [generation for generation in record.generations if not generation.warmup]
    found = []
    if "emitted_tokens" in record.counters:
        ids = sum(map(given_tokens, measured))
        found.append(_closed("emitted_tokens == ids given out", record.counters["emitted_tokens"], ids))
    if measured and all(generation.counters for generation in measured):
        for name, total in sorted(record.counters.items()):
            counter = COUNTERS.get(name)
            if counter is not None and counter.kind == "activity" and counter.scope != "clock":
                text = f"{name} == its sum over the generations"
                found.append(_closed(text, total, _activity(measured, name), row="totals == sums over the generations"))
    return found


def _activity(generations: list[Generation], name: str) -> int | float:
    return sum(
        counters.get(name, 0)
        for generation in generations
        for phase, counters in generation.counters.items()
        if phase != "load"
    )


def _closed(text: str, total: Reading, parts: int | float, row: str = "") -> Evaluated:
    name = f"recomputed: {row or text}"
    if type(total) is Missing:
        return Evaluated(name, None, False, f"not evaluated: {total.missing}")
    if not is_finite(total) or not is_finite(parts):
        return Evaluated(name, None, False, "not evaluated: not a number")
    holds = total == parts
    return Evaluated(name, Equation.made(name=name, text=text, relation="==", lhs=total, rhs=parts, holds=holds), holds)
