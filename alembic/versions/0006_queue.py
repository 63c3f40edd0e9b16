"""Order work over sweeps, keep a block on its card, tell why an attempt failed, and know the cluster's cards.

Revision 0006, after 0005. What was stored before ran in the order of its sweep: those sweeps count as PR gates, their
blocks keep their order, and a block that was begun belongs to the card that its first measured attempt met.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ZERO = sa.text("0")


def upgrade() -> None:
    op.add_column("sweep", sa.Column("priority", sa.BigInteger(), nullable=False, server_default=_ZERO))
    op.create_index("ix_sweep_state_priority_created_at", "sweep", ["state", "priority", "created_at"])
    op.add_column("block", sa.Column("place", sa.BigInteger(), nullable=False, server_default=_ZERO))
    op.add_column("block", sa.Column("runs_left", sa.BigInteger(), nullable=False, server_default=_ZERO))
    op.add_column("block", sa.Column("card", sa.Text(), nullable=True))
    op.add_column("block", sa.Column("waits", sa.Text(), nullable=True))
    op.add_column("attempt", sa.Column("fault", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.create_table(
        "card",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("scheduler", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Text(), nullable=False),
        sa.Column("until", sa.Text(), nullable=True),
        sa.Column("seen_at", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_card"),
    )
    op.execute(
        "UPDATE block SET"
        " place = number + 1000000 * (SELECT position FROM scenario WHERE scenario.id = block.scenario_id),"
        " runs_left = (SELECT count(*) FROM run WHERE run.block_id = block.id AND run.state = 'pending'),"
        " card = (SELECT min(attempt.card) FROM attempt JOIN run ON run.id = attempt.run_id"
        " WHERE run.block_id = block.id AND attempt.state = 'measured')"
    )
    left, leased = sa.text("runs_left > 0"), sa.text("worker IS NOT NULL")
    op.create_index(
        "ix_block_queue", "block", ["sweep_id", "place"], sqlite_where=left, postgresql_where=left
    )  # fmt: skip
    op.create_index("ix_block_leased", "block", ["sweep_id"], sqlite_where=leased, postgresql_where=leased)


def downgrade() -> None:
    op.drop_index("ix_block_leased", "block")
    op.drop_index("ix_block_queue", "block")
    op.drop_table("card")
    op.drop_column("attempt", "fault")
    for name in ("waits", "card", "runs_left", "place"):
        op.drop_column("block", name)
    op.drop_index("ix_sweep_state_priority_created_at", "sweep")
    op.drop_column("sweep", "priority")
