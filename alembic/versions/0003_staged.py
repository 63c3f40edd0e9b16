"""Say how often a key came through the ring of a policy that streams.

Revision 0003, after 0002. What was stored before had no such policy, so no key came that way.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("key_bytes", sa.Column("staged", sa.BigInteger(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    op.drop_column("key_bytes", "staged")
