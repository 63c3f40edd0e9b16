"""Find the newest events of a sweep without reading the older ones.

Revision 0007, after 0006.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_event_sweep_id_seq", "event", ["sweep_id", "seq"])
    op.drop_index("ix_event_sweep_id", "event")


def downgrade() -> None:
    op.create_index("ix_event_sweep_id", "event", ["sweep_id"])
    op.drop_index("ix_event_sweep_id_seq", "event")
