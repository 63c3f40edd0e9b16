"""Scripted cards, the NVML probe over a faked library, and the host-wide card lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cards import CardProcess, ProbeError
from orchestrator.lock import CardLock
from orchestrator.nvml import NvmlProbe
from orchestrator.scripted import ScriptedProbe, simulated_uuid


def test_a_script_changes_the_card_as_time_passes(tmp_path: Path) -> None:
    now = [10.0]
    script = tmp_path / "card.json"
    script.write_text(
        json.dumps([{"at_s": 2, "processes": [{"pid": 9, "used_bytes": 5}]}, {"at_s": 4, "error": "lost"}])
    )
    probe = ScriptedProbe(["SIM-a-0"], lambda: now[0], script)
    assert probe.snapshot("SIM-a-0").processes == ()
    now[0] = 12.5
    assert probe.snapshot("SIM-a-0").processes == (CardProcess(9, 5),)
    now[0] = 14.0
    assert probe.snapshot("SIM-a-0").used_bytes is None


def test_a_script_with_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ProbeError, match=r"state 0: unknown \['used'\].*used_bytes"):
        ScriptedProbe(["SIM-a-0"], lambda: 0.0, [{"used": 3}])


def test_simulated_uuids_are_stable_and_name_the_card() -> None:
    assert simulated_uuid("host", 1) == simulated_uuid("host", 1)
    assert simulated_uuid("host", 1) != simulated_uuid("host", 0)
    assert simulated_uuid("host", 3).startswith("SIM-")


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        told = {3: "Not Supported", 18: "RM has detected an NVML/RM version mismatch.", 999: "Unknown Error"}
        super().__init__(told[value])
        self.value = value


def fake_nvml(**changes: Any) -> Any:
    """The calls that the probe makes, as one idle card answers them."""

    def process(pid: int, used: int | None) -> Any:
        return SimpleNamespace(pid=pid, usedGpuMemory=used)

    def unsupported(*_: Any) -> Any:
        raise FakeError(3)

    calls: dict[str, Any] = {
        "NVMLError": FakeError,
        "NVML_ERROR_NOT_SUPPORTED": 3,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlMemory_v2": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda _i: "h",
        "nvmlDeviceGetHandleByUUID": lambda _u: "h",
        "nvmlDeviceGetUUID": lambda _h: "GPU-1",
        "nvmlDeviceGetName": lambda _h: "H200",
        "nvmlDeviceGetMemoryInfo": lambda _h, _v: SimpleNamespace(used=615 << 20, total=140 << 30),
        "nvmlDeviceGetComputeRunningProcesses_v3": lambda _h: [process(12, 5), process(13, None)],
        "nvmlDeviceGetGraphicsRunningProcesses_v3": lambda _h: [],
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": unsupported,
        "nvmlDeviceGetUtilizationRates": lambda _h: SimpleNamespace(gpu=3),
        "nvmlDeviceGetClockInfo": lambda _h, kind: {1: 345, 2: 3201}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda _h, _k: 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _h: 1,
        "nvmlDeviceGetTemperature": lambda _h, _s: 31,
        "nvmlDeviceGetPowerUsage": lambda _h: 75_000,
        "nvmlDeviceGetTotalEccErrors": lambda *_: 0,
        "nvmlDeviceGetRemappedRows": lambda _h: (0, 0, 0, 0),
        "nvmlDeviceGetMigMode": lambda _h: (0, 0),
        "nvmlDeviceGetPersistenceMode": lambda _h: 1,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda _h: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _h: 16,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _h: 6,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _h: 16,
    }
    return SimpleNamespace(**{**calls, **changes})


def probe_on(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> NvmlProbe:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**changes))
    return NvmlProbe(deadline_s=0.3)


def test_every_faked_call_exists_in_the_real_library() -> None:
    import pynvml

    assert [name for name in vars(fake_nvml()) if not hasattr(pynvml, name)] == []
    assert pynvml.NVML_ERROR_NOT_SUPPORTED == fake_nvml().NVML_ERROR_NOT_SUPPORTED


def test_nvml_reads_every_field_and_keeps_none_for_untold_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_on(monkeypatch)
    (card,) = probe.cards()
    snapshot = probe.snapshot(card.uuid)
    assert (card.uuid, card.name, card.driver) == ("GPU-1", "H200", "580.1")
    assert card.memory_bytes == snapshot.total_bytes != 0
    assert snapshot.processes == (CardProcess(12, 5), CardProcess(13, None))
    assert snapshot.used_bytes == 615 << 20
    assert (snapshot.mig_enabled, snapshot.remap_pending, snapshot.pcie_width) == (False, False, 16)
    assert (snapshot.pcie_generation, snapshot.max_pcie_generation, snapshot.max_pcie_width) == (5, 6, 16)
    assert not snapshot.errors
    probe.close()


def test_field_13_all_ones_memory_is_unknown_not_sixteen_exbibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_on(
        monkeypatch, nvmlDeviceGetMemoryInfo=lambda _h, _v: SimpleNamespace(used=2**64 - 1, total=2**64 - 1)
    )
    assert probe.snapshot("GPU-1").used_bytes is None


def test_an_unreadable_value_leaves_the_others_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise FakeError(999)

    def unsupported(*_: Any) -> Any:
        raise FakeError(3)

    probe = probe_on(monkeypatch, nvmlDeviceGetPowerUsage=broken, nvmlDeviceGetTotalEccErrors=unsupported)
    snapshot = probe.snapshot("GPU-1")
    assert snapshot.power_mw is None
    assert snapshot.errors == (("power_mw", "Unknown Error"),)
    assert snapshot.unsupported == {"ecc_uncorrected"}
    assert snapshot.temperature_c == 31


def test_a_hanging_call_costs_one_deadline_and_makes_the_rest_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    probe = probe_on(monkeypatch, nvmlDeviceGetUtilizationRates=lambda _h: release.wait(5))
    begin_s = time.monotonic()
    snapshot = probe.snapshot("GPU-1")
    assert time.monotonic() - begin_s < 1.0
    assert snapshot.used_bytes is not None
    assert snapshot.utilisation_percent is None
    assert "has not come back" in dict(snapshot.errors)["power_mw"]
    release.set()


def test_field_15_a_driver_upgraded_under_its_jobs_is_said_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def upgraded() -> None:
        raise FakeError(18)

    with pytest.raises(ProbeError, match=r"NVML/RM version mismatch.*driver installed and matching"):
        probe_on(monkeypatch, nvmlInit=upgraded)


PROBES = """
import importlib, pkgutil, sys, time
import orchestrator
for found in pkgutil.walk_packages(orchestrator.__path__, "orchestrator."):
    importlib.import_module(found.name)
