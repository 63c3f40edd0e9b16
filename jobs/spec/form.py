"""The shape of a sweep file: every key, its type and its default. Unknown keys and wrong types are refused.

Values that come from the engine's own vocabulary (config names, policies) are checked in `jobs.spec.checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from engine.config import MOST_TIMES
from jobs.model import START_TIMEOUT_S, ArmRole, GateAction, Order, RetriedFault

NAME_RULE = r"^[a-z0-9][a-z0-9._-]*$"
MOST_TOKEN_ID = 2**31 - 1
MOST_ARMS = 64
MOST_SECONDS = 30 * 24 * 3600.0

Scalar = str | int | float | bool | None


def _scalar(value: Any) -> Any:
    if isinstance(value, dict | list):
        raise PydanticCustomError("scalar", "expected one value (text, a number, true, false or null)")
    return value


Name = Annotated[str, Field(pattern=NAME_RULE, max_length=80)]
OneValue = Annotated[Any, BeforeValidator(_scalar)]
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKEN_ID)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKEN_ID)]


class Form(BaseModel):
    """A mapping of a sweep file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelForm(Form):
    """Where a model comes from: `build` a zoo name, or `path` to its folder.

    With `build`: `seed` for a made-up one, `layers` of a geometry, and `hollow` for one without its weights or `poured`
    for one whose weights are made at the disk's rate, and `skew` of its routers.
    """

    build: Text | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    layers: Annotated[int, Field(ge=1)] | None = None
    hollow: bool = False
    poured: bool = False
    skew: Annotated[float, Field(ge=0)] = 0.0
    path: Text | None = None


class PromptForm(Form):
    """A prompt: `ids`, `text` for the model's own tokenizer, or `length` ids that the prompt's name draws."""

    ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    text: Text | None = None
    length: Tokens | None = None


class BuildForm(Form):
    """How an arm's tree is made ready: a shell command, the files below the tree that it makes, and its time."""

    command: Text
    outputs: Annotated[tuple[Text, ...], Field(min_length=1)]
    timeout_s: Seconds = 1800.0


class FigureForm(Form):
    """One figure that a program prints: where it stands, and in which unit."""

    at: Text
    unit: Text


class ReadsForm(Form):
    """How what a program prints is read: paths into one JSON document, or patterns with one group for its text."""

    format: Literal["json", "text"]
    generations: Text | None = None
    ids: Text | None = None
    stop: Text | None = None
    prefill: FigureForm | None = None
    steps: FigureForm | None = None
    counters: dict[str, FigureForm] = {}
    config: dict[str, Text] = {}


class ArmForm(Form):
    """One build and config under comparison. `like` takes another arm's values; what is written here replaces them.

    `command`, `counters` (those that it tells) and `reads` go with the adapter `command`, and `options` with engines
    that nobody here wrote.
    """

    source: Text | None = None
    like: Text | None = None
    role: ArmRole | None = None
    adapter: Text | None = None
    command: Text | None = None
    counters: tuple[Text, ...] | None = None
    reads: ReadsForm | None = None
    options: dict[str, OneValue] | None = None
    build: BuildForm | None = None
    config: dict[str, OneValue] = {}
    env: dict[str, str] = {}


class RunForm(Form):
    """How each run generates."""

    tokens: Tokens
    generations: Annotated[int, Field(ge=1, le=MOST_TIMES)] = 3
    warmups: Annotated[int, Field(ge=0, le=MOST_TIMES)] = 0
    ignore_eos: bool = False
    decode_skip: Tokens = 1
    device: Literal["auto", "sim", "cuda"] = "auto"
    arithmetic: Literal["full", "none"] = "full"


SCREENING = 8
LEAST_SCREENING, LEAST_DECIDING = 2, 4
"""As `jobs.stats` has them, which is read where sweeps are judged alone: it loads scipy."""


class BlocksForm(Form):
    """How many blocks a cell has, in which order each runs the arms, and how often that order is repeated.

    `deciding`: blocks that are run behind them only where they moved in time, and decide alone; without it a share of
    `count` decides. `count` is 1 where it is not told, and 8 with `deciding`.
    """

    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    deciding: Annotated[int, Field(ge=LEAST_DECIDING, le=1000)] | None = None
    order: Order = "ABBA"
    repeats: Annotated[int, Field(ge=1, le=100)] = 1

    @property
    def planned(self) -> int:
        """Blocks that are run whatever they show."""
        return self.count or (1 if self.deciding is None else SCREENING)


