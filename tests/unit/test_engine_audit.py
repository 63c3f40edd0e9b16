"""The audit of sound runs: nothing differs under any policy, and what was checked is counted and told."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import engine
from engine.__main__ import main
from engine.audit.weights import Weights
from engine.config import POLICIES
from engine.device import cuda
from engine.device.cuda import CudaDevice
from engine.device.sim import SimDevice
from engine.errors import NonFiniteLogits, OutOfMemory
from engine.kv_layout import LAYOUTS
from engine.layer_names import layer_of
from tests.unit.engine_audited import GROWING, TOKENS, G, audited
from tests.unit.engine_audited import clean as audited_clean
from tests.unit.engine_driver import Card, Driver
from tests.unit.engine_rig import COPYING, build_tiny

SCHEMA = Draft202012Validator(json.loads((Path(engine.__file__).parent / "schemas" / "audit.json").read_text()))
HALF: dict[str, Any] = {"weight_budget": "50%"}
EIGHT_STEPS = -(-TOKENS // 8) + 1
"""Checks of a generation at the default: steps 0 and 8, and the last one."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("audit"))


def sample(checkout: Path, name: str) -> Path:
    """An exporter's model."""
    folder = checkout.parent / "shared" / "models" / name
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return folder


def clean(model: Path, **how: Any) -> dict[str, int]:
    """A clean audit on a simulated card of small granules."""
    return audited_clean(model, SimDevice(granule_bytes=G), **GROWING, **how)


@pytest.mark.parametrize(
    ("policy", "budget", "capture", "layout"), [*product(POLICIES, ("full", "50%"), (True, False), LAYOUTS)]
)
def test_no_policy_differs_from_the_shadow(tiny: Path, policy: str, budget: str, capture: bool, layout: str) -> None:
    bound: dict[str, Any] = {} if budget == "full" else HALF
    ran = clean(tiny, every=4, policy=policy, capture=capture, kv_layout=layout, **bound)
    assert ran["ids"] == 3 * TOKENS and ran["kv_growths"] == 6
    assert min(ran["keys"], ran["key_bytes"], ran["granules"], ran["kv_bytes"], ran["logits"]) > 0
    assert (ran["captures"] > 0) is (ran["replays"] > 0) is capture
    assert (ran["page_ins"] > 0) is (budget != "full" and policy != "zero_copy")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["qwen35-int4-cuda", "qwen35moe-int4raw-cuda"])
def test_hybrid_and_mixture_do_not_differ_either(checkout: Path, name: str, policy: str) -> None:
    layout = LAYOUTS[POLICIES.index(policy) % 2]
    ran = clean(sample(checkout, name), every=6, policy=policy, kv_layout=layout, **HALF)
    assert ran["state_bytes"] > 0 and ran["kv_bytes"] > 0 and ran["keys"] > 0


def test_a_batch_is_compared_sequence_by_sequence(tiny: Path) -> None:
    alone = clean(tiny, policy="lru", **HALF)
    ran = clean(tiny, policy="lru", prefill_chunk=2, further=[[5], [7, 8, 9]], **HALF)
    assert (ran["ids"], ran["logits"]) == (3 * alone["ids"], 3 * alone["logits"])
    lengths = [sum(first + step for step in range(TOKENS)) for first in (4, 1, 3)]
    assert ran["kv_bytes"] * lengths[0] == alone["kv_bytes"] * sum(lengths)


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_give_way_to_a_growing_cache(tiny: Path, policy: str) -> None:
    ran = clean(tiny, every=2, policy=policy, vram_limit=290_000, kv_layout="head-major")
    assert ran["evictions"] > 0 and ran["kv_growths"] == 6


