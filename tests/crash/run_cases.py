"""Disturbs operations and compares their results, in a process with crash_point.c preloaded.

    python run_cases.py FOLDER PHOTOS POINTS KILLS FAULT:OPERATION ...

FAULT is one of scenarios.py, at POINTS calls that change files (0: at all of them), or `random`: a
command is killed KILLS times at random moments (see random_kills.py). Results are lines of JSON.
"""

import json
import sys
from pathlib import Path

import random_kills
import scenarios

if __name__ == "__main__":
    scenarios.torch.set_num_threads(1)
    folder, photos, points, kills = sys.argv[1:5]
    for case in sys.argv[5:]:
        fault, operation = case.split(":")
        place = Path(folder, fault, operation)
        if fault == "random":
            report = random_kills.main(operation, place, photos, int(kills))
        else:
            report = scenarios.main(operation, place, photos, int(points), fault)
        print(json.dumps({"case": case, **report}), flush=True)
