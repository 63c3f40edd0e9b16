"""Plain sentences: messages, the headline, the next step, what a sweep cannot catch. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from jobs.cells_read import Passed
from jobs.model import ArmPlan, JudgeInput, Missing, Reading
from jobs.verdict import CellVerdict, Finding, IdentityRow, MetricRow, Outcome

REMEDY = MappingProxyType[Outcome, str](
    {
        "VIOLATION": "Look at the ids around the first difference; do not merge before the tokens agree.",
        "SHORT": "Find out why generation ends early; a wrong end id is the usual sign of corrupted logits.",
        "LONG": "Find out why generation no longer ends where it did; check the end ids.",
        "UNADJUDICATED": "Read the reason; treat it as wrong tokens until an oracle has adjudicated it.",
        "NONDETERMINISTIC": "Find the race or the stale state that makes runs of one build disagree.",
        "BROKEN_INVARIANT": "The record contradicts itself: mend the counters or the accounting behind them.",
        "BUILD_FAILED": "Mend what the build's log names, or the build command in the sweep file; then run it again.",
        "REGRESSED": "Mend the regression, or declare the change in the expectations file with a reason.",
        "NOT_AS_DECLARED": "Take the declaration out of the expectations file, or make it what the change does.",
        "TIME_WORSE": "Profile the slower arm; rerun with more blocks if in doubt.",
        "INFRASTRUCTURE": "Mend the host or the worker, then run the sweep anew.",
        "RETRACTED": "Run the sweep anew; where a run or golden alone was retracted, judge it again without that.",
        "NOT_COMPARABLE": "Make the arms equal in what the sweep does not vary, then run it again.",
        "CANNOT_LOAD": "Install what the engine needs on the host, or take its arm out of the sweep.",
        "MISSING": "Go on with --resume while runs are pending; when none is, mend the cause and run the sweep anew.",
        "CONTAMINATED": "Free the card of other work, then run the sweep anew.",
        "VACUOUS": "Choose a scenario in which the changed path runs, or mend the path so that it does.",
        "NEAR_TIE": "Look at both distances; allow near ties in the contract only if the change may reorder sums.",
        "WAIVED": "Mend it before its waiver ends.",
        "DECLARED": "Check that the declared change is the one that was meant.",
        "IMPROVED": "Nothing to do: merge when the review is done.",
        "PASS": "Nothing to do: merge when the review is done.",
    }
)
"""What to do about an outcome, when the finding itself knows nothing better."""


def difference(row: IdentityRow) -> str:
    """One difference of tokens, in words."""
    where = "" if row.what == "self" or not row.place else f" of {row.place}"
    if row.klass in ("SHORT", "LONG") and row.left_length != row.right_length:
        verb = "stops after" if row.klass == "SHORT" else "runs on to"
        place = where.replace(" of ", " in ")
        tokens = f"{_tokens(row.right_length)}{place} where {row.left} gives {row.left_length}"
        return f"{row.right} {verb} {tokens}; {row.note}"
    if row.first_difference is None:
        return f"{row.right} ends by {row.right_stop} where {row.left} ends by {row.left_stop}; {row.note}"
    ids = f"id {_id(row.right_id)} instead of {_id(row.left_id)}"
    return f"{row.right} differs from {row.left} at index {row.first_difference}{where} ({ids}); {row.note}"


def change(row: MetricRow) -> str:
    """A moved metric, in words: by how much and from what to what."""
    if isinstance(row.base, Missing) or isinstance(row.head, Missing) or isinstance(row.delta, Missing):
        return f"{row.metric}: {row.note}"
    verb = "rose" if row.delta > 0 else "fell"
    share = f" ({row.delta / row.base:+.1%})" if row.base else ""
    note = f"; {row.note}" if row.note else ""
    return (
        f"{row.metric} {verb} by {number(abs(row.delta))}{share}, from {number(row.base)} to {number(row.head)}{note}"
    )


def share(row: MetricRow) -> float | None:
    """What a metric moved by, of base; None where that is not known or base is 0."""
    if isinstance(row.delta, Missing) or isinstance(row.base, Missing) or not row.base:
        return None
    return row.delta / row.base


def number(value: Reading) -> str:
    """A figure for a sentence: whole numbers with separators, others with four digits, Missing as n/a."""
    if isinstance(value, Missing):
        return f"n/a ({value.missing})"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def headline(outcome: Outcome, first: Finding | None, findings: Sequence[Finding], cells: Sequence[CellVerdict]) -> str:
    """One sentence: what happened."""
    if first is not None:
        others = sum(1 for finding in findings if finding is not first and finding.exit_code)
        more = f" ({others} more finding{'s' * (others > 1)})" if others else ""
        advised = "" if first.exit_code or first.outcome in ("DECLARED", "WAIVED") else " (advises only)"
        place = f"In {first.cell}: " if first.cell else ""
        return f"{place}{first.message}{advised}{more}"
    where = f"in {len(cells)} cells" if len(cells) > 1 else f"in {cells[0].cell}"
    pairs = [row.klass for cell in cells for row in cell.identity if row.what == "pair"]
    same = all(klass == "IDENTICAL" for klass in pairs)
    tokens = "Same tokens" if same else "Tokens differ or were not compared, which this gate ignores,"
    tokens = tokens if pairs else "Planned alone, without tokens,"
    if outcome == "IMPROVED":
        return f"{tokens} {where}; {best_change(cells)}; no gating counter is worse."
    if any(row.gating for cell in cells for row in cell.exact):
        return f"{tokens} {where}, and no gating counter moved."
    return f"{tokens} {where}; counters were not judged."


def best_change(cells: Sequence[CellVerdict]) -> str:
    """The improved metric with the largest share gained, first bytes, in words; of several cells its own is named."""
    rows = [(row, cell.cell) for cell in cells for row in cell.exact if row.klass == "improved"]
    row, cell = min(rows, key=lambda found: (found[0].unit != "bytes", -abs(share(found[0]) or 0.0), found[0].metric))
    return f"in {cell}: {change(row)}" if len(cells) > 1 else change(row)


def next_step(first: Finding | None, outcome: Outcome) -> str:
    """One sentence: what to do."""
    return (first.remedy if first and first.remedy else "") or REMEDY[outcome]


def blind_spots(doc: JudgeInput, cells: Sequence[CellVerdict], passed: Passed) -> tuple[str, ...]:
    """What this sweep could not have caught, from how it was set up and what its runs were made on."""
    plans = doc.manifest.cells
    answered = any(not answer.failure for answer in doc.adjudications)
    asked = "the oracle was asked about differences alone" if answered else "no oracle was run"
    if golden := [cell.cell for cell in cells if any(row.what == "golden" for row in cell.identity)]:
        asked = f"a golden was held against {len(golden)} of {len(cells)} cells, and beyond it {asked}"
    spots = [f"Base and head agreeing does not make the tokens correct: {asked}."]
    if any(plan.settings.plan_only for plan in plans):
        spots = ["Nothing was computed: plans, bytes and captures are exact, and of tokens nothing is known."]
    if same := _same_as_base(doc.manifest.arms):
        spots.insert(0, f"{same} ran the engine of base with its settings: there was no change that could have shown.")
    if passed.simulated:
        spots.append("Simulated cards: faults of kernels, driver and timing cannot show.")
    if passed.foreign_unseen:
        spots.append("Processes on the card could not all be told apart: a small foreign one may have been missed.")
    prompts = {(plan.model, plan.prompt) for plan in plans}
    if prompts:
        listed = "one prompt" if len(prompts) == 1 else f"{len(prompts)} prompts"
        longest = max(plan.settings.tokens for plan in plans)
        widest = max((plan.batch(arm) for plan in plans for arm in doc.manifest.arms), default=1)
        side_by_side = "one sequence at a time" if widest == 1 else f"at most {widest} sequences at a time"
        spots.append(f"Only {listed}, {_tokens(longest)} at most, {side_by_side}: other contexts were not tried.")
    if any(not plan.witnesses for plan in plans):
        spots.append("A cell without a witness: nothing proves that the changed path ran there.")
    if any(arm.blocks < 2 for arm in plans):
        spots.append("Cells with one block: no difference in time can be told from noise.")
    if not any(arm.role == "null" for arm in doc.manifest.arms):
        spots.append("No null arm: an unsteady host would not show.")
    if cells and all(arm.role in ("base", "head", "null", "anchor") for arm in doc.manifest.arms) and _one_config(doc):
        spots.append("One setting of each engine option: faults in others, such as capture off, cannot show.")
    return tuple(spots)


def _same_as_base(arms: Sequence[ArmPlan]) -> str:
    """The arms under test that are base again in all that is compared: engine, settings, environment; in words."""
    base = next((_compared(arm) for arm in arms if arm.role == "base" and arm.tree_digest), None)
    return " and ".join(arm.name for arm in arms if arm.role in ("head", "variant") and _compared(arm) == base)


def _compared(arm: ArmPlan) -> tuple[object, ...]:
    run_by = (arm.adapter, arm.command, arm.reads, arm.options)
    return (*run_by, arm.tree_digest, repr(sorted(arm.config.items())), sorted(arm.env.items()))


def _one_config(doc: JudgeInput) -> bool:
    return len({repr(sorted(plan.config.items())) for plan in doc.manifest.cells}) == 1


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _id(token: int | None) -> str:
    return "none" if token is None else str(token)
