"""Say which sequence of a batch a token stream is of.

Revision 0002, after 0001. What was stored before is the only sequence of its generation, number 0.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("token_stream", sa.Column("sequence", sa.BigInteger(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    op.execute("DELETE FROM token_stream WHERE sequence > 0")
    op.drop_column("token_stream", "sequence")
