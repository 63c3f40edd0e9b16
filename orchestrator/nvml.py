"""Cards as NVML shows them: the only module that reads pynvml.

Every call runs on one daemon thread with a deadline, since NVML is known to hang after a card fell off the bus; a call
that does not come back marks the probe as stuck, and all later values are unknown. Probing makes no CUDA context.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from orchestrator.cards import CardName, CardProcess, CardSnapshot, ProbeError, ProcessKind

CALL_DEADLINE_S = 2.0
T = TypeVar("T")


class NvmlProbe:
    """A `CardProbe` on NVML. Raises ProbeError when there is no driver or it does not answer."""

    def __init__(self, deadline_s: float = CALL_DEADLINE_S) -> None:
        import pynvml

        self._nv: Any = pynvml
        self._timed = TimedCaller(deadline_s)
        try:
            self._timed.call("nvmlInit", pynvml.nvmlInit)
        except (pynvml.NVMLError, TimeoutError) as exc:
            raise ProbeError(f"NVML cannot be started: {exc}", "is an NVIDIA driver installed and matching?") from exc

    def cards(self) -> tuple[CardName, ...]:
        """All cards in NVML's order, which is PCI order."""
        nv = self._nv

        def read() -> tuple[CardName, ...]:
            driver = str(nv.nvmlSystemGetDriverVersion())
            handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount())]
            return tuple(
                CardName(
                    str(nv.nvmlDeviceGetUUID(h)),
                    str(nv.nvmlDeviceGetName(h)),
                    driver,
                    i,
                    memory_bytes=_all_memory_bytes(nv, h),
                )
                for i, h in enumerate(handles)
            )

        try:
            return self._timed.call("cards", read)
        except (nv.NVMLError, TimeoutError) as exc:
            raise ProbeError(f"cards cannot be listed: {exc}", "check nvidia-smi -L") from exc

    def snapshot(self, uuid: str) -> CardSnapshot:
        """The card now; each value read under its own deadline."""
        nv = self._nv
        try:
            handle = self._timed.call("handle", lambda: nv.nvmlDeviceGetHandleByUUID(uuid))
        except nv.NVMLError as exc:
            raise ProbeError(f"card {uuid} cannot be found: {exc}", "check nvidia-smi -L") from exc
        except TimeoutError as exc:
            return CardSnapshot(uuid, errors=(("handle", str(exc)),))
        values: dict[str, Any] = {}
        unsupported: set[str] = set()
        errors: list[tuple[str, str]] = []
        for names, read in _reads(nv, handle):
            try:
                values.update(zip(names, self._timed.call(names[0], read), strict=True))
            except nv.NVMLError as exc:
                if exc.value == nv.NVML_ERROR_NOT_SUPPORTED:
                    unsupported.update(names)
                else:
                    errors.extend((name, str(exc)) for name in names)
            except (TimeoutError, AttributeError) as exc:  # AttributeError: a pynvml without that call
                errors.extend((name, str(exc)) for name in names)
        return CardSnapshot(uuid, **values, unsupported=frozenset(unsupported), errors=tuple(errors))

    def close(self) -> None:
        """Shut NVML down in this process."""
        if not self._timed.stuck:
            self._timed.call("nvmlShutdown", self._nv.nvmlShutdown)
        self._timed.stop()


