"""Note which verdicts rest on runs that were retracted before that was noted.

Revision 0011, after 0010. A verdict rests on each run of its sweep but those that it sets aside as retracted, in the
canonical JSON of its document. Nothing else is told by that, so that going back leaves the rows.
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "INSERT INTO citation (citing, cited) SELECT verdict.id, run.id"
        " FROM verdict JOIN run ON run.sweep_id = verdict.sweep_id WHERE run.retracted_reason IS NOT NULL"
        """ AND verdict.document NOT LIKE '%"run_id":"' || run.id || '","state":"retracted"%'"""
        " AND NOT EXISTS (SELECT 1 FROM citation WHERE citing = verdict.id AND cited = run.id)"
    )


def downgrade() -> None:
    """The rows stay: they are true of what is stored."""
