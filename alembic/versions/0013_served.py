"""Count and order the cells of a verdict without reading them, and find a model without the plans of its scenarios.

Revision 0013, after 0012. In a file a row that is longer than a page is read from its page, whatever is asked of it.
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_cell_verdict_kind", "cell_verdict", ["verdict_id", "outcome", "exit_code", "position"])
    op.create_index("ix_finding_kind", "finding", ["verdict_id", "outcome", "exit_code"])
    op.create_index("ix_scenario_sweep_id_model", "scenario", ["sweep_id", "model"])


def downgrade() -> None:
    op.drop_index("ix_scenario_sweep_id_model", "scenario")
    op.drop_index("ix_finding_kind", "finding")
    op.drop_index("ix_cell_verdict_kind", "cell_verdict")
