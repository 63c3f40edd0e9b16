"""Token identity: comparing streams of ids, every generation including warm-ups.

Order of questions: does an arm equal itself over its runs and over a batch's sequences of one prompt (else
NONDETERMINISTIC), over its generations (else its own state is corrupted, deterministically), and only then: does it
equal base, generation by generation. A difference is a VIOLATION when base's own gap rules a near tie out, else it is
put before a teacher-forced oracle (`jobs.near_tie`), and UNADJUDICATED as long as that has not spoken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from jobs.contract import IdentityContract
from jobs.model import Lock, RunRecord
from jobs.verdict import IdentityClass, IdentityRow

What = Literal["pair", "self", "null", "golden"]
Place = tuple[int, int]
"""A generation's index and a sequence, both from 0."""
Number = TypeVar("Number", int, float)

CONTEXT = 4
"""Ids shown on each side of a difference."""

NO_ORACLE = "no oracle was run, so a near tie is not excused and it counts as VIOLATION"


class Stream(NamedTuple):
    """The ids of one sequence of one generation of one run.

    `run` is the arm's run number, from 1, in block order. `sequence` counts from 0, and is None where there is but one.
    """

    arm: str
    run_id: str
    run: int
    generation: int
    ids: tuple[int, ...]
    stop: str | None
    gaps: tuple[float, ...]
    sequence: int | None = None

    @property
    def number(self) -> int:
        """Its generation as people count them, from 1."""
        return self.generation + 1

    @property
    def place(self) -> Place:
        """What it is compared with: the same generation and sequence of another run or arm."""
        return self.generation, self.sequence or 0

    @property
    def words(self) -> str:
        """Its place as people count, from 1."""
        return f"generation {self.number}" + ("" if self.sequence is None else f", sequence {self.sequence + 1}")


@dataclass(frozen=True, slots=True)
class ArmStreams:
    """An arm's streams on one card: run by run, each by generation and sequence."""

    arm: str
    runs: tuple[tuple[Stream, ...], ...]
    at: Mapping[Place, Sequence[Stream]]
    """By generations and sequences that every run has, in order: one stream of each run."""

    def run_ids(self) -> tuple[str, ...]:
        """Runs that gave these streams."""
        return tuple(run[0].run_id for run in self.runs if run)


Oracle = Callable[[Stream, Stream], tuple[IdentityClass, str]]
"""What a teacher-forced reference makes of the first difference between base's stream and another's, and why."""


def no_oracle(_left: Stream, _right: Stream) -> tuple[IdentityClass, str]:
    """Nobody to ask."""
    return "UNADJUDICATED", NO_ORACLE


def streams_of(arm: str, records: Sequence[RunRecord]) -> ArmStreams:
    """The streams of an arm's runs, in the order given. Empty ids stay: a generation without tokens is not absent."""
    runs = (
        tuple(
            Stream(arm, record.run_id, number, g.index, s.ids, s.stop_reason, s.gaps, at if g.further else None)
            for g in sorted(record.generations, key=lambda g: g.index)
            for at, s in enumerate(g.sequences)
        )
        for number, record in enumerate(records, start=1)
    )
    return arm_streams(arm, runs)


def arm_streams(arm: str, runs: Iterable[tuple[Stream, ...]]) -> ArmStreams:
    """An arm's streams from those of its runs."""
    runs = tuple(runs)
    found: dict[Place, list[Stream]] = {}
    given: dict[Place, int] = {}
    for run in runs:
        for stream in run:
            found.setdefault(stream.place, []).append(stream)
        for place in {stream.place for stream in run}:
            given[place] = given.get(place, 0) + 1
    return ArmStreams(arm, runs, {place: found[place] for place in sorted(found) if given[place] == len(runs)})


