"""The place in which `assay run` and clusters are tried; points without Ray have one of their own."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.run_site import FAKE, SWEEP, Site
from tests.chaos.site import copy_product


@pytest.fixture
def site() -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="ak", dir="/tmp"))  # short: Ray's sockets lie below it
    (root / "home").mkdir()
    (root / "t").mkdir()
    (root / "sleep_s").write_text("0.7")
    copy_product(root / "lib")
    package = root / "arm" / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copyfile(FAKE, package / "__main__.py")
    env = json.dumps({"FAKE_ENGINE": json.dumps({"sleep_file": str(root / "sleep_s"), "mark": str(root / "mark")})})
    (root / "sweep.yaml").write_text(SWEEP.format(env=env))
    made = Site(root)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    shutil.rmtree(root, ignore_errors=True)
