"""The audit on a real card: clean under every policy that a card serves, and red for what is planted there.

Samples of the exporter are read from ../shared/models where those are at hand.
"""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from engine.__main__ import main
from engine.config import POLICIES
from engine.kv_layout import LAYOUTS
from tests.unit.engine_audited import TOKENS, audited, from_generation, parts
from tests.unit.engine_audited import clean as audited_clean
from tests.unit.engine_rig import build_tiny, smollm2
from tests.unit.test_engine_audit import SCHEMA, sample
from tests.unit.test_engine_audit_planted import first, forget_positions, in_step
from tests.unit.test_engine_hazards_decode import retain_a_slot
from tests.unit.test_engine_hazards_planted import forget_states

pytestmark = pytest.mark.gpu

FUSED: dict[str, Any] = {"target": "fused", "kv_min_bucket": 4}
HALF: dict[str, Any] = {"weight_budget": "50%"}
DENSE, HYBRID, MIXTURE = "qwen3-int4-cuda", "qwen35-int4-cuda", "qwen35moe-int4raw-cuda"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model: on a card all of it is one granule, so that nothing of it streams."""
    return build_tiny(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M, which lies on many granules, as it stands in the cache or newly built."""
    cache = Path(os.environ.get("ASSAY_CACHE_DIR") or platformdirs.user_cache_path("assay"))
    built = cache / "models" / "smollm2-135m"
    return built if (built / "model.onnx").is_file() else smollm2(tmp_path_factory.mktemp("audit"))


def new_device() -> Any:
    """The first visible card."""
    from engine.device.cuda import CudaDevice

    return CudaDevice()


def clean(model: Path, **how: Any) -> dict[str, int]:
    """A clean audit on the first visible card."""
    return audited_clean(model, new_device(), **{**FUSED, **how})


@pytest.mark.parametrize(
    ("policy", "budget", "capture", "layout"), [*product(POLICIES, ("full", "50%"), (True, False), LAYOUTS)]
)
def test_no_policy_differs_from_the_shadow(smol: Path, policy: str, budget: str, capture: bool, layout: str) -> None:
    bound: dict[str, Any] = {} if budget == "full" else HALF
    ran = clean(smol, every=6, policy=policy, capture=capture, kv_layout=layout, **bound)
    assert ran["ids"] == 3 * TOKENS and ran["kv_growths"] == 6
    assert min(ran["keys"], ran["granules"], ran["kv_bytes"], ran["logits"]) > 0
    assert (ran["page_ins"] > 0) is (budget != "full" and policy != "zero_copy")
    assert capture or ran["captures"] == 0


@pytest.mark.parametrize("target", ["plain", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [DENSE, HYBRID, MIXTURE])
def test_the_exporter_s_models_do_not_differ(checkout: Path, name: str, layout: str, target: str) -> None:
    ran = clean(sample(checkout, name), every=4, kv_layout=layout, target=target)
    assert ran["keys"] > 0 and ran["kv_growths"] == 6 and (ran["state_bytes"] > 0) is (name != DENSE)


def test_a_batch_is_compared_sequence_by_sequence(smol: Path) -> None:
    ran = clean(smol, every=6, policy="lru", further=[[5], [7, 8, 9]], **HALF)
    assert ran["ids"] == 9 * TOKENS


def test_a_granule_that_holds_another_key_is_named(smol: Path) -> None:
    audit = audited(smol, device=new_device(), every=6, policy="stable", **FUSED, **HALF)
    device, pager, plan, chosen = audit.device, audit.setup.pager, audit.setup.plan, []
    size = device.granule_bytes

    def plant() -> None:
        resident = [k for k in plan.keys if pager.resident(k.index)]
        key = next(k for k in resident if k.nbytes > 1 << 16)
        other = next(k for k in plan.keys if k.nbytes == key.nbytes and k.index != key.index)
        chosen.extend([key, other])
        granule = pager.place(key.index) // size * size
        device.unmap(granule)
        device.map(granule, device.create())
        for k in resident:  # all of the granule is as it was, but for one key
            if granule <= pager.place(k.index) < granule + size and k is not key:
                room = granule + size - pager.place(k.index)
                device.copy_in(pager.place(k.index), k.weight.data.reshape(-1)[:room].copy())
            elif pager.place(k.index) < granule < pager.place(k.index) + k.nbytes:
                device.copy_in(granule, k.weight.data.reshape(-1)[granule - pager.place(k.index) :][:size].copy())
        room = granule + size - pager.place(key.index)
        device.copy_in(pager.place(key.index), other.weight.data.reshape(-1)[:room].copy())

    in_step(audit, 2, 5, plant)
    generation, step, cause = first(audit)
    key, other = chosen
    assert (generation, step, cause.what, cause.name) == (2, 5, "weights", key.name)
    assert cause.instead.startswith(f"{other.name} from byte ")
    assert cause.granule_serial == device.serials[pager.place(key.index) // size * size]
    audit.close()


def test_a_retained_slot_is_found_in_the_second_generation(smol: Path) -> None:
    moving: dict[str, Any] = {**FUSED, "kv_layout": "head-major"}
    audit = audited(smol, device=new_device(), every=4, policy="stable_slot", capture=False, **moving, **HALF)
    retain_a_slot(parts(audit))
    generation, step, cause = first(audit)
    assert (generation, step, cause.what) == (2, 0, "weights")
    assert " from byte " in cause.instead
    audit.close()


@pytest.mark.parametrize("capture", [True, False])
def test_a_growth_that_forgets_a_position_names_it(smol: Path, capture: bool) -> None:
    audit = audited(smol, device=new_device(), every=5, capture=capture, **{**FUSED, "kv_layout": "head-major"})
    from_generation(audit, 2, lambda _: forget_positions(audit))
    generation, step, cause = first(audit)
    assert (generation, step, cause.what, cause.layer, cause.position) == (2, 1, "kv", 0, 3)
    audit.close()


@pytest.mark.parametrize("capture", [True, False])
def test_a_state_that_is_not_reset_is_named(checkout: Path, capture: bool) -> None:
    audit = audited(sample(checkout, HYBRID), device=new_device(), every=6, capture=capture, **FUSED)
    from_generation(audit, 2, forget_states)
    generation, step, cause = first(audit)
    assert (generation, step, cause.what, cause.name) == (2, 0, "state", "past.0.recurrent")
    audit.close()


def test_the_command_audits_a_card(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(tiny), "--prompt-ids", "1 17 42 99", "--device", "cuda", "--kv-min-bucket", "8"]
    assert main(["audit", *words, "--shadow", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    SCHEMA.validate(document)
    assert document["ok"] and document["ran"]["replays"] > 0 and document["checked"]["kv_bytes"] > 0
