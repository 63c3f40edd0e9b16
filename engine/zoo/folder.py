"""A built model's folder: what the zoo writes beside the weights, and how it comes to stand there whole.

A folder holds model.onnx, model.onnx.data, genai_config.json, zoo.json and, where the model knows words, its tokenizer;
zoo.json carries where the model came from and the digest of every other file. A hollow folder has all but the weights:
its data file is a hole of the right size, which plans can be made from and `fill` makes whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadRequest, ModelFilesError
from engine.zoo.external import WrittenFile, write_file
from engine.zoo.fetch import sha256_of
from engine.zoo.genai import CONFIG_FILE
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.tokenizer_json import json_bytes
from engine.zoo.writer import DATA_FILE, MODEL_FILE, DecoderGeometry

ZOO_FILE = "zoo.json"
ZOO_FORMAT = 1
ELSEWHERE = "choose another --out"
"""What to do about a folder that cannot be built into, where the user named it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that fixes a build's bytes: two builds of one recipe are the same files."""

    name: str
    builder_version: int
    source: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Hex sha256 of the recipe."""
        parts = {"name": self.name, "builder": self.builder_version, "source": self.source, "options": self.options}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Written:
    """What a builder put into the folder it was handed, for zoo.json."""

    files: list[WrittenFile]
    geometry: DecoderGeometry | HybridGeometry
    facts: Mapping[str, Any]
    hollow_bytes: int | None = None
    """Size of the data file where it is a hole."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that stands ready; `built` is False when the folder held this very build already."""

    name: str
    folder: Path
    model_digest: str
    built: bool
    zoo: Mapping[str, Any]
    """zoo.json as written: source, options, files, geometry, facts."""

    @property
    def size_bytes(self) -> int:
        return sum(int(file["bytes"]) for file in self.zoo["files"])

    @property
    def hollow_bytes(self) -> int | None:
        """Bytes of weights that are still to be filled in; None where they are there."""
        hollow: int | None = self.zoo.get("hollow_bytes")
        return hollow

    def __str__(self) -> str:
        what = "built" if self.built else "already there, nothing to do"
        if self.hollow_bytes is not None:
            what += f", hollow: {self.hollow_bytes} bytes of weights are made by `assay models fill`"
        return f"{self.name}: {self.folder} ({what}; {self.size_bytes} bytes; model digest {self.model_digest})"


