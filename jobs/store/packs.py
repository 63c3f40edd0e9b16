"""Packs of arms in the store, chunk by chunk: schedulers and submitters share nothing else for certain."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import IO

from sqlalchemy import Connection, delete, exists, insert, select, update

from jobs.arm_packs import CHUNK_BYTES
from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.tables import arm_chunk, arm_pack, sweep

KEPT = timedelta(days=30)
"""How long a pack outlasts its last submission, unless a sweep is open that needs it."""
AT_ONCE = 64


def put(connection: Connection, digest: str, pack: IO[bytes], now: datetime) -> None:
    """Keep a pack whose digest was just computed; one that is there already only counts as used again."""
    used = update(arm_pack).where(arm_pack.c.digest == digest).values(used_at=now)
    if connection.execute(used).rowcount:
        return
    prune(connection, now)
    size = pack.seek(0, 2)
    pack.seek(0)
    connection.execute(insert(arm_pack), {"digest": digest, "size_bytes": size, "used_at": now})
    rows = ({"digest": digest, "position": n, "data": data} for n, data in enumerate(_chunks(pack)))
    while some := list(islice(rows, AT_ONCE)):
        connection.execute(insert(arm_chunk), some)


def _chunks(pack: IO[bytes]) -> Iterator[bytes]:
    while data := pack.read(CHUNK_BYTES):
        yield data


def chunks_from(connection: Connection, digest: str, position: int) -> list[bytes]:
    """Some chunks of a pack, from one on; none at its end, and none of a pack that is not here."""
    wanted = select(arm_chunk.c.data).where(arm_chunk.c.digest == digest, arm_chunk.c.position >= position)
    return list(connection.execute(wanted.order_by(arm_chunk.c.position).limit(AT_ONCE)).scalars())


def require(connection: Connection, manifest: Manifest) -> None:
    """Raise SpecError unless each pack that a manifest names is here."""
    for arm in manifest.arms:
        if arm.pack and not connection.execute(select(exists().where(arm_pack.c.digest == arm.pack))).scalar_one():
            raise SpecError(
                f"the tree of arm {arm.name}, pack {arm.pack[:12]}, is not in this store any more",
                "submit the sweep file anew",
            )


def prune(connection: Connection, now: datetime) -> tuple[str, ...]:
    """Drop packs that nobody has submitted for long and no open sweep needs; their digests."""
    unused = select(arm_pack.c.digest).where(arm_pack.c.used_at < now - KEPT)
    old = set(connection.execute(unused.with_for_update()).scalars())  # who puts one again now waits, and finds it gone
    if old:
        for manifest in connection.execute(select(sweep.c.manifest).where(sweep.c.state == "open")).scalars():
            old -= {arm.get("pack") for arm in manifest["arms"]}
    for table in (arm_chunk, arm_pack):
        connection.execute(delete(table).where(table.c.digest.in_(old)))
    return tuple(sorted(old))