def self_row(streams: ArmStreams, prompts: Sequence[tuple[int, ...]] = ()) -> IdentityRow:
    """An arm against itself: over its runs, generation by generation; over sequences of one prompt; over generations.

    `prompts` are what the sequences of its batch take in turn.
    """
    if not streams.at:
        return _missing(streams.arm, streams.arm, "self", "no generation to compare")
    compared = 0
    for first, *others in streams.at.values():
        for other in others:
            compared += min(len(first.ids), len(other.ids))
            if _differ(first, other):
                note = f"runs of one build and config disagree in {first.words}"
                return _row(first, other, "NONDETERMINISTIC", "self", compared, note, by_run=True)
    for first, other in _twins(streams, prompts):
        compared += min(len(first.ids), len(other.ids))
        if _differ(first, other):
            note = f"sequences of one prompt disagree in generation {first.number} of one batch"
            return _row(first, other, "NONDETERMINISTIC", "self", compared, note)
    firsts: dict[int, Stream] = {}
    for place, (other, *_) in streams.at.items():
        first = firsts.setdefault(place[1], other)
        if first is other:
            continue
        compared += min(len(first.ids), len(other.ids))
        if _differ(first, other):
            shape = _prefix_class(first, other)
            # Same process, same context, one reduction order: no near tie can excuse this.
            return _row(first, other, shape or "VIOLATION", "self", compared, _repeats(streams, first, other))
    return _equal(streams, streams, "self", list(streams.at), compared)


def _twins(streams: ArmStreams, prompts: Sequence[tuple[int, ...]]) -> Iterator[tuple[Stream, Stream]]:
    """Each sequence of a generation with the first one that has the same prompt."""
    for run in streams.runs if prompts else ():
        firsts: dict[tuple[int, tuple[int, ...]], Stream] = {}
        for stream in run:
            generation, sequence = stream.place
            first = firsts.setdefault((generation, prompts[sequence % len(prompts)]), stream)
            if first is not stream:
                yield first, stream


def pair_row(
    base: ArmStreams,
    other: ArmStreams,
    contract: IdentityContract,
    what: What = "pair",
    unsteady: Collection[str] = (),
    oracle: Oracle = no_oracle,
) -> IdentityRow:
    """Base against another arm; `unsteady` names the arms whose `self_row` was NONDETERMINISTIC.

    The row shows the first generation and sequence that differ, of those for which there is the least excuse; the note
    names the others. IDENTICAL means: every
    generation, every sequence that both batches have, and both arms repeat themselves over their runs.
    """
    places = sorted(base.at.keys() & other.at.keys())
    if not places:
        return _missing(base.arm, other.arm, what, "an arm has no generation to compare")
    wavering = [arm.arm for arm in (base, other) if arm.arm in unsteady]
    if wavering:
        left, right = _closest_difference(base, other, places)
        note = " and ".join(wavering) + (
            " do not repeat themselves" if len(wavering) > 1 else " does not repeat itself"
        )
        return _row(left, right, "NONDETERMINISTIC", what, min(len(left.ids), len(right.ids)), note)
    pairs = [(base.at[place][0], other.at[place][0]) for place in places]
    compared = sum(min(len(left.ids), len(right.ids)) for left, right in pairs) * min(len(base.runs), len(other.runs))
    if not any(stream.ids for pair in pairs for stream in pair):
        return _missing(base.arm, other.arm, what, "neither arm gave an id to compare")
    bad = [(left, right) for left, right in pairs if _differ(left, right) and not _allowed(left, right, contract)]
    if not bad:
        return _equal(base, other, what, places, compared)
    left, right, klass, why = _least_excused(bad, contract, places[0][0], oracle)
    return _row(left, right, klass, what, compared, _places_note(bad, places, why))


