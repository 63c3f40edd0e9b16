"""Keep what the oracle was asked about a sweep, and what it said.

Revision 0005, after 0004. Nothing was asked before.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adjudication",
        sa.Column("sweep_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("question_digest", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sweep_id", "number", name="pk_adjudication"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name="fk_adjudication_sweep_id"),
        sa.UniqueConstraint("sweep_id", "question_digest", name="uq_adjudication_sweep_id_question_digest"),
    )


def downgrade() -> None:
    op.drop_table("adjudication")
