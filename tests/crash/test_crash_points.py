"""Operations are killed at the Nth call that changes a file, then repeated: the result is the same.

A few points of each operation by default; all of them with LISTWISE_SOAK=1 (`make soak`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
POINTS = 0 if os.environ.get("LISTWISE_SOAK") else 3


@pytest.fixture(scope="module")
def crash_point(tmp_path_factory) -> Path:
    """The library that kills a process at a chosen write."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("crash") / "crash_point.so"
    source = str(HERE / "crash_point.c")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O2",
        "-Wall",
        "-Werror",
        "-o",
        library,
        source,
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize(
    "operation", ["build", "add", "remove", "tune", "extract", "whiten", "train"]
)
def test_an_operation_killed_at_any_write_can_be_repeated(operation, crash_point, photos, tmp_path):
    program = [sys.executable, "-W", "ignore::RuntimeWarning", HERE / "scenarios.py"]
    command = [*program, operation, tmp_path, photos, str(POINTS)]
    environment = {**os.environ, "LD_PRELOAD": str(crash_point), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["failures"]
    assert report["killed"] == report["points"] >= 2
