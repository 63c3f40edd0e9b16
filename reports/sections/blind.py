"""What this cannot catch: stated in every report, since a green gate is read as more than it proves."""

from __future__ import annotations

from reports.blocks import Details, Listing, Section, words
from reports.format import plural
from reports.view import Scope, SweepView


def build(view: SweepView, scope: Scope) -> Section:
    """The judge's blind spots, one sentence each, and the notes on single cells."""
    notes = [note for cell in scope.cells for note in cell.source.notes]
    spots = view.verdict.blind_spots or ("Nothing is stated, which is itself a gap: read the sweep file.",)
    listing = Listing(tuple(words(spot) for spot in (*spots, *notes[: scope.rows])))
    fold = Details(
        words(f"What this cannot catch: {plural(len(spots), 'limit')} of this measurement"), (listing,), open=True
    )
    return Section("blind", "What this cannot catch", (), folded=(fold,), minor=True)
