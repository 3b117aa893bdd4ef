"""Operations are killed at the Nth call that changes a file, or the disk is full from there on.

Then they are repeated, and the result is the same as without the interruption.

Two points of each operation by default; all of them with LISTWISE_SOAK=1 (`make soak`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOAK = bool(os.environ.get("LISTWISE_SOAK"))


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


OPERATIONS = ["build", "add", "remove", "tune", "serve", "extract", "whiten", "train"]
KILLS = [f"kill:{operation}" for operation in OPERATIONS]
FULL = [f"full:{operation}" for operation in OPERATIONS]
CASES = KILLS + FULL if SOAK else [*KILLS, "full:build", "full:train"]


@pytest.mark.parametrize("cases", [[case] for case in CASES] if SOAK else [CASES])
def test_an_interrupted_operation_can_be_repeated(cases, crash_point, photos, tmp_path):
    program = [sys.executable, "-W", "ignore::RuntimeWarning", HERE / "scenarios.py"]
    command = [*program, tmp_path, photos, "0" if SOAK else "2", *cases]
    environment = {**os.environ, "LD_PRELOAD": str(crash_point), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["case"] for report in reports] == cases
    for report in reports:
        assert not report["failures"], report["case"]
        assert report["points"] >= 2
        # A full disk does not stop everything: a search method that cannot be saved is used anyway.
        least = report["points"] if report["case"] in KILLS else int(report["case"] != "full:tune")
        assert report["interrupted"] >= least, report["case"]
    print(*reports, sep="\n")
