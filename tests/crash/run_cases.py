"""Disturbs operations and compares their results, in a process with crash_point.c preloaded.

    python run_cases.py FOLDER PHOTOS POINTS KILLS FAULT:OPERATION ...

FAULT is one of scenarios.py, at POINTS calls that change files (0: at all of them), or `random`: a
command is killed KILLS times at random moments (see random_kills.py). Results are lines of JSON.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # imports leave little garbage
    import random_kills
    import scenarios

    scenarios.torch.set_num_threads(1)
    gc.freeze()  # forked processes share what was imported
    gc.enable()
    folder, photos, points, kills = sys.argv[1:5]
    bases: dict[Any, Path] = {}
    for case in sys.argv[5:]:
        fault, operation = case.split(":")
        if fault == "random":
            report = random_kills.main(operation, Path(folder, operation), photos, int(kills))
        else:
            report = scenarios.main(operation, Path(folder), photos, int(points), fault, bases)
        print(json.dumps({"case": case, **report}), flush=True)
