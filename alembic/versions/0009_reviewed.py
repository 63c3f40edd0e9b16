"""Keep what was retracted and what cites it, goldens with all of their provenance, and the noise of scenarios on cards.

Revision 0009, after 0008. No sweep was retracted before, no golden was written, and nothing was calibrated.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sweep", sa.Column("retracted_reason", sa.Text(), nullable=True))
    op.add_column("sweep", sa.Column("retracted_at", sa.Text(), nullable=True))
    op.add_column("golden", sa.Column("document", sa.Text(), nullable=True))
    op.create_table(
        "citation",
        sa.Column("citing", sa.Text(), nullable=False),
        sa.Column("cited", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("citing", "cited", name="pk_citation"),
    )
    op.create_index("ix_citation_cited", "citation", ["cited"])
    op.create_table(
        "calibration",
        sa.Column("scenario_id", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("scenario_digest", sa.Text(), nullable=False),
        sa.Column("card", sa.Text(), nullable=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("sigma", sa.Double(), nullable=False),
        sa.Column("smallest_detectable", sa.Double(), nullable=True),
        sa.Column("budget_blocks", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("scenario_id", "metric", "uuid", name="pk_calibration"),
        sa.ForeignKeyConstraint(["scenario_id"], ["scenario.id"], name="fk_calibration_scenario_id"),
    )
    op.create_index("ix_calibration_scenario_digest", "calibration", ["scenario_digest"])


def downgrade() -> None:
    op.drop_index("ix_calibration_scenario_digest", "calibration")
    op.drop_table("calibration")
    op.drop_index("ix_citation_cited", "citation")
    op.drop_table("citation")
    op.drop_column("golden", "document")
    op.drop_column("sweep", "retracted_at")
    op.drop_column("sweep", "retracted_reason")
