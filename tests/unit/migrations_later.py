"""A copy of the migrations with further ones after the newest, for tests of what an upgrade does."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs import migrate

SECOND = """
import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{head}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table("later", sa.Column("id", sa.Text(), nullable=False))
    {then}


def downgrade() -> None:
    op.drop_table("later")
"""


def scripts_with(tmp_path: Path, **later: str) -> Path:
    """A copy of the migrations with further ones: revision -> what it does beside creating a table."""
    folder = tmp_path / "scripts"
    shutil.copytree(migrate.scripts(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, then in later.items():
        text = SECOND.format(revision=name.removeprefix("r"), head=migrate.head(), then=then)
        (folder / "versions" / f"{name}.py").write_text(text)
    return folder
