"""The first tables.

Revision 0001, after nothing. Spells out its columns: it must read the same when jobs/tables.py has moved on.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "sweep",
    "scenario",
    "block",
    "run",
    "attempt",
    "event",
    "series",
    "value",
    "sample",
    "token_stream",
    "seam",
    "key_bytes",
    "certificate",
    "certificate_interval",
    "verdict",
    "finding",
    "golden",
    "comment",
)
"""In order of creation; a table stands after those it refers to."""


def upgrade() -> None:
    _asked()
    _happened()
    _measured()
    _measured_in_rows()
    _meant()


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)


def _asked() -> None:
    op.create_table(
        "sweep",
        words("id"),
        words("name"),
        words("state"),
        words("submit_key"),
        words("manifest_digest"),
        words("manifest"),
        integer("request"),
        words("harness_digest"),
        words("harness_version"),
        words("created_at"),
        words("judged_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_sweep"),
        sa.UniqueConstraint("manifest_digest", "submit_key", name="uq_sweep_manifest_digest_submit_key"),
        sa.CheckConstraint("state IN ('open', 'judged')", name=op.f("ck_sweep_state")),
    )
    where = sa.text("submit_key <> ''")
    op.create_index(
        "ix_sweep_submit_key", "sweep", ["submit_key"], unique=True, sqlite_where=where, postgresql_where=where
    )
    op.create_table(
        "scenario",
        words("id"),
        words("sweep_id"),
        integer("position"),
        words("name"),
        words("kind"),
        words("model"),
        words("model_digest"),
        words("prompt_digest"),
        words("card_class"),
        words("plan"),
        sa.PrimaryKeyConstraint("id", name="pk_scenario"),
        to("scenario", "sweep_id"),
        sa.UniqueConstraint("sweep_id", "name", name="uq_scenario_sweep_id_name"),
        sa.UniqueConstraint("sweep_id", "position", name="uq_scenario_sweep_id_position"),
    )
    op.create_table(
        "block",
        words("id"),
        words("sweep_id"),
        words("scenario_id"),
        integer("number"),
        integer("fence"),
        words("worker", nullable=True),
        words("leased_until", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_block"),
        to("block", "sweep_id"),
        to("block", "scenario_id"),
        sa.UniqueConstraint("scenario_id", "number", name="uq_block_scenario_id_number"),
    )
    op.create_index("ix_block_sweep_id", "block", ["sweep_id"])
    op.create_table(
        "run",
        words("id"),
        words("sweep_id"),
        words("scenario_id"),
        words("block_id"),
        integer("position"),
        words("arm"),
        words("state"),
        words("retracted_reason", nullable=True),
        words("retracted_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        to("run", "sweep_id"),
        to("run", "scenario_id"),
        to("run", "block_id"),
        sa.UniqueConstraint("block_id", "position", name="uq_run_block_id_position"),
        sa.CheckConstraint("state IN ('pending', 'complete', 'exhausted')", name=op.f("ck_run_state")),
    )
    op.create_index("ix_run_sweep_id_state", "run", ["sweep_id", "state"])


def _happened() -> None:
    op.create_table(
        "attempt",
        words("id"),
        words("run_id"),
        words("sweep_id"),
        integer("number"),
        integer("fence"),
        words("state"),
        words("reason"),
        words("worker"),
        words("card"),
        words("opened_at"),
        words("closed_at", nullable=True),
        words("record_digest", nullable=True),
        words("flags", nullable=True),
        integer("exit_code", nullable=True),
        integer("signal", nullable=True),
        words("error", nullable=True),
        words("engine_digest", nullable=True),
        words("module_path", nullable=True),
        words("model_digest", nullable=True),
        words("effective_config", nullable=True),
        words("device", nullable=True),
        words("facts", nullable=True),
        words("equations", nullable=True),
        integer("peak_rss_bytes", nullable=True),
        words("started_at", nullable=True),
        words("ended_at", nullable=True),
        words("log_tail", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_attempt"),
        to("attempt", "run_id"),
        to("attempt", "sweep_id"),
        sa.UniqueConstraint("run_id", "number", name="uq_attempt_run_id_number"),
        sa.CheckConstraint(
            "state IN ('claimed', 'clearing', 'running', 'measured', 'refused', 'contaminated', 'failed', 'lost',"
            " 'cancelled')",
            name=op.f("ck_attempt_state"),
        ),
    )
    where = sa.text("state = 'measured'")
    op.create_index(
        "ix_attempt_measured", "attempt", ["run_id"], unique=True, sqlite_where=where, postgresql_where=where
    )
    op.create_index("ix_attempt_sweep_id_state", "attempt", ["sweep_id", "state"])
    op.create_table(
        "event",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        words("sweep_id"),
        words("subject"),
        words("kind"),
        words("frm"),
        words("target"),
        words("message"),
        words("worker"),
        words("at"),
        sa.PrimaryKeyConstraint("seq", name="pk_event"),
        to("event", "sweep_id"),
    )
    op.create_index("ix_event_subject", "event", ["subject"])
    op.create_index("ix_event_sweep_id", "event", ["sweep_id"])


def _measured() -> None:
    op.create_table(
        "series",
        words("id"),
        words("family"),
        words("name"),
        words("model_digest"),
        words("prompt_digest"),
        words("config"),
        words("card"),
        sa.PrimaryKeyConstraint("id", name="pk_series"),
        sa.CheckConstraint("family IN ('counter', 'metric')", name=op.f("ck_series_family")),
    )
    op.create_table(
        "value",
        words("attempt_id"),
        words("series_id"),
        integer("integer", nullable=True),
        real("real", nullable=True),
        words("missing", nullable=True),
        words("flag", nullable=True),
        sa.PrimaryKeyConstraint("attempt_id", "series_id", name="pk_value"),
        to("value", "attempt_id"),
        to("value", "series_id"),
        sa.CheckConstraint(
            "(integer IS NOT NULL AND real IS NULL AND missing IS NULL)"
            " OR (integer IS NULL AND real IS NOT NULL AND missing IS NULL)"
            " OR (integer IS NULL AND real IS NULL AND missing IS NOT NULL)",
            name=op.f("ck_value_one"),
        ),
    )
    op.create_index("ix_value_series_id", "value", ["series_id"])
    op.create_table(
        "sample",
        words("attempt_id"),
        integer("position"),
        words("name"),
        blob("numbers"),
        sa.PrimaryKeyConstraint("attempt_id", "position", "name", name="pk_sample"),
        to("sample", "attempt_id"),
    )
    op.create_table(
        "token_stream",
        words("attempt_id"),
        integer("position"),
        integer("generation"),
        sa.Column("warmup", sa.Boolean(), nullable=False),
        blob("ids"),
        words("ids_digest"),
        words("stop_reason", nullable=True),
        blob("gaps"),
        words("counters"),
        integer("prefill_ns"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_token_stream"),
        to("token_stream", "attempt_id"),
    )
    op.create_index("ix_token_stream_ids_digest", "token_stream", ["ids_digest"])


def _measured_in_rows() -> None:
    op.create_table(
        "seam",
        words("attempt_id"),
        integer("position"),
        integer("step"),
        words("node"),
        words("op"),
        words("reason"),
        words("path"),
        words("detail"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_seam"),
        to("seam", "attempt_id"),
    )
    op.create_table(
        "key_bytes",
        words("attempt_id"),
        integer("position"),
        words("key"),
        integer("nbytes"),
        integer("hits"),
        integer("retained"),
        integer("bypassed"),
        integer("evicted"),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_key_bytes"),
        to("key_bytes", "attempt_id"),
    )
    op.create_table(
        "certificate",
        words("attempt_id"),
        words("uuid"),
        words("card"),
        words("driver"),
        words("verdict"),
        words("grade"),
        words("reasons"),
        words("before"),
        words("after"),
        words("during"),
        integer("samples"),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_certificate"),
        to("certificate", "attempt_id"),
    )
    op.create_index("ix_certificate_uuid", "certificate", ["uuid"])
    op.create_table(
        "certificate_interval",
        words("attempt_id"),
        integer("position"),
        real("start_s"),
        real("end_s"),
        words("what"),
        integer("pid", nullable=True),
        sa.PrimaryKeyConstraint("attempt_id", "position", name="pk_certificate_interval"),
        to("certificate_interval", "attempt_id"),
    )


def _meant() -> None:
    op.create_table(
        "verdict",
        words("id"),
        words("sweep_id"),
        integer("number"),
        words("input_digest"),
        words("digest"),
        words("document"),
        words("outcome"),
        integer("exit_code"),
        words("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_verdict"),
        to("verdict", "sweep_id"),
        sa.UniqueConstraint("sweep_id", "number", name="uq_verdict_sweep_id_number"),
    )
    op.create_table(
        "finding",
        words("verdict_id"),
        integer("position"),
        words("outcome"),
        words("cell"),
        words("arm"),
        words("message"),
        words("gate"),
        integer("exit_code"),
        sa.PrimaryKeyConstraint("verdict_id", "position", name="pk_finding"),
        to("finding", "verdict_id"),
    )
    op.create_index("ix_finding_outcome", "finding", ["outcome"])
    op.create_table(
        "golden",
        words("id"),
        words("attempt_id"),
        words("cell"),
        words("ids_digest"),
        words("reason"),
        words("created_at"),
        words("retracted_reason", nullable=True),
        words("retracted_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_golden"),
        to("golden", "attempt_id"),
    )
    op.create_index("ix_golden_cell", "golden", ["cell"])
    op.create_table(
        "comment",
        words("id"),
        words("verdict_id"),
        words("repository"),
        integer("pull_request"),
        words("remote_id"),
        words("digest"),
        words("posted_at"),
        sa.PrimaryKeyConstraint("id", name="pk_comment"),
        to("comment", "verdict_id"),
    )
    op.create_index("ix_comment_repository_pull_request", "comment", ["repository", "pull_request"])


def words(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def integer(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=nullable)


def real(name: str, *, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=nullable)


def blob(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary(), nullable=False)


def to(table: str, column: str) -> sa.ForeignKeyConstraint:
    """A foreign key from `X_id` to the table X."""
    return sa.ForeignKeyConstraint([column], [column.removesuffix("_id") + ".id"], name=f"fk_{table}_{column}")
