"""Token identity: classes, first differences, and the order of questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import wording
from jobs.contract import IdentityContract
from jobs.identity import ArmStreams, Stream, arm_streams, broken_locks, common_prefix, pair_row, self_row, streams_of
from jobs.model import Generation, Lock, RunRecord, SequenceTokens
from reports import divergence

FULL = IdentityContract()
IDS = tuple(range(100, 132))


def arm(
    name: str,
    ids: Callable[[int, int], Sequence[int]] = lambda _run, _gen: IDS,
    *,
    runs: int = 2,
    generations: int = 3,
    stop: str | None = "length",
    gap: float = 0.5,
) -> ArmStreams:
    """An arm whose ids depend on run (from 1) and generation (from 0)."""
    return arm_streams(
        name,
        tuple(
            tuple(
                Stream(name, f"run_{name}_{run}", run, gen, tuple(ids(run, gen)), stop, (gap,) * len(ids(run, gen)))
                for gen in range(generations)
            )
            for run in range(1, runs + 1)
        ),
    )


def flipped(at: int, to: int = 9) -> tuple[int, ...]:
    return (*IDS[:at], to, *IDS[at + 1 :])


def test_equal_streams_are_identical_and_say_what_was_compared() -> None:
    row = pair_row(arm("base"), arm("head"), FULL)
    assert row.klass == "IDENTICAL"
    assert row.compared == 32 * 3 * 2
    assert (row.left_length, row.right_length, row.common_prefix) == (32, 32, 32)
    assert row.first_difference is None
    assert row.left_context == row.right_context == ()
    assert row.note == "3 generations in each of 2 runs"
    assert set(row.run_ids) == {"run_base_1", "run_base_2", "run_head_1", "run_head_2"}


def test_a_clear_difference_is_a_violation_with_its_surroundings() -> None:
    row = pair_row(arm("base", gap=0.5), arm("head", lambda _r, _g: flipped(7)), FULL)
    assert row.klass == "VIOLATION"
    assert (row.first_difference, row.common_prefix, row.generation) == (7, 7, 0)
    assert (row.left_id, row.right_id) == (107, 9)
    assert (row.left_gap, row.right_gap) == (0.5, 0.5)
    assert row.left_context == IDS[3:12]
    assert row.right_context == flipped(7)[3:12]


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        (0.09, "UNADJUDICATED"),
        (0.2, "UNADJUDICATED"),  # 2 x cap exactly: an oracle could still excuse it
        (0.21, "VIOLATION"),
        (math.nan, "UNADJUDICATED"),
    ],
)
def test_without_an_oracle_a_small_gap_stays_open_and_says_so(gap: float, expected: str) -> None:
    row = pair_row(arm("base", gap=gap), arm("head", lambda _r, _g: flipped(7)), IdentityContract(near_tie_cap=0.1))
    assert row.klass == expected
    assert ("no oracle was run" in row.note) == (expected == "UNADJUDICATED")


def test_gaps_that_were_not_recorded_do_not_excuse() -> None:
    bare = arm("base")
    bare = arm_streams("base", tuple(tuple(_without_gaps(s) for s in run) for run in bare.runs))
    row = pair_row(bare, arm("head", lambda _r, _g: flipped(7)), FULL)
    assert row.klass == "UNADJUDICATED"
    assert "is not recorded" in row.note
    assert row.left_gap is None


def _without_gaps(stream: Stream) -> Stream:
    return Stream(stream.arm, stream.run_id, stream.run, stream.generation, stream.ids, stream.stop, ())


@pytest.mark.parametrize(
    ("base", "head", "stops", "expected"),
    [
        (IDS, IDS[:3], ("length", "length"), "SHORT"),
        (IDS, IDS[:3], ("length", "eos"), "SHORT"),
        (IDS, (), ("length", "eos"), "SHORT"),
        (IDS[:3], IDS, ("eos", "length"), "LONG"),
        (IDS, IDS, ("length", "eos"), "SHORT"),
        (IDS, IDS, ("eos", "length"), "LONG"),
        (IDS, IDS, ("length", None), "SHORT"),
        (IDS, IDS, (None, "length"), "LONG"),
        (IDS[:30], IDS[:30], ("eos", "eos"), "IDENTICAL"),
        (IDS, (*IDS[:2], 9), ("length", "eos"), "VIOLATION"),  # shorter, and other ids: not a mere SHORT
    ],
)
def test_field_41_length_and_stop_are_part_of_identity(
    base: Sequence[int], head: Sequence[int], stops: tuple[str | None, str | None], expected: str
) -> None:
    left = arm("base", lambda _r, _g: base, stop=stops[0])
    right = arm("head", lambda _r, _g: head, stop=stops[1])
    assert pair_row(left, right, FULL).klass == expected


def test_a_short_row_shows_where_the_shorter_list_ends() -> None:
    row = pair_row(arm("base"), arm("head", lambda _r, _g: IDS[:3]), FULL)
    assert (row.first_difference, row.left_id, row.right_id) == (3, IDS[3], None)
    assert (row.left_length, row.right_length) == (32, 3)
    assert row.right_context == IDS[:3]


def test_a_prefix_contract_accepts_a_shorter_list_and_nothing_else() -> None:
    contract = IdentityContract(compare="prefix", min_tokens=3)
    accepted = pair_row(arm("base"), arm("head", lambda _r, _g: IDS[:3]), contract)
    assert accepted.klass == "IDENTICAL"
    assert "prefix contract" in accepted.note
    assert pair_row(arm("base"), arm("head", lambda _r, _g: flipped(1)), contract).klass == "VIOLATION"
    assert pair_row(arm("base"), arm("head", lambda _r, _g: ()), contract).klass == "SHORT"
    assert pair_row(arm("base"), arm("head", lambda _r, _g: IDS[:2]), contract).klass == "SHORT"


def test_a_prefix_contract_without_a_least_number_forgives_another_stop_only() -> None:
    contract = IdentityContract(compare="prefix")
    assert pair_row(arm("base"), arm("head", lambda _r, _g: IDS[:3]), contract).klass == "SHORT"
    assert pair_row(arm("head", lambda _r, _g: IDS[:3]), arm("base"), contract).klass == "LONG"


def test_a_forgiven_length_shows_even_where_only_a_later_generation_has_it() -> None:
    contract = IdentityContract(compare="prefix", min_tokens=3)
    row = pair_row(arm("base"), arm("head", lambda _r, gen: IDS if gen == 0 else IDS[:3]), contract)
    assert (row.klass, row.left_length, row.right_length) == ("IDENTICAL", len(IDS), 3)


def test_corruption_from_a_later_generation_is_a_violation_that_names_it() -> None:
    """Right in the first generation, wrong in the next ones, the same in every run: state, not chance."""
    head = arm("head", lambda _r, gen: IDS if gen == 0 else flipped(7), gap=0.01)
    row = pair_row(arm("base", gap=0.01), head, FULL)
    assert row.klass == "VIOLATION"  # whatever the gap: generation 0 shows that head can do it
    assert row.generation == 1
    assert row.note.startswith("generations 2, 3 differ, 1 is equal")
    own = self_row(head)
    assert own.klass == "VIOLATION"
    assert (own.left, own.right) == ("head gen 1", "head gen 2")
    assert "in all 2 runs" in own.note


def test_a_warm_up_counts_as_a_generation() -> None:
    head = arm("head", lambda _r, gen: flipped(7) if gen == 0 else IDS)
    row = pair_row(arm("base"), head, FULL)
    assert (row.klass, row.generation) == ("VIOLATION", 0)


def test_one_run_cannot_tell_corruption_from_chance_and_says_so() -> None:
    row = self_row(arm("head", lambda _r, gen: IDS if gen == 0 else flipped(7), runs=1))
    assert row.klass == "VIOLATION"
    assert "one run only" in row.note


def test_runs_that_disagree_are_nondeterministic() -> None:
    head = arm("head", lambda run, gen: flipped(9) if (run, gen) == (2, 1) else IDS)
    own = self_row(head)
    assert own.klass == "NONDETERMINISTIC"
    assert (own.left, own.right) == ("head gen 2 run 1", "head gen 2 run 2")
    assert own.generation == 1
    row = pair_row(arm("base"), head, FULL, unsteady=["head"])
    assert row.klass == "NONDETERMINISTIC"
    assert row.first_difference == 9  # shown against base, where one differs


def test_an_unsteady_arm_that_never_left_base_is_still_not_identical() -> None:
    head = arm("head", lambda run, _g: IDS if run == 1 else IDS[:30])
    row = pair_row(arm("base"), head, FULL, unsteady=["head"])
    assert row.klass == "NONDETERMINISTIC"


def test_a_later_generation_that_ends_early_is_short_against_itself() -> None:
    row = self_row(arm("head", lambda _r, gen: IDS if gen == 0 else IDS[:3]))
    assert row.klass == "SHORT"


def test_no_streams_are_missing_and_never_identical() -> None:
    empty = arm_streams("head", ())
    assert self_row(empty).klass == "MISSING"
    assert pair_row(arm("base"), empty, FULL).klass == "MISSING"
    assert pair_row(arm("base", generations=0), arm("head", generations=0), FULL).klass == "MISSING"
    assert pair_row(arm("base", lambda _r, _g: ()), arm("head", lambda _r, _g: ()), FULL).klass == "MISSING"


def test_only_generations_that_both_have_are_compared() -> None:
    row = pair_row(arm("base", generations=3), arm("head", generations=2), FULL)
    assert row.klass == "IDENTICAL"
    assert row.note.startswith("2 generations")


LOCK = Lock(prompt="context", index=5, expected=105, allowed=(46283,))


@pytest.mark.parametrize(("given_id", "is_broken"), [(105, False), (46283, False), (279, True)])
def test_a_lock_accepts_the_expected_id_and_the_allowed_ones(given_id: int, is_broken: bool) -> None:
    streams = arm("head", lambda _r, _g: flipped(5, given_id))
    assert bool(broken_locks([LOCK], "context", streams)) is is_broken


def test_a_lock_is_broken_by_a_list_that_never_reaches_it() -> None:
    [(_, fault)] = broken_locks([LOCK], "context", arm("head", lambda _r, _g: IDS[:3]))
    assert fault.startswith("no id at index 5 where 105 or 46283 is locked")


def test_a_lock_of_another_prompt_does_not_speak() -> None:
    assert broken_locks([LOCK], "capital", arm("head", lambda _r, _g: ())) == []


ids_lists = st.lists(st.integers(0, 3), max_size=8)


@given(left=ids_lists, right=ids_lists)
def test_common_prefix_is_the_longest_equal_beginning(left: list[int], right: list[int]) -> None:
    n = common_prefix(left, right)
    assert left[:n] == right[:n]
    assert n in (len(left), len(right)) or left[n] != right[n]


@given(left=ids_lists, right=ids_lists)
def test_identity_is_symmetric_and_short_mirrors_long(left: list[int], right: list[int]) -> None:
    mirror = {"SHORT": "LONG", "LONG": "SHORT"}
    one = pair_row(arm("base", lambda _r, _g: left), arm("head", lambda _r, _g: right), FULL).klass
    two = pair_row(arm("base", lambda _r, _g: right), arm("head", lambda _r, _g: left), FULL).klass
    assert two == mirror.get(one, one)
    assert (one == "IDENTICAL") == (left == right != [])


# ---- batches -----------------------------------------------------------------------------------------------------


def batch(
    name: str, rows: Sequence[Sequence[int]], *, runs: int = 2, changed: tuple[int, int] = (-1, -1)
) -> ArmStreams:
    """An arm with three generations of these sequences; one of them, (generation, sequence), gives another id."""
    record = RunRecord(
        run_id=f"run_{name}",
        attempt_id="",
        attempt_number=1,
        exit_code=0,
        generations=tuple(
            _generation(g, [_turned(ids, other=(g, s) == changed) for s, ids in enumerate(rows)]) for g in range(3)
        ),
    )
    return streams_of(name, [record] * runs)


def _turned(ids: Sequence[int], *, other: bool) -> tuple[int, ...]:
    return (*ids[:2], 9, *ids[3:]) if other else tuple(ids)


def _generation(index: int, rows: Sequence[tuple[int, ...]]) -> Generation:
    first, *further = (SequenceTokens(ids=ids, stop_reason="length", gaps=(0.5,) * len(ids)) for ids in rows)
    tokens = first.model_dump()
    return Generation(index=index, warmup=False, **tokens, further=tuple(further))


ROWS = ((1, 2, 3, 4), (5, 6, 7, 8), (10, 11, 12, 13))


def test_sequences_are_compared_each_with_its_own() -> None:
    row = pair_row(batch("base", ROWS), batch("head", ROWS), FULL)
    assert (row.klass, row.compared, row.sequence) == ("IDENTICAL", 4 * 3 * 3 * 2, None)
    assert row.note == "3 generations of 3 sequences in each of 2 runs"
    swapped = pair_row(batch("base", ROWS), batch("head", (ROWS[0], ROWS[2], ROWS[1])), FULL)
    assert (swapped.klass, swapped.sequence) == ("VIOLATION", 1), "the same lists in other places are other tokens"


def test_field_39_a_difference_names_its_sequence() -> None:
    row = pair_row(batch("base", ROWS), batch("head", ROWS, changed=(0, 2)), FULL)
    assert (row.klass, row.generation, row.sequence, row.left_id, row.right_id) == ("VIOLATION", 0, 2, 12, 9)
    assert "generation 1 differs in sequence 3 of 3, 2, 3 are equal" in row.note
    assert "at index 2 of generation 1, sequence 3 (id 9 instead of 12)" in wording.difference(row)
    assert "in generation 1, sequence 3 at index 2" in divergence.build(row).sentence
    again = self_row(batch("head", ROWS, changed=(1, 2)))
    assert (again.klass, again.sequence) == ("VIOLATION", 2)
    assert (again.left, again.right) == ("head gen 1 seq 3", "head gen 2 seq 3")
    runs = arm_streams("head", (*batch("head", ROWS, runs=1).runs, *batch("head", ROWS, runs=1, changed=(2, 1)).runs))
    wavering = self_row(runs)
    assert wavering.klass == "NONDETERMINISTIC" and "disagree in generation 3, sequence 2" in wavering.note


def test_batches_of_two_sizes_share_their_first_sequences() -> None:
    row = pair_row(batch("base", ROWS[:1]), batch("head", ROWS), FULL)
    assert row.klass == "IDENTICAL" and row.compared == 4 * 3 * 2
    assert row.note == "3 generations in each of 2 runs; 2 sequences of one arm's batch had no other to compare with"
    worse = pair_row(batch("base", ROWS[:1]), batch("head", ROWS, changed=(0, 0)), FULL)
    assert (worse.klass, worse.sequence) == ("VIOLATION", 0)


def test_a_lock_is_about_the_first_sequence() -> None:
    lock = Lock(prompt="p", index=0, expected=1)
    assert broken_locks([lock], "p", batch("base", ROWS)) == []
    assert len(broken_locks([lock], "p", batch("base", ROWS[1:]))) == 1


def test_what_has_one_sequence_is_written_as_before_there_were_batches() -> None:
    one, two = (pair_row(batch("base", rows), batch("head", rows, changed=(0, 0)), FULL) for rows in (ROWS[:1], ROWS))
    assert "sequence" not in one.model_dump() and two.model_dump()["sequence"] == 0
    assert "further" not in _generation(0, [ROWS[0]]).model_dump()
