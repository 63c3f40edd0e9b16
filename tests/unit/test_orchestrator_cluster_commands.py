"""`submit`, `status`, `watch`, `cancel`, `rerun`, `ingest` and `cards` on a store: what is said, kept, exited with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.store import CardSeen, Store
from orchestrator.cli import call
from orchestrator.lost import HostLost
from orchestrator.ray_cluster import _require_listener
from tests.unit.orchestrator_field import Field

SWEEP = """\
sweep: small
models:
  tiny: {build: tiny, seed: 7}
prompts:
  short: {ids: [1, 2, 3, 4]}
arms:
  base: {source: installed, config: {policy: lru}}
  head: {source: installed, config: {policy: stable}}
varies: [policy]
run: {tokens: 4, generations: 1}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a sweep file, an empty store and caches of its own."""
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("USER", "mia")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SWEEP)
    assert call(["db", "upgrade", "--store", "s.db"]) == 0
    return tmp_path


def opened(here: Path) -> Store:
    return Store.open(f"sqlite:///{here / 's.db'}", lambda: datetime.now(UTC))


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert call([*words, "--store", "s.db"]) == code
    told = capsys.readouterr()
    return told.out + told.err


def test_a_sweep_goes_from_submission_to_cancel_and_is_rerun(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, "submit", "small.yaml", "--key", "ci-1", "--json")
    first = json.loads(told[told.index("{") : told.rindex("}") + 1])
    sweep_id = first["sweep"]
    assert (first["runs"], first["pending"]) == (4, 4)
    assert sweep_id in said(capsys, "submit", "small.yaml", "--key", "ci-1")
    with opened(here) as store:
        assert [row.id for row in store.sweeps()] == [sweep_id]
    told = said(capsys, "status", sweep_id)
    assert "4 pending" in told
    assert f"waits: {sweep_id} tiny/short, block 0: no scheduler serves this store" in told
    assert "no scheduler serves this store" in said(capsys, "watch", "--once")
    told = said(capsys, "cancel", sweep_id, "--reason", "wrong branch")
    assert "4 runs given up, 0 stay" in told
    assert said(capsys, "gate", sweep_id, code=3)
    with opened(here) as store:
        assert store.sweep(sweep_id).state == "judged"
        ended = {e.message for e in store.events(sweep_id) if e.target == "exhausted"}
        assert ended == {"cancelled by mia: wrong branch"}
    assert "is judged already" in said(capsys, "cancel", sweep_id, code=2)
    again = json.loads(said(capsys, "rerun", sweep_id, "--key", "again", "--json"))
    assert (again["pending"], again["sweep"] != sweep_id) == (4, True)
    assert json.loads(said(capsys, "rerun", sweep_id, "--key", "again", "--json"))["sweep"] == again["sweep"]
    with opened(here) as store:
        new, old = store.sweep(again["sweep"]), store.sweep(sweep_id)
        assert (new.manifest_digest, new.request, new.state) == (old.manifest_digest, old.request + 1, "open")
        assert [e.message for e in store.events(new.id) if e.kind == "rerun"] == [f"of {old.id}"]


def test_a_nightly_sweep_waits_behind_a_gate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "submit", "small.yaml", "--priority", "nightly")
    said(capsys, "submit", "small.yaml")
    with opened(here) as store:
        seen = CardSeen(uuid="GPU-a", name="H200", host="h", worker="w", state="busy", reason="pid 7 holds 9 GiB")
        store.put_cards([seen], "h/1")
    waiting = [line for line in said(capsys, "watch", "--once").splitlines() if "waits:" in line]
    assert len(waiting) == 2
    assert all("GPU-a busy: pid 7 holds 9 GiB" in line for line in waiting)
    status = json.loads(said(capsys, "status", "--json"))
    assert [row["priority"] for row in status] == ["pr", "nightly"]
    told = said(capsys, "cards")
    assert all(word in told for word in ("GPU-a", "busy", "pid 7 holds 9 GiB", "UTC"))


def test_field_7_a_sweep_that_no_served_card_could_take_is_refused_at_submit(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (here / "small.yaml").read_text()
    (here / "large.yaml").write_text(text + "\ncards: {class: H200, memory_bytes: 200_000_000_000}\n")
    with opened(here) as store:
        seen = CardSeen(uuid="GPU-a", name="H200", host="h", worker="w", state="clear", memory_bytes=150_754_820_096)
        store.put_cards([seen], "h/1")
    told = said(capsys, "submit", "large.yaml", code=2)
    assert "of class 'H200' with 200,000,000,000 bytes or more" in told
    assert "H200 (150,754,820,096 bytes)" in told
    with opened(here) as store:
        assert store.sweeps() == ()
    said(capsys, "submit", "small.yaml")
    assert "140.4 GiB" in said(capsys, "cards")


def test_what_cannot_be_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give pr or nightly" in said(capsys, "submit", "small.yaml", "--priority", "soon", code=2)
    assert "is no spool" in said(capsys, "ingest", "nothing", code=2)
    assert "no scheduler has served this store yet" in said(capsys, "cards")
    assert call(["submit", "small.yaml", "--store", "none.db"]) == 4
    assert "create it: assay db upgrade" in capsys.readouterr().err
    assert call(["submit", "small.yaml"]) == 2, "where to is never guessed"
    capsys.readouterr()


def test_watch_ends_when_nothing_is_open(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "submit", "small.yaml")
    with opened(here) as store:
        sweep_id = store.sweeps()[0].id
    said(capsys, "cancel", sweep_id)
    told = said(capsys, "watch", sweep_id)
    assert "4/4 runs, judged: " in told


def test_a_spool_is_stored_once_however_often_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    field = Field(tmp_path)
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    field.spool_one(sweep_id, manifest)
    shutil.copytree(field.works.spool, tmp_path / "copy")
    for spool in ("spool", "copy", "copy"):
        assert call(["ingest", spool, "--store", "store.db"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == ["1 outcomes of 1 sweeps are stored", "1 outcomes of 1 sweeps are stored",
                    "0 outcomes of 0 sweeps are stored"]  # fmt: skip
    assert field.attempts(sweep_id)["base"] == [("measured", "")]


def _interrupted(_seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_waiting_and_says_that_the_sweep_stays(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", _interrupted)
    told = said(capsys, "submit", "small.yaml", "--wait", code=130)
    with opened(here) as store:
        (row,) = store.sweeps()
    assert row.state == "open"
    assert "the sweep stays submitted" in told
    assert f"assay cancel {row.id} --store s.db" in told
    assert "nothing was begun" not in told
    told = said(capsys, "watch", row.id, code=130)
    assert row.id in told
    assert "nothing was begun" not in told


def test_a_spool_of_several_stores_gives_up_all_that_is_this_ones_and_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep of another store, an outcome that cannot be read: neither keeps a later sweep's outcome out."""
    monkeypatch.chdir(tmp_path)
    field = Field(tmp_path)
    torn, manifest = field.submit({"base": {}, "head": {}}, name="torn")
    attempt, _ = field.spool_one(torn, manifest)
    (field.works.spool / torn / f"{attempt}.json").write_text("{cut off")
    whole, manifest = field.submit({"base": {}, "head": {}}, name="whole")
    field.spool_one(whole, manifest)
    foreign = "swp_00000000000000000000000000"
    shutil.copytree(field.works.spool / whole, field.works.spool / foreign)
    assert call(["ingest", "spool", "--store", "store.db"]) == 2
    told = capsys.readouterr()
    assert told.out == "1 outcomes of 2 sweeps are stored\n"
    absent, unread = told.err.splitlines()
    assert absent.startswith(f"error: sweep {foreign}: no id begins with")
    assert unread.startswith(f"error: sweep {torn}: the outcome of {attempt} cannot be read (it is kept in ")
    assert field.attempts(whole)["base"] == [("measured", "")]
    shutil.rmtree(field.works.spool / foreign)
    (field.works.spool / torn).mkdir()
    (field.works.spool / torn / f"{attempt}.json").write_text("[]")
    assert call(["ingest", "spool", "--store", "store.db", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["outcomes"] == 0 and len(document["faults"]) == 1


def test_a_store_that_is_removed_while_its_verdict_is_waited_for_does_not_come_back_empty(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: (here / "s.db").unlink(missing_ok=True))
    told = said(capsys, "submit", "small.yaml", "--wait", code=4)
    assert "s.db was removed, replaced or changed while in use" in told
    assert not (here / "s.db").exists()


WAITS = """\
import sys
from orchestrator.cli import main
sys.argv = ["assay", *{words!r}]
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_waiting_with_the_same_words(here: Path, number: int, code: int) -> None:
    words = ["submit", "small.yaml", "--wait", "--store", "s.db"]
    hears = "import signal as s; s.signal(s.SIGINT, s.default_int_handler)\n"  # ignored in a shell's background
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", hears + WAITS.format(words=words)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while "waiting for its verdict" not in (line := process.stderr.readline()):
        assert line, process.wait()
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == code
    assert "the sweep stays submitted" in told and "Traceback" not in told


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999999"])
def test_an_address_that_nobody_listens_at_is_refused_with_the_remedy(address: str) -> None:
    with pytest.raises(HostLost, match=f"{address}.*ray start --head"):
        _require_listener(address)


def test_a_port_in_digits_that_are_no_number_is_left_to_ray() -> None:
    _require_listener("127.0.0.1:²")
