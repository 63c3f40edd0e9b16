"""A series over sweeps: what belongs to it, where it breaks, and where its level changed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jobs.errors import SpecError
from jobs.history import FEWEST_TIMES, breaks_of, changes_of, points_of
from jobs.model import Missing, Reading
from jobs.store import Store
from reports.history import render
from tests.unit.history_readings import readings
from tests.unit.store_sweeps import Clock
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)

TIME, COUNTER = "decode_ms_per_token", "htod_bytes"


def noisy(count: int, seed: int, step: float = 0.0) -> list[Reading]:
    draw = random.Random(seed)
    return [draw.gauss(20, 0.2) + (step if place >= count // 2 else 0) for place in range(count)]


def test_every_other_value_of_an_exact_counter_is_a_change_with_what_changed_beside_it() -> None:
    points = points_of(readings([7, 7, 9, 9, 9, 7], engine={2: "e2"}, driver={2: "560", 5: "570"}))
    changes, note = changes_of(COUNTER, points)
    assert note == ""
    assert [(one.index, one.before, one.after) for one in changes] == [(2, 7, 9), (5, 9, 7)]
    assert changes[0].beside == ("engine e1 -> e2", "driver 550 -> 560")
    assert breaks_of(points) == ((2, "driver 550 -> 560"), (5, "driver 560 -> 570"))
    assert changes_of(COUNTER, points[:1]) == ((), "")


def test_a_step_of_a_time_is_found_where_it_is_and_noise_alone_is_none() -> None:
    for count in (FEWEST_TIMES, 30):
        clean = [len(changes_of(TIME, points_of(readings(noisy(count, seed))))[0]) for seed in range(25)]
        assert sum(map(bool, clean)) <= 3, (count, clean)
        found = [changes_of(TIME, points_of(readings(noisy(count, seed, 1.2))))[0] for seed in range(25)]
        hit = [changes for changes in found if any(abs(one.index - count // 2) <= 1 for one in changes)]
        assert len(hit) >= 23, (count, len(hit))
    (change,) = changes_of(TIME, points_of(readings(noisy(30, 1, 1.2))))[0]
    assert change.index == 15
    assert change.before == pytest.approx(20, abs=0.2)
    assert change.after == pytest.approx(21.2, abs=0.2)


def test_an_outlier_is_no_change_of_level_and_few_times_are_not_looked_at() -> None:
    values = noisy(30, 3)
    values[11] = 23.0
    assert changes_of(TIME, points_of(readings(values)))[0] == ()
    changes, note = changes_of(TIME, points_of(readings([20.0, 30.0, 20.0])))
    assert changes == () and note == "too few points to seek changes of a time: 3 of the 8 it takes"
    assert [one.index for one in changes_of(TIME, points_of(readings([20.0] * 5 + [21.0] * 5)))[0]] == [5]


def test_missing_and_retracted_points_are_shown_and_count_for_nothing() -> None:
    rows = readings([7, Missing(missing="no ring"), 9, 7, 7])
    rows[2] = rows[2]._replace(retracted="the fan was blocked")
    points = points_of(rows)
    assert changes_of(COUNTER, points) == ((), "")
    assert changes_of(COUNTER, points[1:3]) == ((), ""), "none that counts"
    assert points[1].value == Missing(missing="no ring")
    assert (points[2].value, points[2].struck) == (9, "the fan was blocked")


def test_a_point_is_the_median_of_the_runs_of_its_arm_that_count() -> None:
    (one,) = readings([5])
    rows = [one, one._replace(value=6), one._replace(value=8), one._replace(value=99, retracted="why")]
    (point,) = points_of(rows)
    assert (point.value, point.low, point.high, point.runs, point.struck) == (6, 5, 8, 3, "")
    assert [point.arm for point in points_of([*rows, one._replace(arm="base")])] == ["head", "base"]


def test_series_are_found_by_name_scenario_arm_and_id(store: Store, clock: Clock, documents: Any) -> None:
    sweeps = []
    for day, hits in enumerate((100, 100, 140)):
        clock.pass_s(86_400)
        head = documents.stable_arm(changes={"hits": hits}, device={"driver": f"sim {1 + day // 2}"})
        sweeps.append(put(store, documents.sweep(head=head), key=str(day)))
    store.retract(store.judge_input(sweeps[0]).cells[0].runs[0].run_id, "the fan was blocked", "Ada")
    (found,) = store.histories("hits", cell="capital", arm="head")
    assert [(point.sweep, point.value, point.runs) for point in found.points] == [
        (sweep, hits, 2) for sweep, hits in zip(sweeps, (100, 100, 140), strict=True)
    ]
    assert [(one.index, one.before, one.after, one.beside) for one in found.changes] == [
        (2, 100, 140, ("driver sim 1 -> sim 2",))
    ]
    assert (found.family, found.name, found.written()["schema"]) == ("counter", "hits", "assay.history/1")
    (same,) = store.histories(found.series[:20])
    assert same == found
    (newest,) = store.histories("hits", arm="head", last=1)
    assert [point.sweep for point in newest.points] == sweeps[2:]
    assert len(store.histories("hits")) == 2, "base's config is another series"
    text = render(found)
    assert "CHANGE 100 -> 140, +40 (+40.0 %); driver sim 1 -> sim 2" in " ".join(text.split())
    with pytest.raises(SpecError, match="nothing in this store has measured hitz of arm head"):
        store.histories("hitz", arm="head")
