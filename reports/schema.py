"""The published shape of the JSON form: `reports/schemas/verdict-1.json`, as the verdict's own model writes it.

Within one version fields are only added, and each that was there keeps its meaning; anything else is a new version,
under a new name in `schema`, beside the file of the old one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from jobs.verdict import Verdict

VERDICT: Final = Path(__file__).parent / "schemas" / "verdict-1.json"


def published() -> str:
    """The JSON Schema of the JSON form, as text."""
    return VERDICT.read_text(encoding="utf-8")


def made() -> dict[str, Any]:
    """The same, made anew from the model: what the published file has to hold."""
    schema = Verdict.model_json_schema(by_alias=True)
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{Verdict.model_fields['schema_'].default.replace('/', ':').replace('.', ':', 1)}",
        "title": "A verdict of assay",
    }
    body = {name: part for name, part in schema.items() if name != "title"}
    required = sorted({*body["required"], "schema"})  # always written, so that a reader can tell versions apart
    return {**about, **body, "required": required}


def written() -> str:
    """`made` as the file holds it."""
    return json.dumps(made(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