from tests.unit.test_orchestrator_cards import fake_nvml
sys.modules["pynvml"] = fake_nvml(nvmlDeviceGetComputeRunningProcesses_v3=lambda _h: [])
from orchestrator.clear import ClearPolicy
from orchestrator.nvml import NvmlProbe
from orchestrator.watch import CardWatch, WatchBook
probe = NvmlProbe()
(card,) = probe.cards()
book = WatchBook(ClearPolicy(), simulated=False)
watch = CardWatch(probe, card.uuid, book, time.monotonic, tell=lambda _pids: (frozenset(), None))
watch.start()
time.sleep(0.5)
assert watch.stop().samples
mapped = open("/proc/self/maps").read()
loaded = {name.split(".")[0] for name in sys.modules} & {"cuda", "cupy", "cupyx", "torch"}
print(*loaded, *["libcuda"] * ("libcuda" in mapped))
"""


def test_field_10_looking_at_cards_loads_nothing_of_cuda(checkout: Path) -> None:
    """Driver and worker import all of the orchestrator, list cards and watch one: NVML alone, and no context."""
    done = subprocess.run([sys.executable, "-c", PROBES], cwd=checkout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_no_driver_is_a_probe_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise FakeError(999)

    with pytest.raises(ProbeError, match=r"driver installed"):
        probe_on(monkeypatch, nvmlInit=absent)


def test_a_held_card_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    first = CardLock("GPU-1", "assay run first", tmp_path)
    first.acquire()
    with pytest.raises(ProbeError, match=rf"GPU-1 is held by process {os.getpid()} \(assay run first\)"):
        CardLock("GPU-1", "second", tmp_path).acquire(wait_s=0.1)
    CardLock("GPU-2", "second", tmp_path).acquire(wait_s=0.1)
    first.release()
    CardLock("GPU-1", "second", tmp_path).acquire(wait_s=0.1)


@pytest.mark.parametrize("name", ["GPU-1.lock", "GPU-1.holder"])
def test_a_lock_follows_no_link_that_another_user_left(tmp_path: Path, name: str) -> None:
    folder, precious = tmp_path / "locks", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine")
    (folder / name).symlink_to(precious)
    with pytest.raises(ProbeError, match="is a link"):
        CardLock("GPU-1", "victim", folder).acquire(wait_s=0.1)
    assert precious.read_text() == "mine"


def test_a_folder_of_locks_that_leads_elsewhere_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (tmp_path / "locks").symlink_to(home)
    with pytest.raises(ProbeError, match="card locks cannot lie in"):
        CardLock("GPU-1", "victim", tmp_path / "locks").acquire(wait_s=0.1)
    assert (home.stat().st_mode & 0o777, list(home.iterdir())) == (0o700, [])


def test_a_killed_holder_frees_its_card(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from orchestrator.lock import CardLock\n"
        "lock = CardLock('GPU-1', 'doomed', Path(sys.argv[1])); lock.acquire()\n"
        "print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    lock = CardLock("GPU-1", "next", tmp_path)
    with pytest.raises(ProbeError, match=rf"process {child.pid}"):
        lock.acquire(wait_s=0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    lock.acquire(wait_s=1.0)
    lock.release()
