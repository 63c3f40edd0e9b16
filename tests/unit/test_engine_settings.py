"""The engine's config on the command line: every name has one option, read alike by every command."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.commands.settings import add_settings, settings_of
from engine.config import CONFIG_NAMES, EngineConfig, check
from engine.errors import BadRequest
from tests.unit.engine_rig import build_tiny

GIVEN = (
    *("--batch", "2", "--weight-budget", "50%", "--vram-limit", "1000", "--policy", "lru", "--capture", "off"),
    *("--granule", "8192", "--prefill-chunk", "3", "--kv-capacity", "64", "--kv-layout", "head-major"),
    *("--kv-min-bucket", "32", "--prefix-reuse", "on", "--capture-rules", "split_sizes", "--experts", "whole"),
    *("--target", "fused"),
)
HOT = ("--policy", "stable_slot", "--hot-experts", "routing.json")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def read(*words: str) -> dict[str, object]:
    """What a command line of settings alone gives."""
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return settings_of(parser.parse_args(words))


def test_every_name_of_the_config_has_an_option_and_nothing_else_has() -> None:
    assert frozenset(read(*GIVEN, *HOT)) == CONFIG_NAMES == {field.name for field in fields(EngineConfig)}


def test_every_options_help_tells_the_default_that_the_config_has() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    for action in parser._actions:
        if (name := action.dest) in CONFIG_NAMES:
            told = re.search(r"\(default: (.+)\)$", str(action.help))
            assert told, name
            default = getattr(EngineConfig(), name)
            if default is not None:
                assert read(f"--{name.replace('_', '-')}", told[1]) == {name: default}


@pytest.mark.parametrize("command", ["run", "hazards"])
def test_a_commands_own_defaults_are_told_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    rows = re.findall(r"--(tokens|generations|warmups) [A-Z]+ ([^(]*)\(default: (\d+)\)", told)
    assert [(name, int(value)) for name, _, value in rows] == (
        [("tokens", 32), ("generations", 1), ("warmups", 0)]
        if command == "run"
        else [("tokens", 8), ("generations", 3)]
    )
    assert "False" not in told and "None" not in told


def test_help_is_named_as_the_user_called_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for program in ("assay engine", "python -P -m engine"):
        assert main(["frob"], *([program] if program.startswith("assay") else [])) == 10
        assert f"(see `{program} --help`)" in capsys.readouterr().err
        assert main(["run", "--frob"], *([program] if program.startswith("assay") else [])) == 10
        assert f"(see `{program} --help`)" in capsys.readouterr().err


def test_every_value_arrives_as_the_config_wants_it_and_differs_from_the_default() -> None:
    assert check(read(*GIVEN)) == EngineConfig(
        batch=2,
        weight_budget="50%",
        vram_limit=1000,
        policy="lru",
        capture=False,
        granule=8192,
        prefill_chunk=3,
        kv_capacity=64,
        kv_layout="head-major",
        kv_min_bucket=32,
        prefix_reuse=True,
        capture_rules="split_sizes",
        experts="whole",
        target="fused",
    )
    hot, plain = check(read(*HOT)), EngineConfig()
    assert (hot.policy, hot.hot_experts) == ("stable_slot", "routing.json")
    given = {name for name in CONFIG_NAMES if getattr(check(read(*GIVEN)), name) != getattr(plain, name)}
    assert given == CONFIG_NAMES - {"hot_experts"}


def test_what_is_not_given_is_left_to_the_default() -> None:
    assert read() == {}


@pytest.mark.parametrize("budget", ["²", "half", "-1", "0", "1.5", "", "0%", "101%"])
@pytest.mark.parametrize("command", ["run", "plan", "logits", "hazards"])
def test_a_budget_that_is_none_is_one_line_for_every_command(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, budget: str
) -> None:
    more = {"plan": (), "logits": ("--out", str(tmp_path / "x.npz"))}.get(command, ("--tokens", "2"))
    prompt = () if command == "plan" else ("--prompt-ids", "1 2")
    assert main([command, "--model", str(tiny), *prompt, *more, f"--weight-budget={budget}"]) == BadRequest.exit_code
    assert capsys.readouterr().err.startswith("error: weight_budget is ")


def test_a_budget_in_bytes_arrives_as_a_number() -> None:
    assert read("--weight-budget", "4096") == {"weight_budget": 4096}
