"""Match keys: what must be equal before two arms may be compared at all.

Each run must be what the plan asked for (build, model, card); all runs of a pair must share model, card, driver and
every effective setting that `varies` does not name. An unknown key splits and never merges: absent in one arm is
different.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jobs.model import PLAN_ONLY, ArmPlan, CellPlan, RunFact
from jobs.settings_served import effective, setting_faults
from jobs.verdict import Outcome

ABSENT = "absent"
DEVICE_KEYS = ("kind", "name", "driver", "granule_bytes", "profile")
"""Facts of a card that two arms share across blocks; its UUID must be shared inside each block."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One reason why runs cannot be compared, or are not what was asked for."""

    outcome: Outcome  # NOT_COMPARABLE, or INFRASTRUCTURE when the harness ran something else than planned
    arm: str
    message: str
    remedy: str
    run_ids: tuple[str, ...]


def own_mismatches(plan: CellPlan, arm: ArmPlan, run: RunFact) -> list[Mismatch]:
    """Whether one run is what the plan asked for: build, model, confirmed settings, certificate of the same card."""
    record = run.record
    assert record is not None, run.run_id
    found: list[Mismatch] = []

    def add(outcome: Outcome, message: str, remedy: str) -> None:
        found.append(Mismatch(outcome, arm.name, message, remedy, (run.run_id,)))

    measured = [attempt.attempt_id for attempt in run.attempts if attempt.state == "measured"]
    if record.run_id != run.run_id or measured != [record.attempt_id]:
        message = (
            f"run {run.run_id} holds a record of {record.run_id}, attempt {record.attempt_id}; measured: {measured}"
        )
        add("INFRASTRUCTURE", message, "mend the store: each complete run holds the record of its one measured attempt")
    if not arm.tree_digest or not record.engine_digest:
        add("NOT_COMPARABLE", "the digest of the engine that ran is unknown", "submit the sweep again")
    elif record.engine_digest != arm.tree_digest:
        message = f"another build ran: engine {_short(record.engine_digest)}, planned {_short(arm.tree_digest)}"
        add("INFRASTRUCTURE", message, "submit the sweep again; a checkout must not change while a sweep runs")
    if not plan.model_digest or not record.model_digest:
        add("NOT_COMPARABLE", "the digest of the model is unknown", "build the model anew, its digest is written then")
    elif record.model_digest != plan.model_digest:
        message = f"another model ran: {_short(record.model_digest)}, planned {_short(plan.model_digest)}"
        add("NOT_COMPARABLE", message, "submit the sweep again; model files must not change while a sweep runs")
    for fault in setting_faults({**plan.config, **arm.config}, record):
        add("NOT_COMPARABLE", fault, "the engine must serve what it is asked, and say so")
    kind = record.device.get("kind")
    asked = PLAN_ONLY if plan.settings.plan_only else plan.settings.device
    if asked != "auto" and kind != asked:
        add("NOT_COMPARABLE", f"device {asked} was asked and {kind} ran", "the engine must serve it")
    if record.certificate and record.certificate.grade == "scripted" and kind not in ("sim", PLAN_ONLY):
        add(
            "NOT_COMPARABLE", f"a scripted certificate says nothing of a card of kind {kind}", "check the worker's host"
        )
    uuid, certified = record.device.get("uuid"), record.certificate.uuid if record.certificate else None
    if not uuid:
        add("NOT_COMPARABLE", "the card that the run used is unknown", "the engine must report its device's UUID")
    elif record.certificate and certified != uuid:
        add(
            "INFRASTRUCTURE",
            f"the run used card {uuid}, the certificate is for {certified or 'no card'}",
            "check the worker's host",
        )
    return found