def never_met(base: ArmStreams, other: ArmStreams, contract: IdentityContract) -> IdentityRow | None:
    """The first generation and sequence in which no run of an arm gave what any run of base did; None if none."""
    for place in sorted(base.at.keys() & other.at.keys()):
        pairs = [(left, right) for left in base.at[place] for right in other.at[place]]
        if all(_differ(*pair) and not _allowed(*pair, contract) for pair in pairs):
            left, right = pairs[0]
            klass, why = _class_of(left, right, contract, later=False, oracle=no_oracle)
            note = f"in none of {_count(len(other.at[place]), 'run')} is {left.words} what it is in base; {why}"
            return _row(left, right, klass, "pair", min(len(left.ids), len(right.ids)), note)
    return None


def other_lengths(base: ArmStreams, other: ArmStreams) -> tuple[Stream, Stream] | None:
    """The first generation and sequence in which two arms gave another number of ids; None where they never did."""
    places = sorted(base.at.keys() & other.at.keys())
    pairs = ((base.at[place][0], other.at[place][0]) for place in places)
    return next(((left, right) for left, right in pairs if len(left.ids) != len(right.ids)), None)


def first_sequences_differ(
    left: ArmStreams, right: ArmStreams, contract: IdentityContract
) -> tuple[Stream, Stream] | None:
    """The first generation in which the first sequences of two batches differ, and no prefix contract forgives it."""
    places = sorted(place for place in left.at.keys() & right.at.keys() if place[1] == 0)
    pairs = ((left.at[place][0], right.at[place][0]) for place in places)
    return next((pair for pair in pairs if _differ(*pair) and not _allowed(*pair, contract)), None)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading ids that are equal."""
    if left == right:
        return len(left)
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


# ---- classes -----------------------------------------------------------------------------------------------------


def _differ(left: Stream, right: Stream) -> bool:
    return left.ids != right.ids or left.stop != right.stop


def _allowed(left: Stream, right: Stream, contract: IdentityContract) -> bool:
    """Whether a prefix contract forgives the difference: equal as far as the shorter list goes, and far enough.

    Without a least number of ids the longer list says how far that is, so that only another stop is forgiven.
    """
    shorter, longer = sorted((len(left.ids), len(right.ids)))
    far_enough = shorter > 0 and shorter >= (contract.min_tokens or longer)
    return contract.compare == "prefix" and far_enough and common_prefix(left.ids, right.ids) == shorter


def _prefix_class(left: Stream, right: Stream) -> Literal["SHORT", "LONG"] | None:
    """SHORT or LONG when one list is the beginning of the other, or only the stop differs; seen from `right`."""
    prefix = common_prefix(left.ids, right.ids)
    if prefix < min(len(left.ids), len(right.ids)):
        return None
    if len(left.ids) != len(right.ids):
        return "SHORT" if len(right.ids) < len(left.ids) else "LONG"
    # Equal ids, other stop: whoever ran to the length asked for went further than one that ended or was cut off.
    return "SHORT" if left.stop == "length" or right.stop is None else "LONG"


def _least_excused(
    bad: Sequence[tuple[Stream, Stream]], contract: IdentityContract, first: int, oracle: Oracle
) -> tuple[Stream, Stream, IdentityClass, str]:
    """The difference that names the row: the first of those with the least excuse, which a near tie that the contract
    takes has most of.

    The same two lists of ids in a later generation are the same difference again.
    """
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Stream, Stream, IdentityClass, str]] = {}
    for left, right in bad:
        same = (left.place[1], left.ids, right.ids)
        if same not in found:
            klass, why = _class_of(left, right, contract, later=left.generation != first, oracle=oracle)
            found[same] = (left, right, klass, why)
    return min(found.values(), key=lambda one: _excuse(one[0], one[1], one[2], contract))


def _excuse(left: Stream, right: Stream, klass: IdentityClass, contract: IdentityContract) -> int:
    if klass == "NEAR_TIE":
        at = common_prefix(left.ids, right.ids)
        return 3 if contract.takes(left.sequence, at, left.ids[at], right.ids[at]) else 2
    return 1 if klass == "UNADJUDICATED" else 0


def _class_of(
    left: Stream, right: Stream, contract: IdentityContract, *, later: bool, oracle: Oracle
) -> tuple[IdentityClass, str]:
    shape = _prefix_class(left, right)
    if shape:
        return shape, f"equal up to there; {_ends(left)}; {_ends(right)}"
    if later:
        return "VIOLATION", "state is corrupted from there on"
    at = common_prefix(left.ids, right.ids)
    gap = _gap(left, at)
    # Both ids of a near tie stand within `band` of the oracle, and base within band / 2 of it, so that base's own gap
    # is at most 2 x band; the contract caps the band. Beyond that no oracle could make it a near tie.
    if gap is not None and gap > 2 * contract.near_tie_cap:
        return "VIOLATION", f"{left.arm}'s gap there is {gap:.4g}, too clear for a near tie"
    known = "is not recorded" if gap is None else f"is {gap:.4g}"
    klass, why = oracle(left, right)
    listed = _listing(left, right, at, contract) if klass == "NEAR_TIE" and contract.near_ties == "listed" else ""
    return klass, f"{left.arm}'s gap there {known}; {why}{listed}"


def _listing(left: Stream, right: Stream, at: int, contract: IdentityContract) -> str:
    entry = contract.listed(left.sequence, at, left.ids[at], right.ids[at])
    return "; the contract does not list it" if entry is None else f"; the contract lists it: {entry.reason}"


def _ends(stream: Stream) -> str:
    return f"{stream.arm}: {_count(len(stream.ids), 'id')}, stop {stream.stop or 'not declared'}"


# ---- rows --------------------------------------------------------------------------------------------------------


def _row(
    left: Stream, right: Stream, klass: IdentityClass, what: What, compared: int, note: str, *, by_run: bool = False
) -> IdentityRow:
    at = common_prefix(left.ids, right.ids)
    differs = at < max(len(left.ids), len(right.ids))
    return IdentityRow.made(
        klass=klass,
        left=_label(left, what, by_run=by_run),
        right=_label(right, what, by_run=by_run),
        what=what,
        compared=compared,
        common_prefix=at,
        left_length=len(left.ids),
        right_length=len(right.ids),
        left_stop=left.stop,
        right_stop=right.stop,
        first_difference=at if differs else None,
        left_id=_at(left.ids, at),
        right_id=_at(right.ids, at),
        left_gap=_gap(left, at),
        right_gap=_gap(right, at),
        generation=right.generation,
        sequence=left.sequence if right.sequence is None else right.sequence,
        left_context=left.ids[max(0, at - CONTEXT) : at + CONTEXT + 1] if differs else (),
        right_context=right.ids[max(0, at - CONTEXT) : at + CONTEXT + 1] if differs else (),
        run_ids=tuple(dict.fromkeys((left.run_id, right.run_id))),
        note=note,
    )


def _equal(left: ArmStreams, right: ArmStreams, what: What, places: Sequence[Place], compared: int) -> IdentityRow:
    pairs = [(left.at[place][0], right.at[place][0]) for place in places]
    first, second = max(pairs, key=lambda pair: (len(pair[0].ids) != len(pair[1].ids), _differ(*pair)))
    runs = len(left.runs) if what == "self" else min(len(left.runs), len(right.runs))
    generations, sequences = ({place[part] for place in places} for part in (0, 1))
    of = f" of {len(sequences)} sequences" if len(sequences) > 1 else ""
    note = f"{_count(len(generations), 'generation')}{of} in each of {_count(runs, 'run')}"
    if alone := {place[1] for arm in (left, right) for place in arm.at} - sequences:
        note += f"; {_count(len(alone), 'sequence')} of one arm's batch had no other to compare with"
    if first.ids != second.ids or first.stop != second.stop:
        note += "; equal as far as the shorter goes, which the prefix contract allows"
    row = _row(first, second, "IDENTICAL", what, compared, note)
    whole = {"left": left.arm, "right": right.arm, "generation": None, "sequence": None}
    return IdentityRow.made(
        **{**row.__dict__, **whole, "run_ids": tuple(dict.fromkeys((*left.run_ids(), *right.run_ids())))}
    )


def _missing(left: str, right: str, what: What, note: str) -> IdentityRow:
    return IdentityRow(
        klass="MISSING",
        left=left,
        right=right,
        what=what,
        compared=0,
        common_prefix=0,
        left_length=0,
        right_length=0,
        note=note,
    )


def _label(stream: Stream, what: What, *, by_run: bool) -> str:
    if what != "self":
        return stream.arm
    sequence = "" if stream.sequence is None else f" seq {stream.sequence + 1}"
    return f"{stream.arm} gen {stream.number}{sequence}" + (f" run {stream.run}" if by_run else "")


def _repeats(streams: ArmStreams, first: Stream, other: Stream) -> str:
    runs, differs = len(streams.runs), f"{other.words} differs from generation {first.number}"
    if runs == 1:
        return f"{differs}; one run only, so whether it repeats is not known"
    return f"{differs} in the same way in all {runs} runs: state is corrupted"


def _places_note(bad: Sequence[tuple[Stream, Stream]], places: Sequence[Place], why: str) -> str:
    """Which generations differ, and in which sequences of a batch."""
    generations, sequences = (sorted({place[part] for place in places}) for part in (0, 1))
    differing = sorted({left.generation for left, _ in bad})
    equal = [index for index in generations if index not in differing]
    wrong = sorted({left.place[1] for left, _ in bad})
    listed = ", ".join(str(sequence + 1) for sequence in wrong)
    of = f" in sequence{'s' * (len(wrong) > 1)} {listed} of {len(sequences)}" if len(sequences) > 1 else ""
    if not equal:
        which = f"all {len(generations)} generations differ" if len(generations) > 1 else "the one generation differs"
        return f"{which}{of}; {why}"
    return f"{_listed(differing, 'differ')}{of}, {_listed(equal, 'equal')}; {why}"


def _listed(generations: Sequence[int], word: str) -> str:
    listed = ", ".join(str(index + 1) for index in generations)
    if word == "equal":
        return f"{listed} {'is' if len(generations) == 1 else 'are'} equal"
    return f"generation {listed} differs" if len(generations) == 1 else f"generations {listed} differ"


def _closest_difference(base: ArmStreams, other: ArmStreams, places: Sequence[Place]) -> tuple[Stream, Stream]:
    """The first pair of streams that differ; the first pair of all when none does."""
    for place in places:
        for left in base.at[place]:
            for right in other.at[place]:
                if _differ(left, right):
                    return left, right
    return base.at[places[0]][0], other.at[places[0]][0]


def _at(values: Sequence[Number], index: int) -> Number | None:
    return values[index] if index < len(values) else None


def _gap(stream: Stream, index: int) -> float | None:
    gap = _at(stream.gaps, index)
    return gap if gap is not None and math.isfinite(gap) else None


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def broken_locks(locks: Iterable[Lock], prompt: str, streams: ArmStreams) -> list[tuple[Lock, str]]:
    """Locks of a prompt that an arm breaks in any generation, with what it gave instead.

    The prompt is that of a batch's first sequence; the others have prompts, and so locks, of other cells.
    """
    broken = []
    firsts = [stream for run in streams.runs for stream in run if stream.place[1] == 0]
    for lock in locks:
        accepted = {lock.expected, *lock.allowed}
        for stream in firsts if lock.prompt == prompt else ():
            got = _at(stream.ids, lock.index)
            if got not in accepted:
                given = "no id" if got is None else f"id {got}"
                wanted = " or ".join(map(str, sorted(accepted)))
                where = f"generation {stream.number}, run {stream.run}"
                broken.append((lock, f"{given} at index {lock.index} where {wanted} is locked ({where})"))
                break
    return broken
