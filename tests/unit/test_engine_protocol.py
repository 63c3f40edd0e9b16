"""What goes in and comes out: the request's schema and parser agree, lines fit their schema, names are declared."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import engine
from engine.config import (
    CONFIG_NAMES,
    DEVICES,
    GRANULES_BYTES,
    POLICIES,
    EngineConfig,
    RunRequest,
    check,
    parse_request,
    parse_share,
)
from engine.counters import COUNTERS, PHASES
from engine.errors import EXIT_KINDS, BadRequest, EngineError
from engine.show import show
from tests.unit.engine_rig import TINY_PROMPT, Outcome, build_tiny, reconfigured, request, run

SCHEMAS = Path(engine.__file__).parent / "schemas"
G = 4096


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("protocol"))


def schema(name: str) -> Draft202012Validator:
    """A schema of the protocol, itself checked."""
    document = json.loads((SCHEMAS / name).read_text())
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


REQUEST, LINES = schema("run_request.json"), schema("lines.json")


# -- names


def test_config_names_are_one_set_everywhere() -> None:
    properties = REQUEST.schema["properties"]
    assert {f.name for f in fields(EngineConfig)} == CONFIG_NAMES == set(properties["config"]["properties"])
    assert {f.name for f in fields(RunRequest)} - {"given"} | {"protocol"} == set(properties)
    assert set(properties["device"]["enum"]) == set(DEVICES)
    assert properties["config"]["properties"]["policy"]["enum"] == list(POLICIES)
    assert properties["config"]["properties"]["granule"]["enum"] == [None, *GRANULES_BYTES]


def test_defaults_are_good_requests() -> None:
    defaults = {f.name: getattr(EngineConfig(), f.name) for f in fields(EngineConfig)}
    assert check(defaults) == EngineConfig()
    assert REQUEST.is_valid(request(Path("m"), config=defaults))


# -- the request

BASE: dict[str, Any] = {"protocol": 1, "model": "m", "prompt_ids": [1], "tokens": 1}


def accepted(document: object) -> bool:
    """Whether the parser takes it; a refusal must be a BadRequest that says what to do."""
    try:
        parse_request(document)
    except BadRequest as error:
        refused = error
    else:
        return True
    assert refused.message and refused.remedy and "\n" not in refused.message
    return False


ODD: list[Any] = [
    *(65_536, 65_537, 1_000_000, 1_000_001, 2**31 - 1, 2**31, 2**63 - 1, 2**63, "a\ud800"),
    *(None, True, False, 0, 1, -1, 2, 10**30, -(10**30), 0.5, -1.5, math.inf),
    *("", "1", "50%", "0%", "100%", "101%", "-5%", "5 %", " 5%", "5%\n", "0.0%", "0.5%", "99.999999%", "1.0000001%"),
    *("0050%", "٥٠%", "1e1%", "abc", "sim", "cuda", "tpu", "stable", "mru", "100.0%", "100.1%", "%", "005%"),
    *([], [1], [0, 5], [-1], [True], [1.5], ["1"], [[1]], {}, {"policy": "lru"}, {"polcy": "lru"}),
    *(4096, 4097, 65536, 2048, 1 << 30, 1 << 31, 3 << 12),
]


@pytest.mark.parametrize("name", [*sorted({f.name for f in fields(RunRequest)} - {"given", "config"}), "protocol"])
def test_schema_and_parser_agree_on_every_key(name: str) -> None:
    for value in ODD:
        document = {**BASE, name: value}
        assert accepted(document) == REQUEST.is_valid(document), (name, value)


@pytest.mark.parametrize("name", sorted(CONFIG_NAMES))
def test_schema_and_parser_agree_on_every_config_name(name: str) -> None:
    for value in ODD:
        document = {**BASE, "config": {name: value}}
        assert accepted(document) == REQUEST.is_valid(document), (name, value)


@pytest.mark.parametrize(
    "document",
    [
        *(None, [], "text", 5, {}, {"protocol": 1}),
        *({k: v for k, v in BASE.items() if k != name} for name in BASE),
        {**BASE, "tokns": 4},
        {**BASE, "given": []},
        {**BASE, "config": []},
        {**BASE, "config": None},
        {**BASE, "config": {"given": 1}},
        {**BASE, "protocol": 2},
        {**BASE, "protocol": 0},
        {**BASE, "uuid": "GPU-1", "device": "sim", "decode_skip": 3, "ignore_eos": True, "warmups": 2},
        *({**BASE, "device": device, "config": {"policy": policy}} for device in DEVICES for policy in POLICIES),
        *({**BASE, "warmups": warmups, "config": {"prefix_reuse": True}} for warmups in (0, 1)),
    ],
)
def test_schema_and_parser_agree_on_whole_documents(document: object) -> None:
    assert accepted(document) == REQUEST.is_valid(document)


SAID = sorted(CONFIG_NAMES - {"kv_capacity"})
"""Names whose values a schema can hold against the rest: the positions of a capacity are a sum."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SAID), inner, max_size=3),
    max_leaves=4,
)


