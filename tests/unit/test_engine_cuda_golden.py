"""Exporter-written models on the real card: the same goldens, the same rules, as on the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.plan import TARGETS
from tests.unit import engine_rig
from tests.unit import test_engine_golden as golden
from tests.unit.test_engine_golden import EXPERTS, FORMS, OWN, samples

__all__ = ["samples"]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=TARGETS)
def on_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches stand on the card, with its own granule, and plan for each target."""
    from engine.device.cuda import CudaDevice

    def device(granule_bytes: int | None = None) -> Any:
        return CudaDevice()

    monkeypatch.setattr(engine_rig, "SimDevice", device)
    monkeypatch.setattr(engine_rig, "TARGET", request.param)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OWN)
def test_a_prompt_in_one_call_and_forced_ids(samples: Path, name: str, form: str) -> None:
    golden.test_every_row_of_a_prompt_in_one_call_and_of_forced_ids(samples, name, form)


@pytest.mark.parametrize("name", OWN)
def test_a_prompt_one_at_a_time(samples: Path, name: str) -> None:
    golden.test_every_row_of_a_prompt_one_at_a_time(samples, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OWN)
def test_a_long_prompt(samples: Path, name: str, form: str) -> None:
    golden.test_a_prompt_longer_than_every_window(samples, name, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OWN)
def test_free_running_ids(samples: Path, name: str, form: str) -> None:
    golden.test_free_running_ids_up_to_the_first_small_gap(samples, name, form)


@pytest.mark.parametrize("name", OWN)
def test_chunks_change_no_bit(samples: Path, name: str) -> None:
    golden.test_one_call_and_many_give_the_same_bits(samples, name)


def test_all_samples_run_here(samples: Path) -> None:
    golden.test_the_samples_are_all_listed(samples)
    assert set(EXPERTS) < OWN.keys()
