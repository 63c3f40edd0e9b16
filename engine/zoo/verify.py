"""What a model folder is worth: are its files whole, do its names agree, and is it the build it says it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import onnx

from engine.errors import ModelFilesError, UnsupportedModel
from engine.graph import Graph, sources
from engine.model_config import read_configs
from engine.onnx_load import load
from engine.zoo.fetch import sha256_of
from engine.zoo.folder import ZOO_FILE, digest_of, hollow_words
from engine.zoo.writer import DATA_FILE

_REBUILD = "delete the folder and build or export the model again"


class State(StrEnum):
    """Outcome of one check; UNKNOWN is never good."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a folder: what was looked at, the outcome, and what to do when it is not OK."""

    what: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings on one folder; `model_digest` is computed from the files as they lie, None when they cannot be."""

    folder: Path
    findings: tuple[Finding, ...]
    model_digest: str | None

    @property
    def ok(self) -> bool:
        return all(finding.state is State.OK for finding in self.findings)


def check(folder: Path) -> CheckReport:
    """Check files, sizes, names and digests of a model folder; nothing is raised, every fault is a finding."""
    try:
        graph = load(folder, hollow=True)
    except (ModelFilesError, UnsupportedModel) as error:
        broken = Finding("graph and data", State.BAD, error.message, error.remedy)
        return CheckReport(folder, (broken, *_recorded_files(folder)), None)
    findings = [Finding("graph and data", State.OK, f"{len(graph.nodes)} nodes, {len(graph.weights)} weights")]
    findings.append(Finding("bound by", State.OK, sources(graph.info.bound_by)))
    findings += _names(graph)
    findings += _recorded_files(folder)
    if (folder / ZOO_FILE).is_file() and "hollow_bytes" in _zoo(folder):
        still = Finding("weights", State.UNKNOWN, "still to be made", f"run `assay models fill {folder}`")
        return CheckReport(folder, (*findings, still), None)
    digest = model_digest(folder)
    findings += _recorded_digest(graph, digest)
    return CheckReport(folder, tuple(findings), digest)


def model_digest(folder: Path, *, hollow: bool = False) -> str:
    """Hex sha256 over (relative name, sha256) of the graph, its external data and the configs that decide anything.

    The tokenizer is not in it: runs are compared by prompt ids. `hollow` takes a folder whose weights are still to be
    made, too: its recipe then stands for them. Raises ModelFilesError for a folder that does not load,
    UnsupportedModel for one with element types that are not served.
    """
    files = model_files(folder, hollow=hollow)
    zoo = _zoo(folder) if (folder / ZOO_FILE).is_file() else {}
    stand_in = {DATA_FILE: hollow_words(zoo["recipe_key"])} if "hollow_bytes" in zoo else {}
    return digest_of((name, stand_in.get(name) or sha256_of(folder / name)) for name in files)


def model_files(folder: Path, *, hollow: bool = False) -> list[str]:
    """Names, sorted, of the files that fix what the model computes, relative to `folder`; raises as `load` does."""
    load(folder, hollow=hollow)  # every file is there, whole, inside the folder and no pointer
    told = read_configs(folder)
    model = onnx.load_model(str(folder / told.filename), load_external_data=False)
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return sorted({*told.files, told.filename, *locations})


def _names(graph: Graph) -> Iterator[Finding]:
    """Every input is ids, mask, positions, or a layer's cache or state; further outputs are not asked for."""
    info = graph.info
    pasts = {name for c in info.caches for name in (c.past_key, c.past_value)} | {past for past, _ in info.states}
    stray = sorted(graph.inputs.keys() - pasts - {info.input_ids, info.attention_mask, info.position_ids})
    if stray:
        yield Finding("inputs names", State.BAD, f"nothing says what these are: {', '.join(stray)}", _REBUILD)
    else:
        yield Finding("inputs names", State.OK, f"{len(graph.inputs)} inputs, all of them known")


def _recorded_files(folder: Path) -> Iterator[Finding]:
    """Size and digest of each file that zoo.json lists."""
    if not (folder / ZOO_FILE).is_file():
        why = f"no {ZOO_FILE}: this is no zoo build, and nothing says which bytes it should hold"
        yield Finding("recorded digests", State.UNKNOWN, why, "build it with `assay models build` to have digests")
        return
    try:
        files = [(str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in _zoo(folder)["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(ZOO_FILE, State.BAD, f"{folder / ZOO_FILE} cannot be read: {error!r}", _REBUILD)
        return
    for name, size_bytes, sha256 in files:
        path = folder / name
        if not path.is_file():
            yield Finding(name, State.BAD, "missing", _REBUILD)
        elif path.stat().st_size != size_bytes:
            yield Finding(name, State.BAD, f"{path.stat().st_size} bytes, not {size_bytes}", _REBUILD)
        elif (found := sha256_of(path)) != sha256:
            yield Finding(name, State.BAD, f"sha256 {found}, not {sha256}", _REBUILD)
        else:
            yield Finding(name, State.OK, f"{size_bytes} bytes, sha256 {sha256}")


def _recorded_digest(graph: Graph, digest: str) -> Iterator[Finding]:
    recorded = graph.digest
    if recorded == digest:
        yield Finding("model digest", State.OK, digest)
    elif recorded is not None:
        yield Finding("model digest", State.BAD, f"{digest}, not the recorded {recorded}", _REBUILD)


def _zoo(folder: Path) -> dict[str, Any]:
    zoo: dict[str, Any] = json.loads((folder / ZOO_FILE).read_bytes())
    return zoo
