"""Say how often a key was read in place over the link, and what was gathered of it.

Revision 0004, after 0003. What was stored before told neither.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COLUMNS = ("in_place", "gathered_bytes")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("key_bytes", sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("key_bytes", name)
