"""The store's tables: what was asked, what happened, what was measured, what it means.

Ids are prefixed ULIDs made by the client. Times are UTC. Integers are 64-bit. Nothing is deleted: a row is retracted
with a reason. A change here needs a migration in alembic/versions, which spells out its own columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, get_args

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    text,
)

from jobs.column_types import Numbers, StrictJson, UtcTime, Words
from jobs.lifecycle import SweepState
from jobs.model import AttemptState, RunState

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)
"""Every constraint is named by rule, or SQLite could never drop it."""


def _id() -> Column[str]:
    return Column("id", Words, primary_key=True)


def _to(table: str, *, part_of_key: bool = False, name: str = "") -> Column[str]:
    return Column(name or f"{table}_id", Words, ForeignKey(f"{table}.id"), primary_key=part_of_key, nullable=False)


def _words(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Words, nullable=nullable)


def _integer(name: str, *, nullable: bool = False, part_of_key: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable, primary_key=part_of_key, autoincrement=False)


def _zero(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"))


def _json(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, StrictJson, nullable=nullable)


def _time(name: str, *, nullable: bool = False) -> Column[datetime]:
    return Column(name, UtcTime, nullable=nullable)


def _one_of(column: str, words: Sequence[str]) -> CheckConstraint:
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


# ---- what was asked ----------------------------------------------------------------------------------------------

sweep = Table(
    "sweep",
    metadata,
    _id(),
    _words("name"),
    _words("state"),
    _words("submit_key"),  # the client's word against submitting twice; empty: the manifest alone decides
    _words("manifest_digest"),
    _json("manifest"),
    _integer("request"),
    _words("harness_digest"),
    _words("harness_version"),
    _time("created_at"),
    _time("judged_at", nullable=True),
    _zero("priority"),  # lower goes first
    _words("retracted_reason", nullable=True),
    _time("retracted_at", nullable=True),
    _one_of("state", SweepState),
    UniqueConstraint("manifest_digest", "submit_key"),
    Index("ix_sweep_state_priority_created_at", "state", "priority", "created_at"),
    # all that a list of sweeps shows: in a row of the table it stands behind the manifest, which may have megabytes
    Index("ix_sweep_listed", "created_at", "id", "name", "state", "judged_at", "priority", "retracted_at"),
    Index(
        "ix_sweep_submit_key",
        "submit_key",
        unique=True,
        sqlite_where=text("submit_key <> ''"),
        postgresql_where=text("submit_key <> ''"),
    ),
)

scenario = Table(
    "scenario",
    metadata,
    _id(),
    _to("sweep"),
    _integer("position"),
    _words("name"),
    _words("kind"),
    _words("model"),
    _words("model_digest"),
    _words("prompt_digest"),
    _words("card_class"),
    _zero("card_memory_bytes"),  # asked of a card; 0: any
    _json("plan"),
    UniqueConstraint("sweep_id", "name"),
    UniqueConstraint("sweep_id", "position"),
    Index("ix_scenario_sweep_id_model", "sweep_id", "model"),
)

block = Table(
    "block",
    metadata,
    _id(),
    _to("sweep"),
    _to("scenario"),
    _integer("number"),
    _integer("fence"),  # one higher with each claim and each broken lease
    _words("worker", nullable=True),
    _time("leased_until", nullable=True),
    _zero("place"),  # in the order of its sweep
    _zero("runs_left"),  # pending ones
    _words("card", nullable=True),  # the one it was last claimed for
    _words("waits", nullable=True),  # why it waits though it is leased
    UniqueConstraint("scenario_id", "number"),
    Index("ix_block_sweep_id", "sweep_id"),
    Index(
        "ix_block_queue",
        "sweep_id",
        "place",
        sqlite_where=text("runs_left > 0"),
        postgresql_where=text("runs_left > 0"),
    ),
    Index(
        "ix_block_leased",
        "sweep_id",
        sqlite_where=text("worker IS NOT NULL"),
        postgresql_where=text("worker IS NOT NULL"),
    ),
)

run = Table(
    "run",
    metadata,
    _id(),
    _to("sweep"),
    _to("scenario"),
    _to("block"),
    _integer("position"),
    _words("arm"),
    _words("state"),
    _words("retracted_reason", nullable=True),
    _time("retracted_at", nullable=True),
    _one_of("state", get_args(RunState)),
    UniqueConstraint("block_id", "position"),
    Index("ix_run_sweep_id_state", "sweep_id", "state"),
)

# ---- what happened -----------------------------------------------------------------------------------------------

attempt = Table(
    "attempt",
    metadata,
    _id(),
    _to("run"),
    _to("sweep"),
    _integer("number"),
    _integer("fence"),
    _words("state"),
    _words("reason"),
    _words("worker"),
    _words("card"),
    _time("opened_at"),
    _time("closed_at", nullable=True),
    # of the record; all NULL until one is written
    _words("record_digest", nullable=True),
    _json("flags", nullable=True),  # what could not be stored as it came: place -> what it was
    _integer("exit_code", nullable=True),
    _integer("signal", nullable=True),
    _words("error", nullable=True),
    _words("engine_digest", nullable=True),
    _words("module_path", nullable=True),
    _words("model_digest", nullable=True),
    _json("effective_config", nullable=True),
    _json("device", nullable=True),
    _json("facts", nullable=True),
    _json("equations", nullable=True),
    _integer("peak_rss_bytes", nullable=True),
    _words("started_at", nullable=True),
    _words("ended_at", nullable=True),
    _words("log_tail", nullable=True),
    Column("fault", Words, nullable=False, server_default=text("''")),  # the class of error that ended it
    _one_of("state", get_args(AttemptState)),
    UniqueConstraint("run_id", "number"),
    Index(
        "ix_attempt_measured",
        "run_id",
        unique=True,
        sqlite_where=text("state = 'measured'"),
        postgresql_where=text("state = 'measured'"),
    ),
    Index("ix_attempt_sweep_id_state", "sweep_id", "state"),
)

card = Table(
    "card",
    metadata,
    Column("uuid", Words, primary_key=True),
    _words("name"),
    _zero("memory_bytes"),  # 0: not known
    _words("host"),
    _words("worker"),
    _words("scheduler"),
    _words("state"),  # clear, busy, unknown, drained
    _words("reason"),
    _time("since"),
    _time("until", nullable=True),
    _time("seen_at"),
)

arm_pack = Table(
    "arm_pack",
    metadata,
    Column("digest", Words, primary_key=True),
    _integer("size_bytes"),
    _time("used_at"),  # by the newest submission
)

arm_chunk = Table(
    "arm_chunk",
    metadata,
    Column("digest", Words, ForeignKey("arm_pack.digest"), primary_key=True, nullable=False),
    _integer("position", part_of_key=True),
    Column("data", LargeBinary, nullable=False),
)

event = Table(
    "event",
    metadata,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    _to("sweep"),
    _words("subject"),  # the id of what it is about
    _words("kind"),
    _words("frm"),
    _words("target"),
    _words("message"),
    _words("worker"),
    _time("at"),
    Index("ix_event_sweep_id_seq", "sweep_id", "seq"),
    Index("ix_event_subject", "subject"),
)

# ---- what was measured -------------------------------------------------------------------------------------------

series = Table(
    "series",
    metadata,
    _id(),
    _words("family"),  # counter or metric: a name may be both
    _words("name"),
    _words("model_digest"),
    _words("prompt_digest"),
    _json("config"),  # effective config and run settings
    _words("card"),
    _one_of("family", ("counter", "metric")),
)

value = Table(
    "value",
    metadata,
    _to("attempt", part_of_key=True),
    _to("series", part_of_key=True),
    _integer("integer", nullable=True),
    Column("real", Double, nullable=True),
    _words("missing", nullable=True),  # the reason
    _words("flag", nullable=True),  # what stood there when it was no storable number: nan, inf ...
    CheckConstraint(
        "(integer IS NOT NULL AND real IS NULL AND missing IS NULL)"
        " OR (integer IS NULL AND real IS NOT NULL AND missing IS NULL)"
        " OR (integer IS NULL AND real IS NULL AND missing IS NOT NULL)",
        name="one",
    ),
    Index("ix_value_series_id", "series_id"),
)

sample = Table(
    "sample",
    metadata,
    _to("attempt", part_of_key=True),
    _integer("position", part_of_key=True),  # of the generation's first stream
    Column("name", Words, primary_key=True),  # step_ns
    Column("numbers", Numbers("q"), nullable=False),
)

token_stream = Table(
    "token_stream",
    metadata,
    _to("attempt", part_of_key=True),
    _integer("position", part_of_key=True),
    _integer("generation"),  # its index; warm-ups count apart
    Column(
        "sequence", BigInteger, nullable=False, server_default=text("0")
    ),  # of a batch; the others follow sequence 0
    Column("warmup", Boolean, nullable=False),
    Column("ids", Numbers("q"), nullable=False),
    _words("ids_digest"),
    _words("stop_reason", nullable=True),
    Column("gaps", Numbers("d"), nullable=False),
    _json("counters"),  # phase -> counter -> value
    _integer("prefill_ns"),
    Index("ix_token_stream_ids_digest", "ids_digest"),
)

seam = Table(
    "seam",
    metadata,
    _to("attempt", part_of_key=True),
    _integer("position", part_of_key=True),
    _integer("step"),
    _words("node"),
    _words("op"),
    _words("reason"),
    _words("path"),
    _words("detail"),
)

key_bytes = Table(
    "key_bytes",
    metadata,
    _to("attempt", part_of_key=True),
    _integer("position", part_of_key=True),
    _words("key"),
    _integer("nbytes"),
    _integer("hits"),
    _integer("retained"),
    _integer("bypassed"),
    _integer("evicted"),
    *(_zero(name) for name in ("staged", "in_place", "gathered_bytes")),
)

certificate = Table(
    "certificate",
    metadata,
    _to("attempt", part_of_key=True),
    _words("uuid"),
    _words("card"),
    _words("driver"),
    _words("verdict"),
    _words("grade"),
    _json("reasons"),
    _json("before"),
    _json("after"),
    _json("during"),
    _integer("samples"),
    Index("ix_certificate_uuid", "uuid"),
)

certificate_interval = Table(
    "certificate_interval",
    metadata,
    _to("attempt", part_of_key=True),
    _integer("position", part_of_key=True),
    Column("start_s", Double, nullable=False),
    Column("end_s", Double, nullable=False),
    _words("what"),
    _integer("pid", nullable=True),
)

# ---- what it means -----------------------------------------------------------------------------------------------

adjudication = Table(
    "adjudication",
    metadata,
    _to("sweep", part_of_key=True),
    _integer("number", part_of_key=True),
    _words("question_digest"),
    _json("document"),
    _time("created_at"),
    UniqueConstraint("sweep_id", "question_digest"),
)

verdict = Table(
    "verdict",
    metadata,
    _id(),
    _to("sweep"),
    _integer("number"),
    _words("input_digest"),
    _words("digest"),  # of the whole document
    _json("document"),  # without its cells and findings, which have rows of their own
    _words("outcome"),
    _integer("exit_code"),
    _time("created_at"),
    UniqueConstraint("sweep_id", "number"),
    Index("ix_verdict_in_force", "sweep_id", "number", "outcome", "exit_code", "created_at", "id"),
)

cell_verdict = Table(
    "cell_verdict",
    metadata,
    _to("verdict", part_of_key=True),
    _integer("position", part_of_key=True),  # in the document
    _words("cell"),
    _words("model"),
    _words("outcome"),
    _integer("exit_code"),
    _json("document"),
    Index("ix_cell_verdict_kind", "verdict_id", "outcome", "exit_code", "position"),
)

finding = Table(
    "finding",
    metadata,
    _to("verdict", part_of_key=True),
    _integer("position", part_of_key=True),
    _words("outcome"),
    _words("cell"),
    _words("arm"),
    _words("message"),
    _words("gate"),
    _integer("exit_code"),
    _json("document", nullable=True),
    Index("ix_finding_outcome", "outcome"),
    Index("ix_finding_kind", "verdict_id", "outcome", "exit_code"),
)

golden = Table(
    "golden",
    metadata,
    _id(),
    _to("attempt"),
    _words("cell"),
    _words("ids_digest"),
    _words("reason"),
    _time("created_at"),
    _words("retracted_reason", nullable=True),
    _time("retracted_at", nullable=True),
    _json("document", nullable=True),  # all of it, as its reviewed file has it
    Index("ix_golden_cell", "cell"),
)

citation = Table(
    "citation",
    metadata,
    Column("citing", Words, primary_key=True),  # a verdict or a golden
    Column("cited", Words, primary_key=True),  # what it rests on: a golden, run or sweep
    Index("ix_citation_cited", "cited"),
)

calibration = Table(
    "calibration",
    metadata,
    _to("scenario", part_of_key=True),
    Column("metric", Words, primary_key=True),
    Column("uuid", Words, primary_key=True),
    _words("scenario_digest"),
    _words("card"),
    _integer("blocks"),
    Column("sigma", Double, nullable=False),  # of the blocks' log ratios
    Column("smallest_detectable", Double, nullable=True),  # NULL: beyond any use
    _integer("budget_blocks"),  # planned blocks at which it could be detected
    _time("created_at"),
    Index("ix_calibration_scenario_digest", "scenario_digest"),
)

comment = Table(
    "comment",
    metadata,
    _id(),
    _to("verdict"),
    _words("repository"),
    _integer("pull_request"),
    _words("remote_id"),
    _words("digest"),  # of the text as posted
    _time("posted_at"),
    Index("ix_comment_repository_pull_request", "repository", "pull_request"),
)
