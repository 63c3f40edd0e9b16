"""The index of sweeps: what each came to, what was compared where, and whether it still counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from jobs.verdict import ArmView, Verdict
from reports.blocks import Inlines, Name, State, Struck, SweepRef, Text, Tone, joined, words
from reports.format import integer, plural, revision
from reports.view import SweepView
from reports.wording import OUTCOMES, outcome

MOST_CARDS: Final = 3
MOST_REASONS: Final = 3
NOT_JUDGED: Final = State("not judged", "quiet")

Counts = tuple[tuple[str, int], ...]
"""Outcomes with how often each is there, worst first."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sweep in a few words.

    `at`: when it was submitted, UTC, ISO 8601. `outcome` is empty before the first verdict; `progress` says how far it
    is while it is open. `said`: what the verdict said before something that it rests on was retracted, and `why` that
    was. `question`: what a later entry supersedes it by, see `question_of`.
    """

    sweep_id: str
    name: str
    at: str
    outcome: str = ""
    exit_code: int | None = None
    headline: str = ""
    arms: tuple[tuple[str, str], ...] = ()  # role, and what stood for it
    cards: tuple[str, ...] = ()
    cells: Counts = ()
    findings: Counts = ()
    said: str = ""
    why: tuple[str, ...] = ()
    question: str = ""
    superseded_by: str = ""
    progress: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry as it is shown. `is_struck`: it was superseded, and its state and headline are struck through.

    Of a retracted one only what it said is: that it is retracted still holds.
    """

    entry: Entry
    state: State
    is_struck: bool
    headline: Inlines
    marks: tuple[tuple[Tone, Inlines], ...]
    findings: tuple[tuple[State, str], ...]
    facts: tuple[tuple[str, Inlines], ...]


def question_of(verdict: Verdict, manifest_digest: str) -> str:
    """What a sweep asked: its manifest, and the engines that ran for its arms, which a manifest need not pin down."""
    engines = sorted({f"{arm.arm}={arm.engine_digest}" for cell in verdict.cells for arm in cell.arms})
    return hashlib.sha256("\n".join((manifest_digest, *engines)).encode()).hexdigest()


def entry_of(verdict: Verdict, question: str = "") -> Entry:
    """The entry of a verdict."""
    before = verdict.struck
    arms = verdict.cells[0].arms if verdict.cells else ()
    named = {f"{arm.card} {arm.uuid}".strip(): None for cell in verdict.cells for arm in cell.arms}
    return Entry(
        sweep_id=verdict.stamp.sweep_id,
        name=verdict.sweep,
        at=verdict.stamp.created_at,
        outcome=verdict.outcome,
        exit_code=verdict.exit_code,
        headline=verdict.headline,
        arms=tuple((arm.arm, _origin(arm)) for arm in arms if arm.role in ("base", "head")),
        cards=tuple(name for name in named if name) or verdict.stamp.cards,
        cells=SweepView(verdict).counts,
        findings=tuple(Counter(finding.outcome for finding in verdict.findings).items()),
        said="" if before is None else f"{before.outcome}, exit {before.exit_code}: {before.headline}",
        why=() if before is None else tuple(one.words for one in before.why),
        question=question,
    )


def standing(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Newest first, each with the entry that supersedes it: the newest of the same question that has an answer.

    A retracted entry supersedes nothing, since of what it said nothing is known any more.
    """
    ordered = sorted(entries, key=lambda entry: (entry.at, entry.sweep_id), reverse=True)
    newest: dict[str, str] = {}
    shown = []
    for entry in ordered:
        later = newest.get(entry.question, "")
        shown.append(replace(entry, superseded_by=later))
        if entry.question and entry.outcome and not entry.why and not entry.progress:
            newest.setdefault(entry.question, entry.sweep_id)
    return tuple(shown)


def rows_of(entries: Sequence[Entry]) -> tuple[Row, ...]:
    """Entries as they are shown, in their order."""
    return tuple(_row(entry) for entry in entries)


def _row(entry: Entry) -> Row:
    state = outcome(entry.outcome) if entry.outcome else NOT_JUDGED
    is_struck = bool(entry.superseded_by) and not entry.why
    said = Struck(entry.said) if entry.said else Struck(entry.headline) if is_struck else Text(entry.headline)
    marks: list[tuple[Tone, Inlines]] = [("warn", words(reason)) for reason in entry.why[:MOST_REASONS]]
    if (left := len(entry.why) - MOST_REASONS) > 0:
        marks.append(("warn", words(f"{plural(left, 'more retraction')} on its page")))
    if is_struck:
        again = words("Superseded: the same was asked again, and sweep ", SweepRef(entry.superseded_by), " answers.")
        marks.append(("quiet", again))
    return Row(
        entry,
        state,
        is_struck,
        words(said) if entry.headline else (),
        tuple(marks),
        tuple((State(integer(count), OUTCOMES[name][0]), name) for name, count in entry.findings),
        _facts(entry),
    )


def _facts(entry: Entry) -> tuple[tuple[str, Inlines], ...]:
    cards: Inlines = joined([Name(card) for card in entry.cards[:MOST_CARDS]])
    if (left := len(entry.cards) - MOST_CARDS) > 0:
        cards = (*cards, Text(f" and {integer(left)} more"))
    total = sum(count for _, count in entry.cells)
    cells = f"{plural(total, 'cell')}: {', '.join(f'{integer(count)} {name}' for name, count in entry.cells)}"
    told: list[tuple[str, Inlines]] = [(arm, words(Name(source))) for arm, source in entry.arms]
    told += [("cards", cards)] if cards else []
    told += [("cells", words(cells))] if total else []
    told += [("still open", words(entry.progress))] if entry.progress else []
    return (*told, ("sweep", words(Name(entry.sweep_id))))


def _origin(arm: ArmView) -> str:
    return f"{arm.source} at {revision(arm.commit)}" if arm.commit else arm.source