class TimedCaller:
    """Runs calls one after another on a daemon thread; a call over its deadline raises TimeoutError from then on."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self.stuck: str | None = None
        threading.Thread(target=self._serve, name="card-probe", daemon=True).start()

    def call(self, name: str, function: Callable[[], T]) -> T:
        """Return what `function` returns or raise what it raises, within the deadline."""
        if self.stuck:
            raise TimeoutError(f"{self.stuck} has not come back")
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._todo.put((function, answer))
        try:
            good, value = answer.get(timeout=self._deadline_s)
        except queue.Empty:
            self.stuck = name
            raise TimeoutError(f"{name} took longer than {self._deadline_s:g} s") from None
        if not good:
            raise value
        result: T = value
        return result

    def stop(self) -> None:
        """Let the thread end after the calls in hand."""
        self._todo.put(None)

    def _serve(self) -> None:
        while (item := self._todo.get()) is not None:
            function, answer = item
            try:
                answer.put((True, function()))
            except BaseException as exc:  # noqa: BLE001 - the thread's edge: the caller raises it
                answer.put((False, exc))


def _reads(nv: Any, handle: Any) -> list[tuple[tuple[str, ...], Callable[[], tuple[Any, ...]]]]:
    """(fields, call giving their values): fields read by one call stand or fall together."""
    return [
        (("used_bytes", "total_bytes"), lambda: _memory(nv, handle)),
        (("processes",), lambda: (_processes(nv, handle),)),
        (("utilisation_percent",), lambda: (int(nv.nvmlDeviceGetUtilizationRates(handle).gpu),)),
        (("sm_clock_mhz",), lambda: (int(nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)),)),
        (("memory_clock_mhz",), lambda: (int(nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_MEM)),)),
        (("max_sm_clock_mhz",), lambda: (int(nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM)),)),
        (("throttle_bits",), lambda: (_throttle_bits(nv, handle),)),
        (("temperature_c",), lambda: (int(nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)),)),
        (("power_mw",), lambda: (int(nv.nvmlDeviceGetPowerUsage(handle)),)),
        (("ecc_uncorrected",), lambda: (_ecc(nv, handle),)),
        (("remap_pending", "remap_failed"), lambda: _remaps(nv, handle)),
        (("mig_enabled",), lambda: (nv.nvmlDeviceGetMigMode(handle)[0] == nv.NVML_DEVICE_MIG_ENABLE,)),
        (("persistence",), lambda: (bool(nv.nvmlDeviceGetPersistenceMode(handle)),)),
        (("pcie_generation",), lambda: (int(nv.nvmlDeviceGetCurrPcieLinkGeneration(handle)),)),
        (("pcie_width",), lambda: (int(nv.nvmlDeviceGetCurrPcieLinkWidth(handle)),)),
        (("max_pcie_generation",), lambda: (int(nv.nvmlDeviceGetMaxPcieLinkGeneration(handle)),)),
        (("max_pcie_width",), lambda: (int(nv.nvmlDeviceGetMaxPcieLinkWidth(handle)),)),
    ]


def _all_memory_bytes(nv: Any, handle: Any) -> int:
    """Total bytes; 0 where a card does not tell, which keeps it from no sweep that asks for none."""
    try:
        return _memory(nv, handle)[1] or 0
    except nv.NVMLError:
        return 0


def _memory(nv: Any, handle: Any) -> tuple[int | None, int | None]:
    """Used and total bytes; v2 keeps what the driver reserves apart where it can, and all-ones means not told."""
    info = nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2)
    return _told(info.used), _told(info.total)


def _told(value: int) -> int | None:
    return None if value >= 2**63 else int(value)


def _processes(nv: Any, handle: Any) -> tuple[CardProcess, ...]:
    """Compute, graphics and MPS processes. One list that cannot be read makes the whole unreadable."""
    lists: list[tuple[ProcessKind, Callable[[Any], Any]]] = [
        ("compute", nv.nvmlDeviceGetComputeRunningProcesses_v3),
        ("graphics", nv.nvmlDeviceGetGraphicsRunningProcesses_v3),
        ("mps", nv.nvmlDeviceGetMPSComputeRunningProcesses_v3),
    ]
    found: dict[int, CardProcess] = {}
    for kind, read in lists:
        try:
            rows = read(handle)
        except nv.NVMLError as exc:
            if kind != "compute" and exc.value == nv.NVML_ERROR_NOT_SUPPORTED:
                continue
            raise
        for row in rows:
            used = None if row.usedGpuMemory is None else _told(row.usedGpuMemory)
            found.setdefault(int(row.pid), CardProcess(int(row.pid), used, kind))
    return tuple(found.values())


def _throttle_bits(nv: Any, handle: Any) -> int:
    read = getattr(nv, "nvmlDeviceGetCurrentClocksEventReasons", None) or nv.nvmlDeviceGetCurrentClocksThrottleReasons
    return int(read(handle))


def _ecc(nv: Any, handle: Any) -> int:
    """Uncorrected errors since the driver was loaded."""
    return int(nv.nvmlDeviceGetTotalEccErrors(handle, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC))


def _remaps(nv: Any, handle: Any) -> tuple[bool, bool]:
    _, _, pending, failed = nv.nvmlDeviceGetRemappedRows(handle)
    return bool(pending), bool(failed)
