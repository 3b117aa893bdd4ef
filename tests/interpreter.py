"""Triton's interpreter, in which kernels are tested without a GPU.

The interpreter must be chosen before Triton is imported, so scripts run in processes of their own.
They are forked from a process that has imported what takes long, and that all tests of a worker
share.
"""

import atexit
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

# What the scripts import; torch alone takes seconds.
PRELOADED = [
    "listwise.losses.gpu",
    "listwise.models.fusion",
    "listwise.data.gpu_resample",
    "listwise.training.loading",
]


def skip_if_interpreter_is_broken() -> None:
    """Skip a test where loops of kernels fail in Triton's interpreter.

    Triton passes the bound of a loop, an array of one element, to `int`, which NumPy refuses since
    2.4. Newer versions of Triton (3.9, not 3.6) take the element out first.
    """
    from triton.runtime import interpreter

    try:
        int(np.zeros(1, dtype=np.int64))
    except TypeError:
        if "int(self.handle.data))" in inspect.getsource(interpreter):
            pytest.skip("Triton's interpreter does not work with this version of NumPy")


def run_script(source: str, device: str, *arguments: str) -> str:
    """Run a script, with the device as its first argument, and return what it prints.

    On the device `cpu` it runs in the interpreter.
    """
    if device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = [source, [device, *arguments], sys.path, str(out), str(err)]
            keeper = _interpreter()
            print(json.dumps(request), file=keeper.stdin, flush=True)
            assert keeper.stdout.readline() == "0\n", err.read_text()
            return out.read_text()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", source, device, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    keeper = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(keeper.communicate)  # it ends when its standard input does
    return keeper


def _serve() -> None:
    """Run each script of standard input in a fork, and print its exit code."""
    import gc
    import importlib

    gc.disable()  # imports leave little garbage
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(source: str, arguments: list[str], path: list[str], out: str, err: str) -> None:
    import traceback

    code = 1
    with open(out, "w") as output, open(err, "w") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        try:
            sys.argv, sys.path[:] = ["script", *arguments], path
            exec(compile(source, "script", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
