"""Two runs side by side: everything that differs, where the tokens part, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.model import Missing
from jobs.store import Store
from jobs.two_runs import TwoRuns, compare
from reports.two_runs import render
from tests.unit.store_sweeps import Clock, manifest
from tests.unit.stored_documents import put


def both(documents: Any, clock: Clock, folder: Path, head: Any, left: str = "base", right: str = "head") -> TwoRuns:
    """Base's first run and head's in the same block."""
    with Store.open(f"sqlite:///{folder / 'store.sqlite'}", clock) as store:
        sweep_id = put(store, documents.sweep(head=head))
        runs = {run.arm: run.run_id for cell in store.judge_input(sweep_id).cells for run in cell.runs}
        return compare(store.run(runs[left]), store.run(runs[right]))


def test_counters_settings_and_times_stand_side_by_side(documents: Any, tmp_path: Path) -> None:
    pair = both(documents, Clock(), tmp_path, documents.stable_arm(step_ns=lambda _block, _run: 30_000_000))
    assert pair.cannot == ()
    assert {row.name for row in pair.settings if not row.same} == {"policy"}
    (policy,) = (row for row in pair.settings if row.name == "policy")
    assert (policy.left, policy.right) == ("lru", "stable")
    assert {row.name for row in pair.facts if not row.same} == {"arm", "block and place"}
    rows = {row.name: row for row in (*pair.exact, *pair.times)}
    assert rows["htod_bytes"].delta == rows["htod_bytes"].right - rows["htod_bytes"].left < 0  # type: ignore[operator]
    assert (rows["decode_ms_per_token"].left, rows["decode_ms_per_token"].delta) == (20.0, 10.0)
    assert "decode_ms_per_token" in {row.name for row in pair.times} and "hits" in {row.name for row in pair.exact}
    assert pair.tokens and all(row.same for row in pair.tokens)
    text = render(pair)
    assert "20.00 ms/token" in text and "+10.00 ms/token (+50.0 %)" in text
    assert "Nothing stands against comparing them" in text


def test_the_first_divergence_is_told_with_its_context_and_what_follows_from_it(documents: Any, tmp_path: Path) -> None:
    ids = documents.IDS

    def parts(_run: int, generation: int) -> tuple[int, ...]:
        return (*ids[:19], 46283, *ids[20:]) if generation == 1 else ids

    pair = both(documents, Clock(), tmp_path, documents.stable_arm(ids=parts))
    (row,) = (row for row in pair.tokens if not row.same)
    assert (row.generation, row.first, row.context_from) == (1, 19, 15)
    assert row.left_context == ids[15:23]
    assert row.right_context == (*ids[15:19], 46283, *ids[20:23])
    assert pair.cannot == ("counters and times: the tokens differ, so from the first difference on the work does",)
    assert "generation 2, sequence 1: they part at index 19" in render(pair)
    assert f"{' '.join(map(str, ids[15:23]))} | " in " ".join(render(pair).split())


def test_equal_ids_with_another_end_differ(documents: Any, tmp_path: Path) -> None:
    pair = both(documents, Clock(), tmp_path, documents.stable_arm(stop=lambda _run, _generation: "eos"))
    assert all(row.first is None and not row.same for row in pair.tokens)
    assert "equal ids, other ends: left 32 ids, length; right 32 ids, eos" in render(pair)


def test_another_card_model_and_driver_are_named_and_a_missing_reading_is_no_zero(
    documents: Any, tmp_path: Path
) -> None:
    device = {"uuid": "SIM-9", "driver": "sim 2"}
    head = documents.stable_arm(
        device=device, record={"model_digest": "f" * 64}, changes={"hits": Missing(missing="lost")}
    )
    pair = both(documents, Clock(), tmp_path, head)
    assert "tokens, counters and times: the models differ, or one is unknown" in pair.cannot
    assert "times: the card is SIM-0 and SIM-9" in pair.cannot
    assert [why for why in pair.cannot if why.startswith("times: the driver is ")]
    hits = next(row for row in pair.exact if row.name == "hits")
    assert (hits.right, hits.delta) == (Missing(missing="lost"), Missing(missing="one side has no reading"))
    assert pair.written()["schema"] == "assay.two-runs/1"


def test_runs_of_two_sweeps_and_one_that_measured_nothing(documents: Any, tmp_path: Path) -> None:
    clock = Clock()
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite'}", clock) as store:
        measured = store.judge_input(put(store, documents.sweep())).cells[0].runs
        pending = store.judge_input(store.submit(manifest("other"), "g" * 64, "0.1")).cells[0].runs[0]
        pair = compare(store.run(measured[0].run_id), store.run(pending.run_id))
        assert pair.cannot == (f"run {pending.run_id} is pending and measured nothing: it was never tried",)
        assert (pair.tokens, pair.exact, pair.times) == ((), (), ())
        assert {"sweep", "harness digest", "cell"} <= {row.name for row in pair.facts if not row.same}
        assert "None to compare." in render(pair)
        later = store.run(measured[-1].run_id)
        assert later.fact == measured[-1]
        again = put(store, documents.sweep(), key="again")
        store.retract(measured[0].run_id, "the fan was blocked", "Ada")
        told = compare(store.run(measured[0].run_id), store.run(store.judge_input(again).cells[0].runs[0].run_id))
        assert told.cannot == (
            f"run {measured[0].run_id} is retracted, so nothing of it counts: the fan was blocked",
            "times: the runs are of two blocks, so that what drifts between them is not balanced",
        )


def test_secrets_in_an_environment_are_not_shown(documents: Any, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.sqlite'}", Clock()) as store:
        doc = documents.sweep()
        env = {"HF_TOKEN": "hf_abcdefghijklmnopqrstuv", "PLAIN": "word"}
        arms = tuple(arm.model_copy(update={"env": env}) for arm in doc.manifest.arms)
        doc = doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"arms": arms})})
        runs = store.judge_input(put(store, doc)).cells[0].runs
        text = render(compare(store.run(runs[0].run_id), store.run(runs[1].run_id)))
    assert "hf_abc" not in text and "env PLAIN word" in " ".join(text.split())
