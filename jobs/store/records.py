"""Writing what an attempt measured: one transaction, once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Select, Table, bindparam, column, insert, select
from sqlalchemy import table as lightweight

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


_INTO = {table: insert(table) for table in (token_stream, sample, seam, key_bytes, certificate, certificate_interval)}
_VALUES = insert(lightweight("value", *(column(one.name) for one in value.c)))
"""Of plain columns: what goes into the most rows of a record is clean by `storable`, and is not cleaned row by row."""
_ASKED: Select[Any] = (
    select(scenario.c.plan, scenario.c.prompt_digest, sweep.c.manifest)
    .join(sweep, sweep.c.id == scenario.c.sweep_id)
    .where(scenario.c.id == bindparam("of"))
)
_KNOWN = select(series.c.id).where(series.c.id.in_(bindparam("ids", expanding=True)))
MOST_ASKED = 4096


@dataclass(frozen=True, slots=True)
class Served:
    """What of a cell and an arm goes into the key of a series."""

    prompt_digest: str
    asks_settings: bool
    config: Mapping[str, Any]


class Asked:
    """What cells and arms were asked to be, which never changes: read once and not with every record.

    A manifest holds all cells of its sweep, so that to read it costs more than all else of a record of a large one.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Served] = {}

    def of(self, connection: Connection, scenario_id: str, arm: str) -> Served:
        """A cell under an arm."""
        key = (scenario_id, arm)
        if key not in self._kept:
            if len(self._kept) >= MOST_ASKED:
                self._kept.clear()
            self._kept[key] = _served(connection.execute(_ASKED, {"of": scenario_id}).one(), arm)
        return self._kept[key]


def write_record(
    connection: Connection,
    asked: Asked,
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
    own_run = claims.run_row(connection, found.run_id)
    _write_parts(connection, clean)
    _write_values(connection, clean, flags, _series_key(asked.of(connection, own_run.scenario_id, own_run.arm), clean))
    events.log(
        connection, found.sweep_id, attempt_id, "attempt", now,
        frm="running", target=state, message=reason, worker=found.worker,
    )  # fmt: skip
    if state == "measured":
        claims.set_run(connection, own_run, "complete", f"attempt {found.number}", now)


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


def _write_values(connection: Connection, record: RunRecord, flags: Mapping[str, str], key: Mapping[str, Any]) -> None:
    ids, rows = _series_ids(record, key), list[dict[str, Any]]()
    for (family, name), series_id in ids.items():
        reading = (record.counters if family == "counter" else record.metrics)[name]
        flag = flags.get(f"{family}s.{name}")
        rows.append({"attempt_id": record.attempt_id, "series_id": series_id, "flag": flag, **_columns(reading)})
    # most runs meet series that are there, and to send each one's key again costs more than all else of a record
    known = set(connection.execute(_KNOWN, {"ids": list(ids.values())}).scalars())
    named = [(family, name, series_id) for (family, name), series_id in ids.items() if series_id not in known]
    if fresh := [{"id": series_id, "family": family, "name": name, **key} for family, name, series_id in named]:
        connection.execute(insert_into(connection, series).on_conflict_do_nothing(), fresh)
    if rows:
        connection.execute(_VALUES, rows)


def _series_key(served: Served, record: RunRecord) -> dict[str, Any]:
    """What a value's history goes by: model, prompt, effective config and card model; unknown parts never merge."""
    unknown = f"unknown in {record.attempt_id}"
    card = record.certificate.card if record.certificate else str(record.device.get("name") or "")
    return {
        "model_digest": record.model_digest or unknown,
        "prompt_digest": served.prompt_digest,
        "config": _config(served, record) or {"effective": unknown},
        "card": card or unknown,
    }


def _served(row: Row[Any], arm_name: str) -> Served:
    plan = CellPlan.model_validate(row.plan)
    arm = next(ArmPlan.model_validate(one) for one in row.manifest["arms"] if one["name"] == arm_name)
    config = {
        "env": arm.env,
        "adapter": arm.adapter,
        **({"program": arm.model_dump(mode="json", include={"command", "reads"})} if arm.command else {}),
        "run": plan.settings.model_dump(mode="json"),
    }
    return Served(row.prompt_digest, arm.adapter == "native" or bool(plan.config or arm.config), config)


def _config(served: Served, record: RunRecord) -> dict[str, Any] | None:
    """Settings as they were served; None where they are unknown. A program that was asked for none need tell none."""
    if not record.effective_config and served.asks_settings:
        return None
    effective = {
        name: given["value"] if isinstance(given, dict) and "value" in given else given
        for name, given in record.effective_config.items()
    }
    return {"effective": effective, **served.config}


def _series_ids(record: RunRecord, key: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The series of a record's readings, by family and name.

    Made from the key, so that writers who meet a new series at the same moment agree on its id: the digest of family,
    name and key as one document, of which all but the two is the same for a whole record.
    """
    parts = {name: _compact(part) for name, part in key.items()}
    before = f'{{"card":{parts["card"]},"config":{parts["config"]},"family":'
    between, after = f',"model_digest":{parts["model_digest"]},"name":', f',"prompt_digest":{parts["prompt_digest"]}}}'
    found = {}
    for family, readings in (("counter", record.counters), ("metric", record.metrics)):
        for name in readings:
            text = f'{before}"{family}"{between}{_compact(name)}{after}'
            found[family, name] = f"ser_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return found


def _compact(part: Any) -> str:
    return json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _columns(reading: Reading) -> dict[str, Any]:
    columns: dict[str, Any] = {"integer": None, "real": None, "missing": None}
    if isinstance(reading, Missing):
        columns["missing"] = reading.missing
    else:
        columns["integer" if isinstance(reading, int) else "real"] = reading
    return columns


def _insert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(_INTO[table], rows)
