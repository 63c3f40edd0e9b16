"""The documents that pass between parts: what was asked, what was measured, what it means.

Three documents, each JSON with a `schema` word: a `Manifest` (fixed at submission), a `JudgeInput` (everything the
judge may read) and a `Verdict` (everything a renderer may show). All are frozen; equal content has an equal digest.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, final

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from jobs.contract import IdentityContract
from jobs.document import Document
from jobs.near_tie import Adjudication
from jobs.noise import Calibration
from jobs.reads import Reads
from jobs.redact import redact
from jobs.reviewed import Expectation, Reviewed

# ---- readings ----------------------------------------------------------------------------------------------------


@final
class Missing(Document):
    """A reading that is not there, and why. Never zero, never equal to anything, never a pass.

    Where every figure of a sweep passes, ask `type(reading) is Missing`: `isinstance` with a pydantic class is slow.
    """

    missing: str


Reading = Annotated[int | float | Missing, Field(union_mode="left_to_right")]


def as_read(value: Reading) -> Reading:
    """A reading as its own JSON is read back: a float without a fraction, as far as 64 bits go, is a whole number."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**63 else value


# ---- what was asked ----------------------------------------------------------------------------------------------

GateAction = Literal["block", "advise", "off"]
Order = Literal["ABBA", "random", "sequential", "once"]
ArmRole = Literal["base", "head", "null", "variant", "anchor"]


class Gate(Document):
    """What may turn the exit code red: each kind of finding blocks or advises."""

    identity: GateAction = "block"
    exact: GateAction = "block"
    time: GateAction = "advise"


class Witness(Document):
    """An expression over one run's counters that must hold, or the run proves nothing (VACUOUS)."""

    expr: str
    arms: tuple[str, ...] = ()  # empty: every arm


class Invariant(Document):
    """An equation over one run's counters that must hold, or the record is broken."""

    expr: str


class Lock(Document):
    """An expected id at an index; `tripwire` only warns."""

    prompt: str
    index: int
    expected: int
    allowed: tuple[int, ...] = ()
    margin: tuple[float, float] | None = None
    tripwire: bool = False


class BuildFailure(Document):
    """Why an arm could not be built, in one line, and the last lines that its command printed."""

    reason: str
    log_tail: str = ""


class BuildPlan(Document):
    """How an arm's tree is made ready before it runs: a shell command and the files, below the tree, that it makes.

    `failure` says that it was tried and did not succeed; such an arm has no tree and cannot run.
    """

    command: str
    outputs: tuple[str, ...]
    timeout_s: float = 1800.0
    failure: BuildFailure | None = None