def pair_mismatches(
    base: ArmPlan,
    other: ArmPlan,
    base_runs: Sequence[RunFact],
    other_runs: Sequence[RunFact],
    varies: Sequence[str],
    scope: Collection[str],
) -> list[Mismatch]:
    """What differs between two arms' runs and is not declared in `varies`.

    Where the contract's `scope` leaves the driver out, blocks may differ in it, and the runs of one block may not.
    Where the program varies, each arm says what its engine has: what one does not know at all is not compared.
    """
    run_ids = tuple(run.run_id for run in (*base_runs, *other_runs))

    def refuse(message: str, remedy: str) -> Mismatch:
        return Mismatch("NOT_COMPARABLE", other.name, message, remedy, run_ids)

    found = [
        refuse(f"{name} is {_words(mine)} in {base.name} and {_words(theirs)} in {other.name}", _declare(name))
        for name, mine, theirs in _config_differences(base_runs, other_runs)
        if name not in varies
        and not _is_unsaid(mine, theirs, varies)
        and not _is_of_program(name, mine, theirs, varies)
    ]
    for key in DEVICE_KEYS:
        if (key == "granule_bytes" and "granule" in varies) or (key == "driver" and "driver" not in scope):
            continue
        if key == "kind" and "device" in varies and len(_device_values(base_runs, key)) == 1:
            continue
        mine, theirs = _device_values(base_runs, key), _device_values(other_runs, key)
        if (mine != theirs or len(mine) > 1) and not _is_unsaid(mine, theirs, varies):
            message = f"card's {key} is {_words(mine)} in {base.name} and {_words(theirs)} in {other.name}"
            found.append(refuse(message, "runs must share one kind of card and one driver; rerun the cell"))
    for key, word in (("uuid", "card"), ("driver", "driver")):
        for block, values in _by_block((*base_runs, *other_runs), key).items():
            told = values - {ABSENT} if "program" in varies else values
            if len(told) > 1 and (key == "uuid" or "driver" not in scope):
                message = f"block {block} ran on {len(values)} {word}s: {', '.join(sorted(values))}"
                found.append(refuse(message, f"base and head must share one {word}; rerun the block"))
    if base.env != other.env and not _env_declared(base.env, other.env, varies):
        found.append(refuse(f"environments of {base.name} and {other.name} differ", _declare("env")))
    return found


def _is_unsaid(mine: frozenset[str], theirs: frozenset[str], varies: Sequence[str]) -> bool:
    """Whether two engines are compared of which one does not say a thing in any run."""
    return "program" in varies and (len(mine) == len(theirs) == 1) and ABSENT in mine | theirs


def _is_of_program(name: str, mine: frozenset[str], theirs: frozenset[str], varies: Sequence[str]) -> bool:
    """Whether a setting is another engine's own, such as its version, in which two of a kind differ on purpose."""
    return "program" in varies and "." in name and len(mine) == len(theirs) == 1


def _config_differences(
    base_runs: Iterable[RunFact], other_runs: Iterable[RunFact]
) -> list[tuple[str, frozenset[str], frozenset[str]]]:
    base, other = [_settings(run) for run in base_runs], [_settings(run) for run in other_runs]
    names = sorted({name for settings in (*base, *other) for name in settings})
    found = []
    for name in names:
        mine = frozenset(settings.get(name, ABSENT) for settings in base)
        theirs = frozenset(settings.get(name, ABSENT) for settings in other)
        if mine != theirs or len(mine) > 1:
            found.append((name, mine, theirs))
    return found


def _settings(run: RunFact) -> dict[str, str]:
    assert run.record is not None, run.run_id
    return {name: repr(effective(entry)) for name, entry in run.record.effective_config.items()}


def _device_values(runs: Iterable[RunFact], key: str) -> frozenset[str]:
    return frozenset(str(run.record.device.get(key, ABSENT)) for run in runs if run.record)


def _by_block(runs: Iterable[RunFact], key: str) -> dict[int, set[str]]:
    """The values that a fact of the card has in each block."""
    values: dict[int, set[str]] = {}
    for run in sorted(runs, key=lambda run: (run.block, run.position)):
        assert run.record is not None, run.run_id
        values.setdefault(run.block, set()).add(str(run.record.device.get(key, ABSENT)))
    return values


def _env_declared(base: Mapping[str, str], other: Mapping[str, str], varies: Sequence[str]) -> bool:
    changed = {name for name in {*base, *other} if base.get(name) != other.get(name)}
    return "env" in varies or changed <= set(varies)


def _declare(name: str) -> str:
    return f"make the arms equal in {name}, or name it under varies if that is what the sweep compares"


def _words(values: frozenset[str]) -> str:
    return " / ".join(sorted(values))


def _short(digest: str) -> str:
    return digest[:12]
