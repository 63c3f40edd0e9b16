"""What the configs of a model folder say: genai_config.json for names and numbers, else Hugging Face's for numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_files import AGAIN, inside, read_object

GENAI, GENERATION, HUGGING_FACE = "genai_config.json", "generation_config.json", "config.json"
DEFAULT_GRAPH = "model.onnx"
STANDARD = {name: name for name in ("input_ids", "attention_mask", "position_ids", "logits")}
"""What exporters call an input or output where nothing is said."""


@dataclass(frozen=True, slots=True)
class Told:
    """Names and numbers that configs give; None and absent names are not said. Names with %d take the layer number."""

    filename: str
    names: Mapping[str, str]
    """input_ids, attention_mask, position_ids, logits, past_key, past_value, present_key, present_value."""
    states: tuple[tuple[str, str], ...]
    """Past and present name patterns of convolution and recurrent states."""
    layers: int | None
    heads: tuple[int, int] | None
    """Key heads, and elements of one."""
    vocabulary: int | None
    context_length: int | None
    eos_ids: tuple[int, ...]
    sources: Mapping[str, str]
    """Of `vocabulary`, `context_length` and `eos_ids`: the file that gave it."""

    @property
    def files(self) -> frozenset[str]:
        """The configs that decided something."""
        return frozenset(self.sources.values())


def read_configs(folder: Path) -> Told:
    """What the folder's configs say. Raises ModelFilesError for one that is broken, UnsupportedModel for its caches."""
    genai = read_object(folder, GENAI)
    numbers = _of_genai(genai) if genai is not None else _of_hugging_face(folder)
    eos_ids, eos_source = _end_ids(folder, genai)
    if eos_source:
        numbers.sources["eos_ids"] = eos_source
    if genai is None:
        return Told(_only_graph(folder), {}, (), None, None, numbers.vocabulary, numbers.context_length, eos_ids,
                    numbers.sources)  # fmt: skip
    decoder = _section(genai, "model", "decoder")
    inputs, outputs = (_names(decoder, side) for side in ("inputs", "outputs"))
    many = "num_key_value_heads" if "num_key_value_heads" in decoder else "num_attention_heads"
    return Told(
        filename=str(decoder.get("filename", DEFAULT_GRAPH)),
        names=_singles(inputs, outputs) | _patterns(inputs, outputs),
        states=_states(inputs, outputs),
        layers=_whole(decoder, "num_hidden_layers"),
        heads=(_whole(decoder, many), _whole(decoder, "head_size")),
        vocabulary=numbers.vocabulary,
        context_length=numbers.context_length,
        eos_ids=eos_ids,
        sources=numbers.sources,
    )


def graph_path(folder: Path, told: Told) -> Path:
    """The graph's file. Raises ModelFilesError where it lies outside the folder."""
    return inside(folder, told.filename, f"{GENAI}: ")


@dataclass(slots=True)
class _Numbers:
    vocabulary: int | None
    context_length: int | None
    sources: dict[str, str]


def _of_genai(config: dict[str, Any]) -> _Numbers:
    """A config that is there must be whole: a builder's config without its numbers is a broken export."""
    _section(config, "model", "decoder")
    model = _section(config, "model")
    sources = {"names": GENAI, "vocabulary": GENAI, "context_length": GENAI}
    return _Numbers(_whole(model, "vocab_size"), _whole(model, "context_length"), sources)


def _of_hugging_face(folder: Path) -> _Numbers:
    config = _text_part(read_object(folder, HUGGING_FACE) or {})
    given = {"vocabulary": "vocab_size", "context_length": "max_position_embeddings"}
    found = {fact: _whole(config, key, HUGGING_FACE) for fact, key in given.items() if config.get(key) is not None}
    return _Numbers(found.get("vocabulary"), found.get("context_length"), dict.fromkeys(found, HUGGING_FACE))


def _end_ids(folder: Path, genai: dict[str, Any] | None) -> tuple[tuple[int, ...], str]:
    """End ids and the file that gives them, "" where none does: nearest to the graph first."""
    if genai is not None:
        model = _section(genai, "model")
        if model.get("eos_token_id") is not None:
            return _ids(model, GENAI), GENAI
    for name in (GENERATION, HUGGING_FACE):
        config = _text_part(read_object(folder, name) or {}, "eos_token_id")
        if config.get("eos_token_id") is not None:
            return _ids(config, name), name
    return (), ""


def _text_part(config: dict[str, Any], key: str = "vocab_size") -> dict[str, Any]:
    """The config of a text model; one of several modalities has it in a section of its own."""
    part = config.get("text_config")
    return part if isinstance(part, dict) and config.get(key) is None else config


def _ids(section: dict[str, Any], file: str) -> tuple[int, ...]:
    given = section["eos_token_id"]
    ids = tuple(given) if isinstance(given, list) else (given,)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFilesError(f"{file}: eos_token_id holds {value!r}", AGAIN)
    return ids


def _only_graph(folder: Path) -> str:
    """model.onnx, or the one graph of a folder that has it under another name. Raises ModelFilesError for several."""
    if (folder / DEFAULT_GRAPH).exists():
        return DEFAULT_GRAPH
    found = sorted(path.name for path in folder.glob("*.onnx"))
    if len(found) > 1:
        raise ModelFilesError(
            f"{folder} holds several graphs: {', '.join(found)}",
            f"name the decoder's file {DEFAULT_GRAPH}, or write {GENAI} with model.decoder.filename",
        )
    return found[0] if found else DEFAULT_GRAPH


def _section(config: dict[str, Any], *names: str) -> dict[str, Any]:
    here: Any = config
    for name in names:
        here = here.get(name) if isinstance(here, dict) else None
    if not isinstance(here, dict):
        raise ModelFilesError(f"{GENAI} lacks {'.'.join(names)}", AGAIN)
    return here


def _names(decoder: dict[str, Any], side: str) -> dict[str, Any]:
    return _section(decoder, side) if side in decoder else {}


def _singles(inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, str]:
    found = {**inputs, **{n: v for n, v in outputs.items() if n == "logits"}}
    return {name: str(found[name]) for name in STANDARD if name in found}


def _patterns(inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, str]:
    if "past_names" in inputs or "present_names" in outputs:
        raise UnsupportedModel(
            f"{GENAI} names caches that hold keys and values in one ({inputs.get('past_names')!r}): that is not served",
            "export with keys and values apart",
        )
    given = ((inputs, "past_key"), (inputs, "past_value"), (outputs, "present_key"), (outputs, "present_value"))
    return {name: _per_layer(side, f"{name}_names") for side, name in given if f"{name}_names" in side}


def _states(inputs: dict[str, Any], outputs: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Name patterns of states: every past_*_names beside keys and values, with its present_*_names."""
    made = []
    for name in sorted(inputs):
        if name.startswith("past_") and name.endswith("_names") and name not in ("past_key_names", "past_value_names"):
            made.append((_per_layer(inputs, name), _per_layer(outputs, "present_" + name.removeprefix("past_"))))
    return tuple(made)


def _whole(section: dict[str, Any], name: str, file: str = GENAI) -> int:
    value = section.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFilesError(f"{file}: {name} is {value!r}, not a whole number above zero", AGAIN)
    return value


def _per_layer(section: dict[str, Any], name: str) -> str:
    pattern = section.get(name)
    if not isinstance(pattern, str) or pattern.count("%") != 1 or "%d" not in pattern:
        raise ModelFilesError(f"{GENAI}: {name} is {pattern!r}, not a name with one %d for the layer", AGAIN)
    return pattern