def install(out: Path, recipe: Recipe, write: Callable[[Path], Written], elsewhere: str = ELSEWHERE) -> ModelFacts:
    """Build into a scratch folder beside `out` and rename it there; a folder with the same build is left alone.

    Raises BadRequest when `out` holds anything else, ModelFilesError when it holds this build damaged; `elsewhere` is
    what a refusal advises.
    """
    out = out.absolute()
    standing = _standing_build(out, recipe, elsewhere)
    if standing is not None:
        return standing
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    except OSError as error:
        raise BadRequest(f"cannot write to {out.parent}: {error.strerror}", elsewhere) from error
    try:
        zoo = _describe(recipe, write(scratch))
        write_file(scratch / ZOO_FILE, json_bytes(zoo))
        scratch.chmod(0o755)
        try:
            scratch.rename(out)
        except OSError:
            # Another process may have finished the same build first.
            other = _standing_build(out, recipe, elsewhere)
            if other is None:
                raise
            return other
    except OSError as error:
        raise ModelFilesError(f"building into {out} failed: {error}", f"free space there, or {elsewhere}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ModelFacts(recipe.name, out, zoo["model_digest"], True, zoo)


def _standing_build(out: Path, recipe: Recipe, elsewhere: str) -> ModelFacts | None:
    """The build of this recipe that `out` holds; None when there is no folder or an empty one."""
    if not out.exists() and not out.is_symlink():
        return None
    if not out.is_dir():
        raise BadRequest(f"{out} is not a folder", f"delete it first, or {elsewhere}")
    if not any(out.iterdir()):
        return None
    remedy = f"delete that folder first, or {elsewhere}"
    try:
        zoo: dict[str, Any] = json.loads((out / ZOO_FILE).read_bytes())
        same, digest, files = zoo["recipe_key"] == recipe.key, str(zoo["model_digest"]), zoo["files"]
        standing = str(zoo["name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadRequest(f"{out} holds something that is no zoo model", remedy) from None
    if not same:
        raise BadRequest(f"{out} holds another build ({standing}), not this {recipe.name}", remedy)
    for file in files:
        path = out / str(file["name"])
        if not path.is_file() or sha256_of(path) != file["sha256"]:
            raise ModelFilesError(f"{out} holds this build, but {path.name} is missing or changed", remedy)
    return ModelFacts(recipe.name, out, digest, False, zoo)


def fill(folder: Path, recipe: Recipe, write: Callable[[Path], Written]) -> ModelFacts:
    """Put the weights into a hollow folder of this recipe; `write` makes all its files in a scratch folder.

    The graph must come out as it stands. The note that the folder is hollow goes last, so that a build that was cut off
    is still refused. Raises ModelFilesError where the folder cannot be written or holds another graph.
    """
    zoo = read_zoo(folder)
    if zoo.get("hollow_bytes") is None:
        return ModelFacts(recipe.name, folder, str(zoo["model_digest"]), False, zoo)
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".filling-"))
        described = _describe(recipe, write(scratch))
        write_file(scratch / ZOO_FILE, json_bytes(described))
        for name in (MODEL_FILE, CONFIG_FILE):
            if sha256_of(scratch / name) != sha256_of(folder / name):
                raise ModelFilesError(f"{folder / name} is not what its recipe gives", "build into another folder")
        for name in (DATA_FILE, ZOO_FILE):
            (scratch / name).replace(folder / name)
    except OSError as error:
        raise ModelFilesError(f"filling {folder} failed: {error}", "free space there") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return ModelFacts(recipe.name, folder, described["model_digest"], True, described)


def read_zoo(folder: Path) -> dict[str, Any]:
    """zoo.json of a built folder. Raises ModelFilesError where there is none."""
    try:
        zoo = json.loads((folder / ZOO_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFilesError(
            f"{folder} is no zoo build: {ZOO_FILE} cannot be read ({type(error).__name__})",
            "build it with `assay models build`",
        ) from error
    if not isinstance(zoo, dict):
        raise ModelFilesError(f"{folder / ZOO_FILE} does not hold an object", "build the model again")
    return zoo


def _describe(recipe: Recipe, written: Written) -> dict[str, Any]:
    files = sorted(written.files, key=lambda file: file.name)
    digests = {file.name: file.sha256 for file in files}
    model = [CONFIG_FILE, MODEL_FILE, DATA_FILE]
    if written.hollow_bytes is not None:
        digests[DATA_FILE] = hollow_words(recipe.key)
    return {
        "format": ZOO_FORMAT,
        "name": recipe.name,
        "builder": {"name": "assay zoo", "version": recipe.builder_version},
        "recipe_key": recipe.key,
        "source": dict(recipe.source),
        "options": dict(recipe.options),
        "geometry": asdict(written.geometry),
        "facts": dict(written.facts),
        "files": [{"name": file.name, "bytes": file.size_bytes, "sha256": file.sha256} for file in files],
        "model_digest": digest_of((name, digests[name]) for name in sorted(model)),
        **({} if written.hollow_bytes is None else {"hollow_bytes": written.hollow_bytes}),
    }


def hollow_words(recipe_key: str) -> str:
    """What stands for the digest of weights that are still to be made."""
    return f"hollow, to be filled by {recipe_key}"


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """The model digest: hex sha256 over (relative name, hex sha256) pairs, in the order given."""
    digest = hashlib.sha256()
    for name, sha256 in files:
        digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()
