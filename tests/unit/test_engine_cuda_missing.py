"""Asking for the card where it cannot be had: one clear line, never a traceback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from engine import run as engine_run
from engine.device import cuda_card, cuda_driver
from engine.device.cuda_driver import call
from engine.errors import BadRequest, DeviceFailure, OutOfMemory
from tests.unit.engine_rig import build_tiny, run


class Code(int):
    """A driver's code with its name."""

    name = "CUDA_ERROR_NOT_MAPPED"


class Full(int):
    """Out of memory, by name."""

    name = "CUDA_ERROR_OUT_OF_MEMORY"


def cu_mem_unmap(*_: object) -> tuple[Code]:
    return (Code(211),)


def test_a_failed_call_is_named_with_its_code() -> None:
    with pytest.raises(DeviceFailure, match="cu_mem_unmap failed: CUDA_ERROR_NOT_MAPPED"):
        call(cu_mem_unmap, 1, 2)


def test_a_full_card_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        call(lambda: (Full(2),))


def test_what_a_call_returns_stands_behind_its_code() -> None:
    ok = SimpleNamespace(__int__=lambda: 0)
    assert call(lambda: (0,)) == ()
    assert call(lambda a: (0, a), 7) == 7
    assert call(lambda: (0, 1, ok))[0] == 1


def test_without_cuda_python_the_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    outcome = run(build_tiny(tmp_path), device="cuda")
    assert outcome.code == 10
    assert outcome.error["message"].startswith("device cuda needs cuda-python, which is missing")
    assert "--device sim" in outcome.error["remedy"]


def test_without_a_driver_the_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ModuleType("driver")

    def cuInit(_: int) -> tuple[int]:  # noqa: N802 - the driver's name
        raise RuntimeError("Failure finding libcuda.so\nand more")

    driver.cuInit = cuInit  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda_card, "bindings", lambda: (driver, driver))
    cuda_card._start.cache_clear()
    outcome = run(build_tiny(tmp_path), device="cuda")
    assert (outcome.code, outcome.error["message"]) == (
        10,
        "device cuda: cuInit: Failure finding libcuda.so",
    )


@pytest.mark.parametrize(("uuid", "installed"), [("SIM-7", True), (None, False)])
def test_auto_is_the_simulator_for_its_cards_and_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uuid: str | None, *, installed: bool
) -> None:
    monkeypatch.setattr(engine_run, "cards_can_be_called", lambda: installed)
    outcome = run(build_tiny(tmp_path), device="auto", tokens=2, **({} if uuid is None else {"uuid": uuid}))
    assert outcome.code == 0
    told = outcome.lines.of("hello")[0]["device"]
    assert (told["kind"], told["uuid"]) == ("sim", uuid or "SIM-0")


def test_auto_with_a_cards_uuid_is_never_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    outcome = run(build_tiny(tmp_path), device="auto", uuid="GPU-1")
    assert outcome.code == 10 and "cuda-python" in outcome.error["message"]


def test_bindings_are_looked_for_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BadRequest):
        cuda_driver.bindings()