@pytest.mark.parametrize("policy", COPYING)
def test_every_key_is_checked_where_a_step_reads_it(tiny: Path, policy: str) -> None:
    """Eager steps are heard, so that keys which pass through are checked too: each pass checks all that it reads."""
    audit = audited(tiny, policy=policy, capture=False, generations=1, **HALF)
    assert audit.run().at is None
    plan = audit.setup.plan
    assert set(audit.weights.seen) == {k.index for k in plan.keys if k.nbytes}
    assert all(seen.checks >= TOKENS for seen in audit.weights.seen.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_what_stands_after_a_replay_is_what_the_pager_says(tiny: Path, policy: str) -> None:
    """After a captured pass: resident keys, and what the pass left in a ring, a slot, or host memory."""
    audit = audited(tiny, policy=policy, generations=1, **HALF)
    assert audit.run().at is None
    pager = audit.setup.pager
    standing = dict(pager.standing())
    resident = {k.index for k in audit.setup.plan.keys if pager.resident(k.index)}
    assert resident <= set(standing)
    assert bool(set(standing) - resident) is (policy in ("stable_slot", "staging", "zero_copy"))
    checked = Weights(audit.device, audit.setup.plan)
    for key, address in standing.items():
        checked.check(key, address)
    assert checked.found == [] and checked.keys == len(standing)


def test_nothing_of_a_ring_stands_before_the_first_pass(tiny: Path) -> None:
    audit = audited(tiny, policy="staging", **HALF)
    pager = audit.setup.pager
    assert {key for key, _ in pager.standing()} == {k.index for k in audit.setup.plan.keys if pager.resident(k.index)}


@pytest.mark.parametrize("policy", ["stable", "lru", "stable_slot", "size_first"])
def test_keys_are_read_back_through_a_card_s_driver(tiny: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's device over a driver whose streams run late, and whose kernels compute nothing."""
    driver = Driver()
    monkeypatch.setattr(cuda, "find_card", lambda uuid: Card(driver))
    audit = audited(tiny, device=CudaDevice(), every=3, policy=policy, target="fused", **GROWING, **HALF)
    report = audit.run()
    assert report.at is None and driver.faults == []
    assert set(audit.weights.seen) == {k.index for k in audit.setup.plan.keys if k.nbytes}
    assert audit.ran["page_ins"] > 0 and audit.counts["granules"] > audit.counts["keys"]
    audit.close()
    assert driver.mapped == {}


@pytest.mark.parametrize(
    ("names", "layer"),
    [
        (("/model/layers.11/mlp/MatMul",), 11),
        (("/lm_head", "model.layers.3.x"), 3),
        (("blocks_7/attn",), 7),
        (("transformer.h.5.ln",), 5),
        (("blk/MatMul", "h1.2"), None),
        ((), None),
    ],
)
def test_names_say_the_layer_where_they_speak_of_one(names: tuple[str, ...], layer: int | None) -> None:
    assert layer_of(*names) == layer


# -- the command


def ended(model: Path, *words: str) -> int:
    """The exit code of a short audit."""
    own = ["--model", str(model), "--prompt-ids", "1 17 42 99", "--tokens", str(TOKENS), "--device", "sim"]
    return main(["audit", *own, *words])


def test_the_document_says_what_was_checked(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shadow", "--weight-budget", "50%", "--policy", "lru", "--granule", "4096", "--kv-min-bucket", "4")
    assert ended(tiny, *words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    SCHEMA.validate(document)
    assert document["ok"] and document["difference"] is None and document["steps"] == 3 * TOKENS
    assert [(c["generation"], c["step"]) for c in document["checks"]] == [*product((1, 2, 3), (0, 8, TOKENS - 1))]
    assert len(document["checks"]) == 3 * EIGHT_STEPS
    resident: set[str] = set()
    for check in document["checks"]:
        assert not resident & set(check["entered"]) and set(check["left"]) <= resident
        resident = resident - set(check["left"]) | set(check["entered"])
        assert len(resident) == check["resident_keys"]
    assert [c["crc32"] for c in document["checks"][3:6]] == [c["crc32"] for c in document["checks"][6:]]
    keys = {row["key"]: row for row in document["keys"]}
    assert {row["layer"] for row in keys.values()} >= {0, 1} and document["ran"]["kv_growths"] == 6
    assert any(len(row["crc32"]) > 1 for row in keys.values())


def test_the_text_says_it_too(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tiny, "--checksum-every", "5") == 0
    head, checked, ran, resident = capsys.readouterr().out.splitlines()
    assert head.startswith(f"audit: clean steps={3 * TOKENS} checks=12 shadow=off device=simulated card")
    assert checked.startswith("checked: keys=") and "logits" not in checked, "without a shadow, weights alone"
    assert "captures=1 " in ran and "left=0" in resident


def test_an_audit_that_checked_no_key_is_exit_1(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Weights, "check", lambda self, *_: None)
    assert ended(tiny, "--shadow") == 1
    assert "NOTHING CHECKED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--checksum-every", "0"], "checksum_every is 0 (give 1 for every step, or more)"),
        (["--tokens", "100000"], "do not fit the model's"),
        (["--generations", "0"], "generations is 0"),
        (["--weight-budget", "half"], "weight_budget is 'half'"),
        (["--prompt-ids", "1 5000"], "not allowed with"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_what_cannot_be_asked_is_exit_10(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    if words[0] == "--prompt-ids":
        words, said = ["--prompt", "x", *words], "not allowed with"
    assert ended(tiny, *words) == 10
    assert said in capsys.readouterr().err


def test_a_card_without_room_for_the_shadow_says_so_and_gives_all_back(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimDevice(granule_bytes=G)
    create, room = device.create, [40]

    def created() -> Any:
        if not room[0]:
            raise OutOfMemory("no granule left")
        room[0] -= 1
        return create()

    monkeypatch.setattr(device, "create", created)
    with pytest.raises(OutOfMemory, match=r"no room for the shadow's \d+ bytes of weights.*leave out --shadow"):
        audited(tiny, device=device, weight_budget="50%")
    assert device.mapped_bytes == 0


def test_a_model_without_numbers_is_no_difference(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadow has none either: that is the model's fault, and the exit code is its own."""
    audit = audited(tiny)
    assert audit._shadow is not None
    for decoder in (audit.setup.decoder, audit._shadow.setup.decoder):
        monkeypatch.setattr(decoder, "prefill", _without_numbers)
    with pytest.raises(NonFiniteLogits):
        audit.run()


def _without_numbers(*_: Any) -> Any:
    raise NonFiniteLogits("logits at position 3 are not finite")
