"""Operations are disturbed at the Nth call that changes a file: see scenarios.py for the faults.

Commands are also killed at random moments, with their workers: see random_kills.py. Then they are
repeated, and the result is the same as without the interruption.

One fault of each operation, at one point (two for errors), and one random kill by default; all
faults and points, and 1,000 kills, with LISTWISE_SOAK=1 (`make soak`).
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

POWER = ["build", "add", "remove", "tidy", "limits", "local", "upgrade", "mark"]
POWER += ["whiten", "tune"]
OPERATIONS = [*POWER, "serve", "extract", "train"]
COMMANDS = ["build", "add", "remove", "extract", "train"]
POINTS, KILLS = (0, 1000 // len(COMMANDS)) if SOAK else (2, 1)
FAULTS = ["kill", "power", "full", "readonly", "denied", "clock"]
# Each operation once, and each fault.
OTHERS = {"build": "readonly", "add": "random", "tidy": "clock", "mark": "full"}
OTHERS |= {"extract": "denied"}
DEFAULT = [f"{OTHERS.get(operation, 'kill')}:{operation}" for operation in OPERATIONS]
DEFAULT += [f"power:{operation}" for operation in ("add", "upgrade", "mark", "tune")]
ALL = [
    f"{fault}:{operation}"
    for fault in FAULTS
    for operation in OPERATIONS
    if (operation != "serve" or fault in ("kill", "full"))
    and (operation in POWER or fault != "power")
] + [f"random:{command}" for command in COMMANDS]
CASES = ALL if SOAK else DEFAULT


@pytest.mark.parametrize("cases", [[case] for case in CASES] if SOAK else [CASES])
def test_an_interrupted_operation_can_be_repeated(cases, crash_point, photos, tmp_path):
    if not SOAK:  # half of the photos of each class
        few = shutil.ignore_patterns("[345].jpg")
        photos = shutil.copytree(photos, tmp_path / "photos", ignore=few)
    program = [sys.executable, "-W", "ignore::RuntimeWarning", HERE / "run_cases.py"]
    command = [*program, tmp_path, photos, str(POINTS), str(KILLS), *cases]
    environment = {**os.environ, "LD_PRELOAD": str(crash_point), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["case"] for report in reports] == cases
    for report in reports:
        assert not report["failures"], report["case"]
        # Errors do not stop everything: a search method that cannot be saved is used anyway.
        fault, operation = report["case"].split(":")
        assert report["points"] >= (1 if fault in ("kill", "power", "clock", "random") else 2)
        # The clock goes back twice at each point.
        times = {"kill": 1, "power": 1, "random": 1, "clock": 2}.get(fault)
        least = times * report["points"] if times else int(operation != "limits")
        assert report["interrupted"] >= least, report["case"]
    print(*reports, sep="\n")