def has_whole_float(value: Any) -> bool:
    """1.0: JSON Schema takes it for the integer 1, the parser does not."""
    if isinstance(value, dict):
        return any(map(has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


@settings(max_examples=150, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from([*sorted(BASE), "config", "warmups", "uuid", "device"]), JSON, max_size=3)
)
def test_schema_and_parser_agree_on_anything(changes: dict[str, Any]) -> None:
    document = {**BASE, **changes}
    if has_whole_float(document):
        assert not accepted(document)
    else:
        assert accepted(document) == REQUEST.is_valid(document)


@pytest.mark.parametrize(
    ("document", "says", "remedy"),
    [
        ({**BASE, "tokns": 1}, "'tokns'", "'tokens'"),
        ({**BASE, "config": {"polcy": "lru"}}, "'polcy'", "'policy'"),
        ({**BASE, "config": {"policy": "mru"}}, "'mru'", "stable_slot"),
        ({**BASE, "config": {"weight_budget": -5}}, "-5", "above"),
        ({**BASE, "config": {"weight_budget": "fifty"}}, "'fifty'", "50%"),
        ({**BASE, "config": {"vram_limit": "8GB"}}, "'8GB'", "whole number"),
        ({**BASE, "config": {"granule": 5000}}, "5000", "power of two"),
        ({**BASE, "prompt_ids": []}, "empty", "token id"),
        ({**BASE, "tokens": 0}, "tokens is 0", "from 1"),
        ({**BASE, "protocol": 7}, "7", "1"),
        ({**BASE, "device": "tpu"}, "'tpu'", "sim"),
        ({**BASE, "generations": 10**30}, "generations", "1000000"),  # each of these ran for ever, or out of memory
        ({**BASE, "warmups": 10**7}, "warmups", "1000000"),
        ({**BASE, "tokens": 2**31}, "tokens", "2147483647"),
        ({**BASE, "config": {"batch": 10**30}}, "batch", "65536"),
        ({**BASE, "config": {"kv_capacity": 10**30}}, "kv_capacity", "2147483647"),
        ({**BASE, "config": {"kv_capacity": 4}, "tokens": 5}, "kv_capacity 4 is below the 5 positions", "raise"),
        ({**BASE, "config": {"prefix_reuse": True}}, "prefix_reuse without a warm-up", "give 1 warm-up"),
        ({**BASE, "config": {"hot_experts": "routing.json"}}, "hot_experts has no effect", "stable_slot"),
        ({**BASE, "model": "a\0b"}, "a\\x00b", "folder"),
        ({**BASE, "model": "a\ud800"}, "a\\ud800", "folder"),
    ],
)
def test_a_refused_request_names_the_thing_and_the_remedy(document: dict[str, Any], says: str, remedy: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_request(document)
    assert says in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize(("text", "share"), [("50%", 0.5), ("100%", 1.0), ("0.5%", 0.005), ("99.5%", 0.995)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


# -- the lines


def lines_of(outcome: Outcome) -> list[dict[str, Any]]:
    """Lines of a run, each checked against the schema."""
    for line in outcome.lines.lines:
        assert next(iter(line)) == "type"
        errors = [e.message for e in LINES.iter_errors(line)]
        assert not errors, (line["type"], errors)
    return outcome.lines.lines


RUNS: dict[str, dict[str, Any]] = {
    "resident": {},
    "half": {"config": {"weight_budget": "50%", "granule": G}, "generations": 2, "warmups": 1},
    "slot": {"config": {"weight_budget": "50%", "granule": G, "policy": "stable_slot"}},
    "no capture": {"config": {"capture": False}},
    "one token": {"tokens": 1},
    "all config": {"config": {"vram_limit": 10**9, "kv_capacity": 64, "prefill_chunk": 2, "policy": "lru"}},
    "eos": {"prompt_ids": [1], "tokens": 8},
    "batch": {"further_prompts": [[7], [1, 2, 3, 4, 5, 6]], "config": {"batch": 4}},
    "refused": {"config": {"weight_budget": 1000}},
    "no such id": {"prompt_ids": [9999]},
    "cuda": {"device": "cuda"},
    "no model": {"model": "/nowhere/at/all"},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_line_fits_the_schema_and_one_ends_the_stream(tiny: Path, name: str) -> None:
    outcome = run(tiny, **RUNS[name])
    kinds = [line["type"] for line in lines_of(outcome)]
    assert kinds[-1] == ("result" if outcome.code == 0 else "error")
    assert sum(kind in ("result", "error") for kind in kinds) == 1
    if outcome.code != 10 or name != "cuda":
        assert kinds[0] == "hello"
    if outcome.code:
        error = outcome.error
        assert error["code"] == outcome.code and EXIT_KINDS[outcome.code] == error["kind"]
        assert error["message"] and error["remedy"] and "\n" not in error["message"]


def test_hello_says_where_each_value_came_from(tiny: Path) -> None:
    outcome = run(tiny, config={"policy": "lru", "granule": G}, uuid="SIM-7")
    hello = outcome.lines.of("hello")[0]
    assert set(hello["effective_config"]) == CONFIG_NAMES
    assert hello["effective_config"]["policy"] == {"value": "lru", "source": "request"}
    assert hello["effective_config"]["capture"] == {"value": True, "source": "default"}
    assert hello["device"]["granule_bytes"] == G and hello["device"]["uuid"] == "SIM-7"
    assert hello["module_path"] == str(Path(engine.__file__)) and hello["protocol"] == 1
    assert hello["model"]["digest"] == json.loads((tiny / "zoo.json").read_text())["model_digest"]


def test_progress_counts_up_to_all_generations(tiny: Path) -> None:
    outcome = run(tiny, generations=2, warmups=1)
    assert [(p["phase"], p["done"], p["of"]) for p in outcome.lines.of("progress")] == [
        ("load", 0, 1),
        *(("generation", n, 3) for n in range(3)),
    ]


def test_field_41_an_end_id_ends_a_generation_unless_it_is_ignored(tiny: Path, tmp_path: Path) -> None:
    """The model's own third token, made an end id: three tokens and stop eos; ignored, or another id: all eight."""
    ids = run(tiny).streams[0][0]
    folder = reconfigured(tiny, tmp_path / "m", lambda c: c["model"].update(eos_token_id=[511, ids[2]]))
    ended = run(folder, generations=2)
    for generation in ended.lines.of("generation"):
        assert (generation["ids"], generation["stop_reason"]) == (ids[:3], "eos")
        assert len(generation["step_ns"]) == 2 and len(generation["gaps"]) == 3
    assert ended.facts["measured_tokens"] == 6 and ended.broken_equations() == []
    ignored = run(folder, ignore_eos=True).lines.of("generation")[0]
    assert (ignored["ids"], ignored["stop_reason"]) == (ids, "length")
    first = reconfigured(tiny, tmp_path / "n", lambda c: c["model"].update(eos_token_id=ids[0]))
    one = run(first).lines.of("generation")[0]
    assert (one["ids"], one["stop_reason"], one["step_ns"]) == (ids[:1], "eos", [])
    in_prompt = reconfigured(tiny, tmp_path / "o", lambda c: c["model"].update(eos_token_id=TINY_PROMPT[1]))
    assert run(in_prompt).lines.of("generation")[0]["ids"] == ids, "an end id in the prompt ends nothing"


@pytest.mark.parametrize("end", [0, 1, 4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_field_41_any_of_several_end_ids_ends(tiny: Path, tmp_path: Path, end: int, place: int) -> None:
    ids = run(tiny).streams[0][0]
    ends = [511, 510]
    ends.insert(place, ids[end])
    folder = reconfigured(tiny, tmp_path / "m", lambda c: c["model"].update(eos_token_id=ends))
    [generation] = run(folder).lines.of("generation")
    assert (generation["ids"], generation["stop_reason"]) == (ids[: end + 1], "eos")


@pytest.mark.parametrize("ends", [[511], None])
def test_field_41_a_limit_of_one_is_one_token_and_of_none_is_refused(
    tiny: Path, tmp_path: Path, ends: list[int] | None
) -> None:
    first = run(tiny).streams[0][0][0]
    folder = reconfigured(tiny, tmp_path / "m", lambda c: c["model"].update(eos_token_id=ends or [511, first]))
    outcome = run(folder, tokens=1)
    [generation] = outcome.lines.of("generation")
    assert (generation["ids"], generation["step_ns"]) == ([first], [])
    assert generation["stop_reason"] == ("length" if ends else "eos")
    assert outcome.facts["measured_tokens"] == 1 and outcome.broken_equations() == []
    with pytest.raises(BadRequest, match="tokens is 0"):
        parse_request(request(folder, tokens=0))


# -- counters


def test_counters_that_appear_are_declared_and_all_of_a_kind_appear(tiny: Path) -> None:
    for name in ("resident", "half", "slot"):
        outcome = run(tiny, **RUNS[name])
        appear = set(outcome.counters)
        assert appear == set(COUNTERS), name
        for generation in outcome.lines.of("generation"):
            assert set(generation["counters"]) == set(PHASES)
            for phase in PHASES:
                assert set(generation["counters"][phase]) <= set(COUNTERS)
    missing = set(COUNTERS) - set(run(tiny, **RUNS["no capture"]).counters)
    assert missing == {"graph_nodes"}, "no graph was made: absent, not zero"


def test_every_event_counter_names_its_byte_twin() -> None:
    for counter in COUNTERS.values():
        if counter.twin is not None:
            assert COUNTERS[counter.twin].unit == "bytes" and COUNTERS[counter.twin].kind == counter.kind
    for name in ("hits", "page_ins", "retained_page_ins", "bypassed_page_ins", "evictions", "loaded_keys"):
        assert COUNTERS[name].twin


def test_a_run_is_the_same_twice(tiny: Path) -> None:
    """Every counter but the clock's, to the last byte."""
    changes = {"config": {"weight_budget": "50%", "granule": G, "policy": "stable"}, "generations": 2}
    one, two = run(tiny, **changes), run(tiny, **changes)
    assert one.counters == two.counters
    assert one.result["keys"] == two.result["keys"] and one.facts == two.facts


# -- for a person


@pytest.mark.parametrize("name", RUNS)
def test_what_is_shown_to_a_person(tiny: Path, name: str) -> None:
    outcome = run(tiny, **RUNS[name])
    text = show(outcome.lines.lines, lambda _: None)
    if outcome.code == 0:
        ids = outcome.streams[0][0]
        assert f"generated_token_ids: {' '.join(map(str, ids))}" in text
        assert "equation W1: hits + page_ins + reads in place == touches" in text and "BROKEN" not in text
        assert "config: policy=" in text and "source=default" in text
        assert "htod_bytes_per_token=" in text and "floor_bytes_per_token=" in text
    if name == "no capture":
        assert "graph_nodes=n/a" in text, "absent is not zero"
    if name == "resident":
        assert "ratio_to_floor=n/a" in text and "bypassed_share_by_bytes=n/a" in text


def test_a_broken_equation_is_shown_broken(tiny: Path) -> None:
    outcome = run(tiny)
    outcome.result["equations"][0] |= {"lhs": 1, "rhs": 2, "holds": False}
    assert "1 == 2 BROKEN" in show(outcome.lines.lines, lambda _: "text")


def test_errors_have_codes_of_their_own() -> None:
    codes = [c.exit_code for c in EngineError.__subclasses__()]
    assert sorted(codes) == list(range(10, 18)) and len(set(codes)) == len(codes)
    assert set(EXIT_KINDS) == {0, *codes}
