"""Keep the trees of arms for hosts that do not share their folders.

Revision 0012, after 0011. Sweeps that were submitted before name no pack, and their arms are read where they stand.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "arm_pack",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("used_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_arm_pack"),
    )
    op.create_table(
        "arm_chunk",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", "position", name="pk_arm_chunk"),
        sa.ForeignKeyConstraint(["digest"], ["arm_pack.digest"], name="fk_arm_chunk_digest"),
    )


def downgrade() -> None:
    op.drop_table("arm_chunk")
    op.drop_table("arm_pack")