class WitnessForm(Form):
    """An expression over one run's counters that must hold for the run to prove anything.

    `arms` empty: in every arm; `where`: in the cells alone whose axes of the matrix have these values.
    """

    expr: Text
    arms: tuple[str, ...] = ()
    where: dict[str, OneValue] = {}


class InvariantForm(Form):
    """An expression over one run's counters that must hold, or the record is broken."""

    expr: Text


class TieForm(Form):
    """Ids that may stand for each other at an index of a prompt's output, where the oracle finds them a near tie."""

    prompt: str
    index: Annotated[int, Field(ge=0)]
    ids: Annotated[tuple[TokenId, ...], Field(min_length=2)]
    reason: Text


class IdentityForm(Form):
    """What "same tokens" means here; `min_tokens` goes with prefix: None asks for all of run.tokens.

    `ties` goes with `near_ties: listed`.
    """

    compare: Literal["full", "prefix"] = "full"
    near_ties: Literal["refuse", "allow", "listed"] = "refuse"
    near_tie_cap: Annotated[float, Field(ge=0)] = 0.1
    scope: tuple[Literal["batch", "card", "driver"], ...] = ("batch", "card", "driver")
    min_tokens: Annotated[int, Field(ge=1)] | None = None
    ties: tuple[TieForm, ...] = ()


class GateForm(Form):
    """What each kind of finding does to the exit code."""

    identity: GateAction = "block"
    exact: GateAction = "block"
    time: GateAction = "advise"


class LimitsForm(Form):
    """Bounds on time and retries."""

    run_timeout_s: Seconds = 600.0
    start_timeout_s: Seconds = START_TIMEOUT_S
    queue_timeout_s: Seconds = 3600.0
    attempts: Annotated[int, Field(ge=1, le=1000)] = 3
    contamination_reruns: Annotated[int, Field(ge=0, le=1000)] = 2
    follow_ups: Annotated[int, Field(ge=0, le=1000)] = 4
    retries: dict[RetriedFault, Annotated[int, Field(ge=0, le=1000)]] = {}


class CardsForm(Form):
    """Which cards may run the sweep: a card model's name, or `any`, and the memory that one must have."""

    class_: Annotated[Text, Field(alias="class")] = "any"
    memory_bytes: Annotated[int, Field(ge=0, lt=2**63)] = 0


class LockForm(Form):
    """An expected id at an index of a prompt's output; a `tripwire` only warns.

    `margin`: least and most, in logits, that the oracle's best id stands above its second there.
    """

    prompt: str
    index: Annotated[int, Field(ge=0)]
    expected: TokenId
    allowed: tuple[TokenId, ...] = ()
    margin: tuple[float, float] | None = None
    tripwire: bool = False


class ExpectationForm(Form):
    """A declared, reviewed change of an exact metric."""

    metric: Text
    cell: Text = "*"
    change: Literal["lower", "higher", "any"] = "any"
    at_most: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    reason: Text


class ExpectationsForm(Form):
    """The file that `expectations:` names."""

    expectations: tuple[ExpectationForm, ...]


class SweepForm(Form):
    """A whole sweep file."""

    sweep: Name
    description: str = ""
    models: Annotated[dict[Name, ModelForm], Field(min_length=1)]
    prompts: Annotated[dict[Name, PromptForm], Field(min_length=1)]
    arms: Annotated[dict[Name, ArmForm], Field(min_length=1, max_length=MOST_ARMS)]
    matrix: dict[str, Annotated[tuple[OneValue, ...], Field(min_length=1)]] = {}
    varies: tuple[str, ...] = ()
    run: RunForm
    blocks: BlocksForm = BlocksForm()
    witnesses: tuple[WitnessForm, ...] = ()
    invariants: tuple[InvariantForm, ...] = ()
    identity: IdentityForm = IdentityForm()
    gate: GateForm = GateForm()
    limits: LimitsForm = LimitsForm()
    cards: CardsForm = CardsForm()
    locks: tuple[LockForm, ...] = ()
    expectations: Text | None = None
    waivers: Text | None = None
    goldens: Text | None = None
