"""Defects planted by hand in the audited run: each is found at its generation and step, by key, cache or state.

Every plant leaves the shadow alone. The clean twins are in test_engine_audit.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.audit.difference import Difference
from engine.audit.pair import Audit, Report
from engine.commands import audit as command
from engine.config import POLICIES
from engine.errors import DeviceFailure
from engine.onnx_load import load
from engine.paging.pager import Pager
from tests.unit.engine_audited import GROWING, G, audited, from_generation, parts
from tests.unit.engine_rig import TINY_PROMPT, build_tiny
from tests.unit.test_engine_audit import HALF, SCHEMA, ended, sample
from tests.unit.test_engine_hazards_decode import keep_graphs, retain_a_slot
from tests.unit.test_engine_hazards_planted import bake_lengths, forget_states, one_slot_too_many

MOVING: dict[str, Any] = {**GROWING, "kv_layout": "head-major"}
PROMPT = len(TINY_PROMPT)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("planted"))


def first(audit: Audit) -> tuple[int, int, Difference]:
    """Generation, step and cause of the first difference."""
    report: Report = audit.run()
    assert report.at is not None and report.found
    return report.at.generation, report.at.step, report.found[0]


def in_step(audit: Audit, generation: int, step: int, plant: Callable[[], None]) -> None:
    """Do something just before that one-token step."""
    decoder, begun, steps = audit.setup.decoder, [0], [0]
    reset, one = decoder.reset, decoder.step

    def again() -> None:
        begun[0], steps[0] = begun[0] + 1, 0
        reset()

    def stepped(**how: Any) -> Any:
        steps[0] += 1
        if (begun[0], steps[0]) == (generation, step):
            plant()
        return one(**how)

    decoder.reset, decoder.step = again, stepped  # type: ignore[method-assign]


# -- weights


@pytest.mark.parametrize("every", [1, 4])
def test_a_retained_slot_is_found_in_the_second_generation(tiny: Path, every: int) -> None:
    """The seed's corruption: a table's entry outlives a growth of the cache, and the slot has been used since."""
    audit = audited(tiny, every=every, policy="stable_slot", capture=False, **MOVING, **HALF)
    retain_a_slot(parts(audit))
    generation, step, cause = first(audit)
    assert (generation, step, cause.what) == (2, 0, "weights"), "the first generation is right"
    plan, pager = audit.setup.plan, audit.setup.pager
    assert isinstance(pager, Pager)
    [(retained, address)] = pager._in_slot.items()
    assert cause.name == plan.keys[retained].name and cause.address is not None
    assert pager._slot is not None and pager._slot <= address <= cause.address < address + plan.keys[retained].nbytes
    others = {key.name for key in plan.keys} - {cause.name}
    assert any(cause.instead.startswith(f"{name} from byte ") for name in others)
    assert cause.granule_serial == audit.device.serials[cause.granule_address or 0]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("generation", [1, 3])
def test_a_ring_slot_refilled_early_is_found_where_its_key_is_read(tiny: Path, capture: bool, generation: int) -> None:
    audit = audited(tiny, policy="staging", capture=capture, **GROWING, **HALF)
    from_generation(audit, generation, one_slot_too_many)
    found, step, cause = first(audit)
    assert (found, step, cause.what) == (generation, 0, "weights")
    step_index, name = cause.step_index, cause.name
    [key] = [k for k in audit.setup.plan.keys if k.name == name]
    assert step_index is not None and key.index in audit.setup.plan.steps[step_index].keys
    assert not audit.setup.pager.resident(key.index)
    assert cause.instead == "poison" or " from byte " in cause.instead
    assert cause.layer in (0, 1, None) and cause.node == audit.setup.plan.steps[step_index].node


def remap(audit: Audit, key: str, other: str) -> None:
    """Map another granule, filled with another key's bytes, where a resident key's second granule was."""
    device, pager, plan = audit.device, audit.setup.pager, audit.setup.plan
    named = {k.name: k for k in plan.keys}
    assert pager.resident(named[key].index)
    address = (pager.place(named[key].index) // G + 1) * G
    device.unmap(address)
    device.map(address, device.create())
    device.copy_in(address, named[other].weight.data.reshape(-1)[:G].copy())


@pytest.mark.parametrize(("policy", "capture"), [("stable", True), ("lru", False), ("staging", True)])
def test_a_granule_remapped_wrongly_is_named(tiny: Path, policy: str, capture: bool) -> None:
    """Under `lru` with room for all; elsewhere the key is one that stays."""
    bound: dict[str, Any] = {} if policy == "lru" else HALF
    audit = audited(tiny, policy=policy, capture=capture, **GROWING, **bound)
    plan, other = audit.setup.plan, "model.layers.1.mlp.down_proj.MatMul.weight_Q4"
    chosen: list[Any] = []

    def plant() -> None:
        stays = (k for k in plan.keys if k.nbytes > 2 * G and audit.setup.pager.resident(k.index) and k.name != other)
        chosen.append(next(stays))
        remap(audit, chosen[0].name, other)

    in_step(audit, 2, 5, plant)
    generation, step, cause = first(audit)
    assert (generation, step, cause.what, cause.name) == (2, 5, "weights", chosen[0].name)
    assert (cause.granule_index, cause.granules) == (1, 1)
    address = audit.setup.pager.place(chosen[0].index)
    assert (
        cause.granule_address == (address // G + 1) * G
        and cause.granule_serial == audit.device.serials[cause.granule_address]
    )
    assert cause.first_byte == cause.granule_address - address
    assert cause.crc32 is not None and cause.crc32[0] != cause.crc32[1]
    assert cause.instead == f"{other} from byte 0"


def test_a_check_each_n_steps_finds_it_at_the_next_check_or_at_the_first_token_that_shows_it(tiny: Path) -> None:
    """Bits that no token shows: a check finds them. Here a scale's last bit, which moves logits at once."""
    audit = audited(tiny, every=8, **GROWING)
    plan, pager = audit.setup.plan, audit.setup.pager
    key = next(k for k in plan.keys if k.name.endswith("layers.1.mlp.down_proj.MatMul.weight_Q4"))
    at = pager.place(key.index) + 100

    def flip() -> None:
        raw = np.frombuffer(audit.device.copy_out(at, 1), np.uint8) ^ 16
        audit.device.copy_in(at, raw)

    in_step(audit, 1, 3, flip)
    generation, step, cause = first(audit)
    assert (generation, step, cause.name, cause.first_byte, cause.end_byte) == (1, 3, key.name, 100, 101)
    alone = audited(tiny, every=8, shadow=False, **GROWING)
    at = alone.setup.pager.place(key.index) + 100
    audit = alone
    in_step(alone, 1, 3, flip)
    assert first(alone)[:2] == (1, 8), "without a shadow nothing says so before the next check"


