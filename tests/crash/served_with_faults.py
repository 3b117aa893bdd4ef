"""`listwise serve` in a process with crash_point.c preloaded, whose disk fails on demand.

    python served_with_faults.py FAULT FOLDER serve ...

At each SIGUSR1 it reads two numbers from the file FAULT: after so many calls that change files
below FOLDER, all further ones fail with this error number; if it is negative, none fail.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

_, fault, folder, *arguments = sys.argv


def arm(*_: Any) -> None:
    calls, error = map(int, Path(fault).read_text().split())
    ctypes.CDLL(None).crash_arm(os.fsencode(folder), ctypes.c_long(calls), error)
    Path(fault).unlink()


signal.signal(signal.SIGUSR1, arm)
sys.argv = ["listwise", *arguments]
runpy.run_module("listwise", run_name="__main__")
