"""What a run is asked to do: the request, checked, with the source of every value."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from engine import PROTOCOL
from engine.capture_rules import ALL, parse_rules
from engine.errors import BadRequest
from engine.kv_layout import LAYOUTS, LEAST_BUCKET_TOKENS
from engine.model_files import can_be_path
from engine.plan import TARGETS

POLICIES = ("stable", "lru", "stable_slot", "size_first", "staging", "zero_copy")
EXPERTS = ("routed", "whole")
"""Where not all weights fit: a bank's experts are read one by one, as they are chosen, or all of them with any."""
DEVICES = ("auto", "sim", "cuda")
ARITHMETIC = ("full", "none")
"""`none`: a plan-only run, in which pager, ledger and capture are real and nothing is computed."""
CONFIG_NAMES = frozenset(
    {
        *("weight_budget", "vram_limit", "policy", "capture", "granule", "prefill_chunk"),
        *("kv_capacity", "kv_layout", "kv_min_bucket", "prefix_reuse", "batch", "capture_rules"),
        *("experts", "hot_experts", "target"),
    }
)
"""Every name that `config` of a request, and so an arm or a matrix of a sweep, may hold."""

Source = Literal["request", "default", "derived"]
MOST_TOKENS = 2**31 - 1
MOST_TIMES = 1_000_000
"""Most generations, and most warm-ups, of a run: beyond is a slip of the hand, and would never end."""
MOST_SEQUENCES = 65_536
MOST_BYTES = 2**63 - 1
GRANULES_BYTES = tuple(1 << power for power in range(12, 31))
"""4 KiB to 1 GiB: what a simulated device's granule may be."""
_MOST = {
    **dict.fromkeys(("prefill_chunk", "kv_capacity", "kv_min_bucket"), MOST_TOKENS),
    "batch": MOST_SEQUENCES,
    **dict.fromkeys(("weight_budget", "vram_limit"), MOST_BYTES),
}
_SHARE = re.compile(r"(100(?:\.0{1,6})?|[0-9]{1,2}(?:\.[0-9]{1,6})?)%")
_BUDGET_REMEDY = "give bytes above zero, or a share of W above 0% and up to 100%, such as 50%"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine holds weights and runs steps.

    `weight_budget` bounds weights alone: bytes, or a share of W such as "50%", or None for no bound. `vram_limit`
    bounds weights, KV cache and workspace together, in bytes. `granule` is the simulated device's granule in bytes
    (None: the device's own). A sequence's KV cache starts in the smallest bucket that holds it, a power of two from
    `kv_min_bucket` tokens, and grows through larger ones up to `kv_capacity` tokens (None: as the run needs).
    With `prefix_reuse` a generation keeps what its prompt shares with the positions cached before it.
    `batch` sequences run side by side, each with one of the request's prompts in turn (None: one a prompt).
    `capture_rules` are those in force, by name: "all", "none", or some joined by "+" (engine/capture_rules.py).
    `experts` is how banks of experts are read that do not all fit. `hot_experts` is the file of a recorded routing:
    those that it read most are the ones that `stable_slot` keeps (None: the first ones of the first banks).
    `target` says what the plan's steps are made for (None: what suits the device, fused on a card).
    """

    weight_budget: int | str | None = None
    vram_limit: int | None = None
    policy: str = "stable"
    capture: bool = True
    granule: int | None = None
    prefill_chunk: int = 512
    kv_capacity: int | None = None
    kv_layout: str = "seq-major"
    kv_min_bucket: int = LEAST_BUCKET_TOKENS
    prefix_reuse: bool = False
    batch: int | None = None
    capture_rules: str = ALL
    experts: str = "routed"
    hot_experts: str | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run, as the parent or the command line asks for it. A batch has further prompts, of any lengths."""

    model: Path
    prompt_ids: tuple[int, ...]
    tokens: int
    generations: int = 1
    warmups: int = 0
    ignore_eos: bool = False
    decode_skip: int = 1
    device: str = "auto"
    uuid: str | None = None
    arithmetic: Literal["full", "none"] = "full"
    config: EngineConfig = EngineConfig()
    given: frozenset[str] = field(default=frozenset())
    """Names of `config` that the request itself set; the rest are defaults."""
    further_prompts: tuple[tuple[int, ...], ...] = ()
    routing: str | None = None
    """Experts that a run without arithmetic is to ask for: a trace's file, or seed:N."""
    routing_out: str | None = None
    """File to record the experts in that a run in full asks for."""
    log_capture: bool = False
    """Whether to say each decision of the capture planner and of what holds its graphs, in lines of their own."""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """The prompt of each sequence: those given, from the first again where the batch has more sequences."""
        given = (self.prompt_ids, *self.further_prompts)
        return tuple(given[sequence % len(given)] for sequence in range(self.config.batch or len(given)))


def cards_can_be_called() -> bool:
    """Whether this environment has the library that the CUDA device is made with; `auto` stands for sim without it."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # not even the package above it
        return False


def check(config: Mapping[str, Any]) -> EngineConfig:
    """Turn the names and values of a `config` object, each for itself, into an EngineConfig.

    What they are together, and beside the rest of a request, `parse_request` checks. Raises BadRequest naming the
    unknown name with its nearest known one, or the value and what is accepted.
    """
    for name in config:
        if name not in CONFIG_NAMES:
            raise BadRequest(f"unknown engine config {name!r}", _nearest(name, CONFIG_NAMES))
    made = EngineConfig(**config)
    if isinstance(made.weight_budget, str):
        parse_share(made.weight_budget)
    elif made.weight_budget is not None and not _is_whole(made.weight_budget):
        raise BadRequest(f"weight_budget is {made.weight_budget!r}", _BUDGET_REMEDY)
    _check_numbers(made)
    if made.policy not in POLICIES:
        raise BadRequest(f"unknown policy {made.policy!r}", f"known policies: {', '.join(POLICIES)}")
    if made.kv_layout not in LAYOUTS:
        raise BadRequest(f"unknown kv_layout {made.kv_layout!r}", _nearest(str(made.kv_layout), frozenset(LAYOUTS)))
    parse_rules(made.capture_rules)
    if made.experts not in EXPERTS:
        raise BadRequest(f"unknown experts {made.experts!r}", f"known: {', '.join(EXPERTS)}")
    if made.hot_experts is not None and not (_is_text(made.hot_experts) and can_be_path(made.hot_experts)):
        raise BadRequest(
            f"hot_experts is {made.hot_experts!r}", "hot_experts is the file of a routing, from --routing-out"
        )
    if made.target is not None and made.target not in TARGETS:
        raise BadRequest(f"unknown target {made.target!r}", f"known targets: {', '.join(TARGETS)}")
    for name in ("capture", "prefix_reuse"):
        if not isinstance(getattr(made, name), bool):
            raise BadRequest(f"{name} is {getattr(made, name)!r}", f"{name} is true or false")
    return made


def _check_numbers(made: EngineConfig) -> None:
    for name in ("vram_limit", "granule", "prefill_chunk", "kv_capacity", "kv_min_bucket", "batch"):
        value = getattr(made, name)
        if not _is_whole(value) and (value is not None or name in ("prefill_chunk", "kv_min_bucket")):
            raise BadRequest(f"{name} is {value!r}", f"{name} takes a whole number above zero")
    for name, most in _MOST.items():
        value = getattr(made, name)
        if isinstance(value, int) and value > most:
            raise BadRequest(f"{name} is {value}", f"at most {most}")
    if made.granule is not None and made.granule not in GRANULES_BYTES:
        raise BadRequest(
            f"granule is {made.granule}",
            f"a granule is a power of two, {GRANULES_BYTES[0]} bytes to {GRANULES_BYTES[-1]} bytes",
        )


def parse_share(text: str) -> float:
    """Share of W in a text such as "50%": a fraction in (0, 1].

    Raises BadRequest for anything else.
    """
    match = _SHARE.fullmatch(text)
    share = float(match.group(1)) / 100 if match else 0.0
    if share == 0:
        raise BadRequest(f"weight_budget is {text!r}", _BUDGET_REMEDY)
    return share


def parse_request(document: object) -> RunRequest:
    """Check a request document and make a RunRequest of it.

    Raises BadRequest on a wrong protocol, an unknown key, an empty prompt, zero tokens or a value out of range.
    """
    if not isinstance(document, dict):
        raise BadRequest("the request is not a JSON object", "see engine/schemas/run_request.json")
    body = dict(document)
    protocol = body.pop("protocol", None)
    if type(protocol) is not int or protocol not in (PROTOCOL, PROTOCOL - 1):
        raise BadRequest(f"request protocol {protocol!r} is not served", f"this engine speaks {PROTOCOL}")
    known = {f.name for f in fields(RunRequest)} - {"given"}
    for name in body:
        if name not in known:
            raise BadRequest(f"unknown request key {name!r}", _nearest(name, known))
    for name in ("model", "prompt_ids", "tokens"):
        if name not in body:
            raise BadRequest(f"the request lacks {name!r}", "see engine/schemas/run_request.json")
    config = body.pop("config", {})
    if not isinstance(config, dict):
        raise BadRequest("request key 'config' is not an object", "see engine/schemas/run_request.json")
    model = body.pop("model")
    if not isinstance(model, str) or not model or not can_be_path(model):
        raise BadRequest(f"model is {model!r}", "give the model's folder")
    ids = body.pop("prompt_ids")
    if not isinstance(ids, list):
        raise BadRequest(f"prompt_ids is {ids!r}", "give a list of token ids")
    further = body.pop("further_prompts", [])
    if not isinstance(further, list) or not all(isinstance(prompt, list) for prompt in further):
        raise BadRequest(f"further_prompts is {further!r}", "give a list of prompts, each a list of token ids")
    request = RunRequest(
        model=Path(model),
        prompt_ids=check_ids(ids),
        further_prompts=tuple(check_ids(prompt) for prompt in further),
        config=check(config),
        given=frozenset(config),
        **body,
    )
    _check_scalars(request)
    _check_together(request)
    return request


def _check_together(request: RunRequest) -> None:
    """What each value allows for itself and the request as a whole does not."""
    config, prompts = request.config, 1 + len(request.further_prompts)
    if config.batch is not None and config.batch < prompts:
        raise BadRequest(f"batch is {config.batch} and there are {prompts} prompts", "give a prompt a sequence at most")
    if config.hot_experts is not None and (config.policy != "stable_slot" or config.experts != "routed"):
        raise BadRequest(
            f"hot_experts has no effect with policy {config.policy!r} and experts {config.experts!r}",
            "give it to policy stable_slot with experts routed, whose resident set is fixed",
        )
    if config.prefix_reuse and request.warmups == 0:
        raise BadRequest("prefix_reuse without a warm-up measures a cold cache among warm ones", "give 1 warm-up")
    positions = max(map(len, request.prompts)) + request.tokens - 1
    if config.kv_capacity is not None and config.kv_capacity < positions:
        raise BadRequest(
            f"kv_capacity {config.kv_capacity} is below the {positions} positions of prompt and tokens", "raise it"
        )


def check_ids(ids: object) -> tuple[int, ...]:
    """A prompt as token ids: a list of whole numbers, at least one, none negative."""
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise BadRequest("the prompt is empty", "give at least one token id")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise BadRequest(f"prompt id {value!r} is not a token id", "token ids are whole numbers from 0")
    return tuple(ids)


def read_request(path: Path) -> RunRequest:
    """Read and check a request file. Raises BadRequest."""
    try:
        return parse_request(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"request file {path} cannot be read: {error}", "give a JSON file") from error


def _check_scalars(request: RunRequest) -> None:
    bounds = {"tokens": (1, MOST_TOKENS), "generations": (1, MOST_TIMES), "warmups": (0, MOST_TIMES),
              "decode_skip": (1, MOST_TOKENS)}  # fmt: skip
    for name, (low, high) in bounds.items():
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(f"{name} is {value!r}", f"{name} takes a whole number from {low} to {high}")
    for name in ("ignore_eos", "log_capture"):
        if not isinstance(getattr(request, name), bool):
            raise BadRequest(f"{name} is {getattr(request, name)!r}", f"{name} is true or false")
    if request.device not in DEVICES:
        raise BadRequest(f"unknown device {request.device!r}", f"known devices: {', '.join(DEVICES)}")
    if request.arithmetic not in ARITHMETIC:
        raise BadRequest(f"arithmetic is {request.arithmetic!r}", f"known: {', '.join(ARITHMETIC)}")
    if request.arithmetic == "none" and request.device == "cuda":
        raise BadRequest("a run without arithmetic uses no card", "leave the device out, or use sim")
    for name, arithmetic in (("routing", "none"), ("routing_out", "full")):
        value = getattr(request, name)
        if value is not None and (not isinstance(value, str) or not value or not can_be_path(value)):
            raise BadRequest(f"{name} is {value!r}", f"{name} is a file's path" + " or seed:N" * (name == "routing"))
        if value is not None and request.arithmetic != arithmetic:
            what = "computes its own routing" if arithmetic == "none" else "has none of its own to record"
            raise BadRequest(f"{name} is given to a run that {what}", "give routing to a run without arithmetic only")
    if request.uuid is not None and not isinstance(request.uuid, str):
        raise BadRequest(f"uuid is {request.uuid!r}", "uuid is the card's UUID as text")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _nearest(name: str, known: frozenset[str] | set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
