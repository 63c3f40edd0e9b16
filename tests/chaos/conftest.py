"""The place in which `assay run` and clusters are tried; points without Ray have one of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.chaos.run_site import SWEEP, Site, laid_out


@pytest.fixture
def site() -> Iterator[Site]:
    with laid_out() as made:
        (made.root / "sleep_s").write_text("0.7")
        wish = {"sleep_file": str(made.root / "sleep_s"), "mark": str(made.root / "mark")}
        (made.root / "sweep.yaml").write_text(SWEEP.format(env=json.dumps({"FAKE_ENGINE": json.dumps(wish)})))
        yield made
