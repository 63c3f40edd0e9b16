"""The skip checks of tests/conftest.py, planted red: each case runs pytest on a small suite of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

def test_plain(): ...

@pytest.mark.parametrize("depth", [1, 2])
def test_skipped(depth):
    pytest.skip("the model is absent")

@pytest.mark.gpu
def test_on_card(): ...

@pytest.mark.gpu(2)
def test_on_two_cards(): ...

@pytest.mark.browser
def test_of_a_page(): ...
"""
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""


def run_suite(tmp_path: Path, checkout: Path, must_run: str, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(checkout / "tests" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "must_run.txt").write_text(must_run)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    browser: needs chromium\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # a host with GPU and browser is to look like one without
    hidden = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "PATH": str(tmp_path)}
    return subprocess.run(command, cwd=tmp_path, env=outer | hidden, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("must_run", "options", "exit_code", "said"),
    [
        ("test_suite.py::test_plain\n", ("--must-run",), 0, "1 passed, 5 skipped"),
        ("test_suite.py::test_of_a_page\n", ("--must-run",), 0, "skipped for want of a browser: 1"),
        ("test_suite.py::test_skipped\n", (), 1, "test_skipped[2] must run, but: the model is absent"),
        ("test_suite.py\n", ("-n", "2"), 1, "test_skipped[1] must run, but: the model is absent"),
        ("test_suite.py::test_renamed\n", (), 0, "1 passed"),
        ("test_suite.py::test_gone\n", ("--must-run",), 1, "test_gone must run, but no executed"),
        (
            "test_suite.py::test_gone\n",
            ("--must-run", "-n", "2"),
            1,
            "test_gone must run, but no executed test matches",
        ),
    ],
)
def test_a_skip_that_must_not_be_fails_the_run(
    tmp_path: Path, checkout: Path, must_run: str, options: tuple[str, ...], exit_code: int, said: str
) -> None:
    done = run_suite(tmp_path, checkout, must_run, *options)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert said in done.stdout


def test_a_gpu_test_without_gpu_names_its_reason(tmp_path: Path, checkout: Path) -> None:
    done = run_suite(tmp_path, checkout, "")
    assert done.returncode == 0
    assert "skipped: no GPU" in done.stdout
    assert "GPU tests skipped for want of a GPU: 2" in done.stdout


def test_a_page_is_tested_where_there_is_a_browser_and_two_gpus_where_there_are_two(
    tmp_path: Path, checkout: Path
) -> None:
    """The driver is a library of two calls, found before any other."""
    (tmp_path / "chromium").touch(mode=0o755)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", "-x", "c", "-"], input=DRIVER, text=True, check=True
    )
    done = run_suite(tmp_path, checkout, "")
    assert done.returncode == 0
    assert "skipped: fewer than 2 GPUs" in done.stdout and "3 passed, 3 skipped" in done.stdout
    assert "skipped for want of a browser: 0" in done.stdout
    assert "GPU tests skipped for want of a GPU: 1" in done.stdout
