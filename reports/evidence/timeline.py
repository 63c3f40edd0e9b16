"""What the watch of the card saw along each run: a picture a run, those that were not clear first."""

from __future__ import annotations

from typing import Final

from jobs import timeline
from jobs.timeline import Timeline
from reports.blocks import Block, Details, Paragraph, Section, State, words
from reports.evidence.runs import Measured, label
from reports.format import integer, plural
from reports.pictures import card
from reports.wording import CERTIFICATES

MOST_RUNS: Final = 12
"""Runs that get a picture; `assay explain` and the store tell of the others."""


def build(measured: list[Measured]) -> Section:
    """The first picture is open, and so is every one of a run that was not certified clear."""
    told = [(pair, along) for pair in measured if (along := _along(pair)) is not None]
    told.sort(key=lambda one: _is_clear(one[0]))
    pictures = tuple(_picture(pair, along, is_first=place == 0) for place, (pair, along) in enumerate(told[:MOST_RUNS]))
    without = len(measured) - len(told)
    left = len(told) - len(pictures)
    notes: list[Block] = []
    if without:
        notes.append(Paragraph(words(f"Of {plural(without, 'run')} no samples were kept along the run.")))
    if left:
        notes.append(Paragraph(words(f"{plural(left, 'clear run')} more; the first {integer(MOST_RUNS)} are shown.")))
    summary = "What was sampled of the card while each run was on it." if told else "No run kept samples of its card."
    return Section("timeline", "The card along each run", words(summary), tuple(notes), pictures)


def _along(pair: Measured) -> Timeline | None:
    proof = pair[1].certificate
    return None if proof is None else timeline.read(proof.during)


def _is_clear(pair: Measured) -> bool:
    proof = pair[1].certificate
    return proof is not None and proof.verdict == "clear"


def _picture(pair: Measured, along: Timeline, *, is_first: bool) -> Details:
    run, proof = pair[0], pair[1].certificate
    assert proof is not None
    state = State(proof.verdict, CERTIFICATES[proof.verdict])
    return Details(
        words(f"{label(run)}: ", state, f", {card.points(along)}"),
        (card.build(proof, along),),
        open=is_first or not _is_clear(pair),
    )
