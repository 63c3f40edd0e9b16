"""Keep the memory that a scenario asks of a card, and that of each card.

Revision 0008, after 0007. 0 asks for nothing, and of a card says that it is not known: so for all that was stored
before.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    none = sa.text("0")
    op.add_column("scenario", sa.Column("card_memory_bytes", sa.BigInteger(), nullable=False, server_default=none))
    op.add_column("card", sa.Column("memory_bytes", sa.BigInteger(), nullable=False, server_default=none))


def downgrade() -> None:
    op.drop_column("card", "memory_bytes")
    op.drop_column("scenario", "card_memory_bytes")