def test_host_bytes_that_change_are_not_the_device_s_fault(tiny: Path) -> None:
    graph = load(tiny)
    name = next(n for n, w in graph.weights.items() if n.endswith("layers.1.mlp.down_proj.MatMul.weight_Q4"))
    own = graph.weights[name].data.copy()
    graph = replace(graph, weights={**graph.weights, name: replace(graph.weights[name], data=own)})
    audit = audited(graph, shadow=False, policy="zero_copy", weight_budget=G, **GROWING)

    def change() -> None:
        own.reshape(-1)[7] ^= 1

    in_step(audit, 2, 2, change)
    generation, step, cause = first(audit)
    assert (generation, step, cause.what, cause.name, cause.granule_serial) == (2, 2, "host bytes", name, None)


def test_a_page_that_is_gone_is_named_with_the_failure(tiny: Path) -> None:
    """Weights are unmapped under a resident run: the device says an address, the audit whose it is."""
    audit = audited(tiny, every=8, **GROWING)
    key = audit.setup.plan.keys[3]

    def take_away() -> None:
        audit.device.unmap(audit.setup.pager.place(key.index) // G * G)

    in_step(audit, 2, 4, take_away)
    report = audit.run()
    assert report.at is not None and (report.at.generation, report.at.step) == (2, 4)
    assert "unmapped" in report.found[0].instead and report.found[-1].what == "failure"
    assert key.name in {cause.name for cause in report.found}


# -- what was computed


def forget_positions(audit: Audit) -> None:
    """A cache that moves leaves the last position of each stretch behind."""
    device: Any = audit.device
    copy, vector = device.copy_within, audit.setup.kv.placement.vector_bytes

    def copied(target: int, source: int, nbytes: int) -> None:
        copy(target, source, nbytes - vector)

    device.copy_within = copied


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capture", [True, False])
def test_a_growth_that_forgets_a_position_names_it(tiny: Path, policy: str, capture: bool) -> None:
    audit = audited(tiny, every=5, policy=policy, capture=capture, **MOVING, **HALF)
    from_generation(audit, 2, lambda _: forget_positions(audit))
    generation, step, cause = first(audit)
    assert (generation, step) == (2, 1), "the first growth is that of the first token: from four positions to eight"
    assert (cause.what, cause.name, cause.layer, cause.position) == ("kv", "key cache, head 0", 0, PROMPT - 1)
    assert cause.instead == "poison" and cause.granule_serial is not None


def test_a_graph_that_outlives_a_move_of_the_cache(tiny: Path) -> None:
    audit = audited(tiny, **MOVING)
    keep_graphs(parts(audit))
    generation, step, cause = first(audit)
    assert (generation, step, cause.what) == (1, 5, "failure"), "the ninth position needs another bucket"
    assert cause.position == PROMPT + 4 and "belongs to nothing" in cause.name


def test_an_extent_that_a_graph_has_baked_shows_in_the_position_that_it_writes_again(tiny: Path) -> None:
    audit = audited(tiny)
    bake_lengths(parts(audit))
    generation, step, cause = first(audit)
    assert (generation, step, cause.what) == (1, 3, "kv"), "prompt, warm step and recorded step know their own extent"
    assert (cause.layer, cause.position) == (0, PROMPT + 1), "where the recorded step wrote"
    assert cause.node == "/model/layers.0/attn/GroupQueryAttention"


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("policy", ["stable", "staging"])
def test_a_state_that_is_not_reset_is_named(checkout: Path, policy: str, capture: bool) -> None:
    folder = sample(checkout, "qwen35-int4-cuda")
    audit = audited(folder, every=6, policy=policy, capture=capture, **GROWING, **HALF)
    from_generation(audit, 2, forget_states)
    generation, step, cause = first(audit)
    assert (generation, step, cause.what) == (2, 0, "state")
    assert (cause.name, cause.layer) == ("past.0.recurrent", 0), "its last inputs are all that a convolution keeps"
    assert cause.node == "/model/layers.0/linear_attn/LinearAttention"
    [spec] = [spec for spec in audit.setup.plan.states if spec.name == cause.name]
    assert cause.address is not None and cause.end_byte is not None and cause.end_byte <= spec.nbytes


def test_another_id_alone_is_found(tiny: Path) -> None:
    """The choice is wrong and everything before it right: what comes out says so, and nothing else does."""
    audit = audited(tiny, every=64)
    decoder, step = audit.setup.decoder, audit.setup.decoder.step

    def stepped(**how: Any) -> Any:
        return [replace(one, token=one.token ^ 1) for one in step(**how)]

    decoder.step = stepped  # type: ignore[method-assign]
    generation, at, cause = first(audit)
    assert (generation, at, cause.what) == (1, 1, "ids") and int(cause.expected) ^ 1 == int(cause.found)
    assert audit.counts["kv_bytes"] > 0, "a token that differs has memory read back at once"


def test_a_sequence_of_a_batch_is_named_with_its_own_position(tiny: Path) -> None:
    audit = audited(tiny, every=64, further=[[5], [7, 8]])
    step = audit.setup.decoder.step

    def stepped(**how: Any) -> Any:
        first, second, third = step(**how)
        return [first, replace(second, token=second.token ^ 1), third]

    audit.setup.decoder.step = stepped  # type: ignore[method-assign]
    _, at, cause = first(audit)
    assert (at, cause.what, cause.sequence, cause.position) == (1, "ids", 1, 1)


def test_a_key_that_was_wrong_before_the_card_failed_is_told_all_the_same(tiny: Path) -> None:
    """A card that failed takes the shadow down too; what was read back before that is known."""
    audit = audited(tiny, policy="lru", capture=False, **HALF)
    assert audit._shadow is not None
    copy, wrong = audit.device.copy_in, audit.setup.plan.keys[4]

    def copied(address: int, source: NDArray[Any]) -> None:
        copy(address, source[::-1].copy() if source is wrong.weight.data else source)

    def failing(*_: Any) -> Any:
        raise DeviceFailure("cuLaunchKernel failed: ILLEGAL_ADDRESS")

    ours: Any = audit.setup.decoder
    shadows: Any = audit._shadow.setup.decoder
    prefill = ours.prefill

    def broken(*how: Any) -> Any:
        prefill(*how)
        failing()

    device: Any = audit.device
    device.copy_in = copied
    ours.prefill, shadows.prefill = broken, failing
    report = audit.run()
    assert [(one.what, one.name) for one in report.found] == [
        ("weights", wrong.name),
        ("failure", "cuLaunchKernel failed: ILLEGAL_ADDRESS"),
    ]
    alone = audited(tiny)
    assert alone._shadow is not None
    ours, shadows = alone.setup.decoder, alone._shadow.setup.decoder
    ours.prefill = shadows.prefill = failing
    with pytest.raises(DeviceFailure, match="ILLEGAL_ADDRESS"):
        alone.run()


def test_a_difference_is_exit_1_with_its_document_and_its_text(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def backwards(self: Pager, key: int, address: int) -> None:
        self._device.copy_in(address, self._keys[key].weight.data[::-1].copy())

    monkeypatch.setattr(Pager, "_fill", backwards)
    words = ("--checksum-every", "3", "--granule", "4096")
    assert ended(tiny, *words, "--json") == command.DIFFERENT == 1
    document = json.loads(capsys.readouterr().out)
    SCHEMA.validate(document)
    cause = document["difference"]["found"][0]
    assert not document["ok"] and (document["difference"]["generation"], document["difference"]["step"]) == (1, 0)
    assert cause["what"] == "weights" and cause["layer"] == 0 and cause["node"].startswith("/model/layers.0/")
    assert len(document["difference"]["found"]) > 4
    assert ended(tiny, *words) == 1
    head, *_, last = capsys.readouterr().out.splitlines()
    assert head.startswith("audit: DIFFERENT") and last.endswith(" more keys")
