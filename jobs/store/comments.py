"""Where verdicts were posted, so that whoever retracts one learns what still shows it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, insert, select, update

from jobs.errors import StoreError
from jobs.store.rows import new_id
from jobs.tables import comment, verdict


def write(
    connection: Connection,
    sweep_id: str,
    repository: str,
    pull_request: int,
    remote_id: str,
    digest: str,
    now: datetime,
) -> None:
    """Note that a comment shows a sweep's newest verdict, in place of what it showed before.

    Raises StoreError when the sweep has no verdict.
    """
    newest = select(verdict.c.id).where(verdict.c.sweep_id == sweep_id).order_by(verdict.c.number.desc()).limit(1)
    verdict_id = connection.execute(newest).scalar_one_or_none()
    if verdict_id is None:
        raise StoreError(f"sweep {sweep_id} has no verdict that a comment could show", "judge it first")
    shows = {"verdict_id": verdict_id, "digest": digest, "posted_at": now}
    place = {"repository": repository, "pull_request": pull_request, "remote_id": remote_id}
    here = [comment.c[name] == value for name, value in place.items()]
    if connection.execute(update(comment).where(*here).values(**shows)).rowcount == 0:
        connection.execute(insert(comment), {"id": new_id("cmt", now), **place, **shows})
