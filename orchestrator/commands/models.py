"""`assay models`: the zoo, building one of its models, and checking a model folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine import zoo
from engine.errors import ModelFilesError
from orchestrator.commands.terminal import JsonOption, say, say_json, say_table, settings_for

FAULTY = ModelFilesError.exit_code


def add_to(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Build and check models.", no_args_is_help=True)
    group.command("list")(list_models)
    group.command("build")(build)
    group.command("fill")(fill)
    group.command("check")(check)
    app.add_typer(group, name="models")


def list_models(as_json: JsonOption = False) -> None:
    """List the models that can be built here."""
    known = zoo.list_models()
    if as_json:
        say_json([asdict(info) for info in known])
        return
    rows = tuple((m.name, f"{m.size_bytes / 1e6:.0f} MB", m.licence, m.summary, m.needs or "nothing") for m in known)
    say_table("models", ("name", "size", "licence", "what", "needs"), rows)


def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a name of `assay models list`")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="the folder to make")],
    source: Annotated[
        Path | None, typer.Option("--source", metavar="PATH", help="a file to build from instead of fetching it")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help=f"seed of a model made in code (default: {zoo.DEFAULT_SEED})")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="build so many layers only")] = None,
    hollow: Annotated[
        bool, typer.Option("--hollow", help="graph and recipe now, in no space; weights when `fill` is called")
    ] = False,
    no_peak: Annotated[
        bool, typer.Option("--no-peak", help="leave the head random: spares the forward passes that make answers clear")
    ] = False,
    poured: Annotated[
        bool, typer.Option("--poured", help="weights at the disk's rate, a pool of numbers over and over; no peak")
    ] = False,
    skew: Annotated[
        float, typer.Option("--skew", help="how unevenly routers choose experts: rows differ by e^SKEW either way")
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Build a model into a folder, whole or not at all."""
    cache = settings_for().downloads
    built = zoo.build(
        name,
        out,
        source=source,
        seed=seed,
        layers=layers,
        hollow=hollow,
        peaked=not no_peak,
        poured=poured,
        skew=skew,
        cache_dir=cache,
    )
    _say_built(built, as_json)


def fill(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a hollow model's folder")], as_json: JsonOption = False
) -> None:
    """Make the weights of a hollow model from its recipe."""
    _say_built(zoo.fill(folder), as_json)


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a model's folder")], as_json: JsonOption = False
) -> None:
    """Check a model folder's files, sizes, names and digests."""
    report = zoo.check(folder)
    if as_json:
        say_json({"folder": str(folder), "ok": report.ok, "model_digest": report.model_digest,
                  "findings": [asdict(finding) for finding in report.findings]})  # fmt: skip
    else:
        for finding in report.findings:
            remedy = f" ({finding.remedy})" if finding.remedy else ""
            say(f"{finding.state:<8} {finding.what}: {finding.detail}{remedy}")
    raise typer.Exit(0 if report.ok else FAULTY)


def _say_built(facts: zoo.ModelFacts, as_json: bool) -> None:
    if as_json:
        say_json({"name": facts.name, "folder": str(facts.folder), "model_digest": facts.model_digest,
                  "built": facts.built, "size_bytes": facts.size_bytes, "hollow_bytes": facts.hollow_bytes,
                  "zoo": dict(facts.zoo)})  # fmt: skip
    else:
        say(str(facts))
