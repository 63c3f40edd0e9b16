"""Writing what an attempt measured: one transaction, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, insert, select

from jobs.errors import Conflict, Unstorable
from jobs.lifecycle import advance
from jobs.model import ArmPlan, AttemptState, CellPlan, Missing, Reading, RunRecord
from jobs.store import claims, events
from jobs.store.connect import insert_into
from jobs.store.strict import flag_columns, storable
from jobs.store.submission import ids_digest
from jobs.tables import (
    certificate,
    certificate_interval,
    key_bytes,
    run,
    sample,
    scenario,
    seam,
    series,
    sweep,
    token_stream,
    value,
)

COLUMNS_ALIKE = (
    "exit_code",
    "signal",
    "error",
    "engine_digest",
    "module_path",
    "model_digest",
    "effective_config",
    "device",
    "facts",
    "peak_rss_bytes",
    "started_at",
    "ended_at",
    "log_tail",
)
"""Fields of a record that are columns of `attempt` under the same name."""


def write_record(
    connection: Connection,
    attempt_id: str,
    fence: int,
    record: RunRecord,
    state: AttemptState,
    reason: str,
    fault: str,
    now: datetime,
) -> None:
    """Store a record and end its attempt in `state`; measured also completes the run.

    A resend is a no-op. Raises Conflict when another record is there, or when the attempt is not running under
    `fence`; Unstorable when the record cannot be kept or names another attempt.
    """
    found = claims.attempt_row(connection, attempt_id)
    named = (record.attempt_id, record.run_id, record.attempt_number)
    if named != (found.id, found.run_id, found.number):
        raise Unstorable(f"the record names {named}, the store {(found.id, found.run_id, found.number)}")
    clean, _ = storable(record)
    flags = flag_columns(clean.flags)  # also those that were found before the record came here
    digest = clean.digest()
    if found.record_digest is not None:
        if (found.record_digest, found.state) == (digest, state):
            return
        raise Conflict(f"attempt {attempt_id} already holds another record ({found.state})", "open a new attempt")
    advance(found.state if found.state == "running" else "running", state, events.teller(connection, attempt_id))
    columns = {name: getattr(clean, name) for name in COLUMNS_ALIKE}
    equations = [row.model_dump(mode="json") for row in clean.equations]
    own = {
        "state": state,
        "reason": reason,
        "fault": fault,
        "record_digest": digest,
        "flags": flags,
        "equations": equations,
    }
    claims.change(connection, found, fence, "running", {**own, **columns}, now)
    _write_parts(connection, clean)
    _write_values(connection, clean, flags)
    events.log(
        connection, found.sweep_id, attempt_id, "attempt", now,
        frm="running", target=state, message=reason, worker=found.worker,
    )  # fmt: skip
    if state == "measured":
        row = connection.execute(select(run).where(run.c.id == found.run_id)).one()
        claims.set_run(connection, row, "complete", f"attempt {found.number}", now)


def _write_parts(connection: Connection, record: RunRecord) -> None:
    own = {"attempt_id": record.attempt_id}
    streams: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for row in record.generations:
        if row.step_ns:
            samples.append({**own, "position": len(streams), "name": "step_ns", "numbers": row.step_ns})
        streams += [
            {
                **own,
                "position": len(streams) + sequence,
                "generation": row.index,
                "sequence": sequence,
                "warmup": row.warmup,
                "ids": tokens.ids,
                "ids_digest": ids_digest(tokens.ids),
                "stop_reason": tokens.stop_reason,
                "gaps": tokens.gaps,
                "counters": {} if sequence else row.counters,  # of the whole batch, so they stand once
                "prefill_ns": 0 if sequence else row.prefill_ns,
            }
            for sequence, tokens in enumerate(row.sequences)
        ]
    _insert(connection, token_stream, streams)
    _insert(connection, sample, samples)
    _insert(connection, seam, [{**own, "position": i, **row.model_dump()} for i, row in enumerate(record.seams)])
    _insert(connection, key_bytes, [{**own, "position": i, **row.model_dump()} for i, row in enumerate(record.keys)])
    if record.certificate is not None:
        body = record.certificate.model_dump()
        intervals = body.pop("intervals")
        _insert(connection, certificate, [{**own, **body}])
        _insert(connection, certificate_interval, [{**own, "position": i, **row} for i, row in enumerate(intervals)])


def _write_values(connection: Connection, record: RunRecord, flags: Mapping[str, str]) -> None:
    key = _series_key(connection, record)
    rows, names = [], []
    for family, readings in (("counter", record.counters), ("metric", record.metrics)):
        for name, reading in readings.items():
            one = {"family": family, "name": name, **key}
            names.append({"id": _series_id(one), **one})
            flag = flags.get(f"{family}s.{name}")
            rows.append(
                {"attempt_id": record.attempt_id, "series_id": names[-1]["id"], "flag": flag, **_columns(reading)}
            )
    # most runs meet series that are there, and to send each one's key again costs more than all else of a record
    wanted = select(series.c.id).where(series.c.id.in_([row["id"] for row in names]))
    known = set(connection.execute(wanted).scalars())
    if fresh := [row for row in names if row["id"] not in known]:
        connection.execute(insert_into(connection, series).on_conflict_do_nothing(), fresh)
    _insert(connection, value, rows)


def _series_key(connection: Connection, record: RunRecord) -> dict[str, Any]:
    """What a value's history goes by: model, prompt, effective config and card model; unknown parts never merge."""
    found = connection.execute(
        select(scenario.c.plan, scenario.c.prompt_digest, run.c.arm, sweep.c.manifest)
        .join(run, run.c.scenario_id == scenario.c.id)
        .join(sweep, sweep.c.id == run.c.sweep_id)
        .where(run.c.id == record.run_id)
    ).one()
    unknown = f"unknown in {record.attempt_id}"
    card = record.certificate.card if record.certificate else str(record.device.get("name") or "")
    return {
        "model_digest": record.model_digest or unknown,
        "prompt_digest": found.prompt_digest,
        "config": _config(found.plan, found.manifest, found.arm, record) or {"effective": unknown},
        "card": card or unknown,
    }


def _config(cell: Any, manifest: Any, arm_name: str, record: RunRecord) -> dict[str, Any] | None:
    """Settings as they were served; None where they are unknown. A program that was asked for none need tell none."""
    plan = CellPlan.model_validate(cell)
    arm = next(ArmPlan.model_validate(row) for row in manifest["arms"] if row["name"] == arm_name)
    if not record.effective_config and (arm.adapter == "native" or plan.config or arm.config):
        return None
    effective = {
        name: given["value"] if isinstance(given, dict) and "value" in given else given
        for name, given in record.effective_config.items()
    }
    return {
        "effective": effective,
        "env": arm.env,
        "adapter": arm.adapter,
        **({"program": arm.model_dump(mode="json", include={"command", "reads"})} if arm.command else {}),
        "run": plan.settings.model_dump(mode="json"),
    }


def _series_id(key: Mapping[str, Any]) -> str:
    """Made from the key, so that writers who meet a new series at the same moment agree on its id."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"ser_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _columns(reading: Reading) -> dict[str, Any]:
    columns: dict[str, Any] = {"integer": None, "real": None, "missing": None}
    if isinstance(reading, Missing):
        columns["missing"] = reading.missing
    else:
        columns["integer" if isinstance(reading, int) else "real"] = reading
    return columns


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)