class ArmPlan(Document):
    """One build + config under comparison, resolved.

    `source` is what the user wrote (git ref, path, "checkout", "installed"); `tree_digest` the digest of the engine
    tree that the child must report, a build's outputs included; `python_path` where the child imports it from (None:
    the installed package). Of the adapter `command`, `python_path` is the root of the program's tree, `counters` are
    those that it says it tells, and `reads` is how what it prints is read (None: it speaks the child protocol). Of an
    engine that nobody here wrote `options` are what it is told beside the engine's config, and the digest is the
    harness's, which holds what drives it.
    """

    name: str
    role: ArmRole
    source: str
    adapter: str = "native"
    commit: str | None = None
    tree_digest: str = ""
    python_path: str | None = None
    config: dict[str, str | int | float | bool | None] = {}
    env: dict[str, str] = {}
    command: tuple[str, ...] = ()
    build: BuildPlan | None = None
    counters: tuple[str, ...] = ()
    note: str = ""  # on how its commit was found
    pack: str = ""  # the digest of its tree as it was shipped: see jobs.arm_packs
    reads: Reads | None = None
    options: dict[str, str | int | bool | None] = {}

    @property
    def unbuilt(self) -> str:
        """Why this arm could not be built, in one line; empty when it was, or needs no build."""
        failure = None if self.build is None else self.build.failure
        return "" if failure is None else f"build failed: {redact(failure.reason)}"

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there were builds and other engines where it has none: stored manifests keep digests."""
        fields: dict[str, Any] = serialize(self)
        for name in ("build", "counters", "reads", "note", "pack", "options"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields


PLAN_ONLY = "plan"
"""Kind of the device that computes nothing; a sweep asks for it by `arithmetic: none`."""


class RunSettings(Document):
    """How each run generates; without arithmetic it plans alone, and gives no tokens."""

    tokens: int
    generations: int = 3
    warmups: int = 0
    ignore_eos: bool = False
    decode_skip: int = 1
    device: Literal["auto", "sim", "cuda"] = "auto"
    arithmetic: Literal["full", "none"] = "full"

    @property
    def plan_only(self) -> bool:
        """Whether nothing is computed, so that there are no tokens."""
        return self.arithmetic == "none"

    @model_serializer(mode="wrap")
    def _without_full_arithmetic(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there was a choice where arithmetic is full: stored manifests keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if self.arithmetic == "full":
            fields.pop("arithmetic", None)
        return fields


class CellPlan(Document):
    """One scenario: one model x prompt set x engine config x card class; the unit that is judged."""

    cell: str  # readable, unique in the sweep: "smollm2/capital/weight_budget=50%/capture=on"
    kind: Literal["decode", "kernel"] = "decode"
    model: str
    model_path: str
    model_digest: str
    prompt: str
    prompt_ids: tuple[int, ...]
    card_class: str = "any"
    card_memory_bytes: int = 0  # that a card must have; 0: any
    config: dict[str, str | int | float | bool | None] = {}
    settings: RunSettings
    arms: tuple[str, ...]
    blocks: int = 1
    fresh_blocks: int = 0  # that decide where the others moved in time; 0: some of the others decide
    order: Order = "ABBA"
    repeats: int = 1  # ABBA per block, times
    witnesses: tuple[Witness, ...] = ()
    invariants: tuple[Invariant, ...] = ()
    locks: tuple[Lock, ...] = ()
    further_prompts: tuple[tuple[int, ...], ...] = ()  # of the further sequences of the widest arm's batch

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there were batches and bounds on a card: stored manifests keep their digests."""
        fields: dict[str, Any] = serialize(self)
        for name in ("further_prompts", "card_memory_bytes", "fresh_blocks"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields

    def batch(self, arm: ArmPlan) -> int:
        """How many sequences an arm runs side by side; its own config wins over the cell's."""
        asked = {**self.config, **arm.config}.get("batch")
        return asked if isinstance(asked, int) else 1

    def prompts(self, arm: ArmPlan) -> tuple[tuple[int, ...], ...]:
        """The prompts that an arm's sequences take in turn, its batch at most."""
        return (self.prompt_ids, *self.further_prompts)[: self.batch(arm)]


RetriedFault = Literal["crash", "timeout", "out_of_memory", "device", "start", "lost"]
"""Classes of error that another attempt may not meet: the others are facts of the arm, the same each time."""


START_TIMEOUT_S = 300.0
"""Within which a child says who it is: it has imported, found its card, read the graph and planned by then."""


class Limits(Document):
    """Bounds on time and retries."""

    run_timeout_s: float = 600.0
    start_timeout_s: float = START_TIMEOUT_S
    queue_timeout_s: float = 3600.0
    attempts: int = 3
    contamination_reruns: int = 2
    follow_ups: int = 4
    retries: dict[RetriedFault, int] = {}  # class of error -> further tries of its own, beside `attempts`

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there were such bounds where they are the usual: stored manifests keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if not self.retries:
            fields.pop("retries", None)
        if self.start_timeout_s == START_TIMEOUT_S:
            fields.pop("start_timeout_s", None)
        return fields


class Manifest(Document):
    """Everything a sweep will do, fixed at submission; the verdict is a function of it."""

    schema_: Literal["assay.manifest/1"] = Field("assay.manifest/1", alias="schema")
    name: str
    description: str = ""
    source_text: str = ""  # the sweep file as submitted
    arms: tuple[ArmPlan, ...]
    cells: tuple[CellPlan, ...]
    varies: tuple[str, ...] = ()
    gate: Gate = Gate()
    identity: IdentityContract = IdentityContract()
    limits: Limits = Limits()
    expectations: tuple[Expectation, ...] = ()
    proposed: tuple[Expectation, ...] = ()  # in the file on disk and not in base's: shown, and not in force
    reviewed: Reviewed = Reviewed()

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    @model_serializer(mode="wrap")
    def _without_absent_proposals(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before proposals were told where there is none: stored manifests keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if not self.proposed:
            fields.pop("proposed", None)
        if self.reviewed.is_empty:
            fields.pop("reviewed", None)
        return fields


# ---- what was measured -------------------------------------------------------------------------------------------

AttemptState = Literal[
    "claimed", "clearing", "running", "measured", "refused", "contaminated", "failed", "lost", "cancelled"
]
RunState = Literal["pending", "complete", "exhausted"]
StopReason = Literal["length", "eos"]


class SequenceTokens(Document):
    """What one sequence of a batch gave out in one generation."""

    ids: tuple[int, ...]
    stop_reason: StopReason | None  # None: cut off by an error
    gaps: tuple[float, ...] = ()  # top-2 logit gap at each id


class Generation(SequenceTokens):
    """One generation of one run: tokens, stop reason, counters by phase, time per one-token step in ns."""

    index: int
    warmup: bool
    counters: dict[str, dict[str, int | float]] = {}  # phase -> counter -> value
    prefill_ns: int = 0
    step_ns: tuple[int, ...] = ()
    further: tuple[SequenceTokens, ...] = ()  # of a batch's other sequences; its first one is the generation itself

    @property
    def number(self) -> int:
        """The generation as people count, from 1: warm-ups count too."""
        return self.index + 1

    @property
    def sequences(self) -> tuple[SequenceTokens, ...]:
        """Every sequence's tokens, the first one's first."""
        return (self, *self.further)

    @model_serializer(mode="wrap")
    def _without_absent_sequences(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there were batches where there is one sequence: stored records keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if not self.further:
            fields.pop("further", None)
        return fields


class SeamRow(Document):
    """One plan step that runs outside a captured segment."""

    step: int
    node: str
    op: str
    reason: str
    path: str
    detail: str = ""


class KeyBytes(Document):
    """One key's traffic over a run: touches by how they were served, and bytes of rows gathered in place."""

    key: str
    nbytes: int
    hits: int = 0
    retained: int = 0
    bypassed: int = 0
    evicted: int = 0
    staged: int = 0
    in_place: int = 0
    gathered_bytes: int = 0

    @property
    def streamed(self) -> int:
        """How often it crossed the link."""
        return self.retained + self.bypassed + self.staged + self.in_place

    @property
    def streamed_bytes(self) -> int:
        """What of it crossed the link."""
        return self.streamed * self.nbytes


class Equation(Document):
    """An invariant as evaluated: lhs `relation` rhs."""

    name: str
    text: str
    relation: Literal["==", "<=", ">="]
    lhs: int | float
    rhs: int | float
    holds: bool


class Interval(Document):
    """A stretch of time in which something stood on the card, seconds since the attempt's start."""

    start_s: float
    end_s: float
    what: str
    pid: int | None = None


class Certificate(Document):
    """What NVML and the host said before, during and after an attempt.

    `grade`: how far foreign processes could be told apart (pids: host PIDs seen; memory: only memory deltas;
    scripted: a simulated card). `verdict` unknown is not clear.
    """

    uuid: str
    card: str
    driver: str
    verdict: Literal["clear", "contended", "throttled", "unknown"]
    grade: Literal["pids", "memory", "scripted", "none"]
    reasons: tuple[str, ...] = ()
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    samples: int = 0
    during: dict[str, Any] = {}  # min/max/median of clocks, temperature, power, utilisation; throttle bits seen
    intervals: tuple[Interval, ...] = ()


class RunRecord(Document):
    """Everything one complete attempt measured."""

    run_id: str
    attempt_id: str
    attempt_number: int
    exit_code: int | None
    signal: int | None = None
    error: str | None = None  # kind: message (remedy)
    engine_digest: str = ""  # as verified by the parent
    module_path: str = ""
    model_digest: str = ""
    effective_config: dict[str, Any] = {}  # name -> {"value", "source"}
    device: dict[str, Any] = {}  # kind, name, uuid, driver, granule_bytes, profile
    generations: tuple[Generation, ...] = ()
    counters: dict[str, Reading] = {}  # totals over measured generations; gauges at the end
    metrics: dict[str, Reading] = {}  # jobs.metrics over the counters
    facts: dict[str, int | float | str] = {}  # plan facts: weight_bytes, largest_key_bytes, floor..., capacities
    seams: tuple[SeamRow, ...] = ()
    keys: tuple[KeyBytes, ...] = ()
    equations: tuple[Equation, ...] = ()
    certificate: Certificate | None = None
    peak_rss_bytes: int | None = None
    started_at: str = ""  # UTC, ISO 8601
    ended_at: str = ""
    log_tail: str = ""
    flags: tuple[str, ...] = ()  # "place: what stood there", for each thing that could not be kept as it came

    @property
    def card_name(self) -> str:
        """The card's model as the worker's certificate names it; as the engine says only where that is silent."""
        return (self.certificate.card if self.certificate else "") or str(self.device.get("name") or "")


class AttemptFact(Document):
    """An attempt as history: also those that were set aside."""

    attempt_id: str
    number: int
    state: AttemptState
    reason: str = ""


class RunFact(Document):
    """One run of the manifest: where it stood, how it ended, what it measured."""

    run_id: str
    block_id: str
    block: int
    position: int
    arm: str
    state: RunState
    attempts: tuple[AttemptFact, ...] = ()
    record: RunRecord | None = None
    retracted: str | None = None


class CellInput(Document):
    """A cell of the manifest with its runs."""

    plan: CellPlan
    runs: tuple[RunFact, ...]


class Stamp(Document):
    """Where a verdict comes from."""

    sweep_id: str
    request: int = 0
    harness_digest: str
    harness_version: str
    judge_digest: str = ""  # of the harness that judged, and its version: another one may judge again
    judge_version: str = ""
    base_source: str = ""
    head_source: str = ""
    created_at: str = ""  # when the sweep was submitted, UTC
    cards: tuple[str, ...] = ()


class JudgeInput(Document):
    """All that the judge may read; judging is a pure function of it."""

    schema_: Literal["assay.judge-input/1"] = Field("assay.judge-input/1", alias="schema")
    manifest: Manifest
    manifest_digest: str
    cells: tuple[CellInput, ...]
    adjudications: tuple[Adjudication, ...] = ()  # answers to what the judge asked for
    retracted_goldens: dict[str, str] = {}  # id -> why, of goldens whose runs were retracted since
    calibrations: tuple[Calibration, ...] = ()  # of these scenarios, from before the sweep was submitted
    stamp: Stamp

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    @model_serializer(mode="wrap")
    def _without_absent_answers(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before the judge could ask where it did not: inputs of stored verdicts keep their digests."""
        fields: dict[str, Any] = serialize(self)
        for name in ("adjudications", "retracted_goldens", "calibrations"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields
