"""Programs in processes of their own, without the seconds that importing torch and timm takes.

They are forked from a process that has imported both (see `set_forkserver_preload` in conftest.py).
Otherwise they are as any other: with arguments, environment, output and signals of their own.
"""

import fnmatch
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from subprocess import TimeoutExpired
from threading import Thread

import torch

PROCESSES = multiprocessing.get_context("forkserver")


class Program:
    """A call of an importable function in a new process; has what tests use of subprocess.Popen."""

    def __init__(self, function, *arguments, cwd=None, env=None, stderr=None):
        reading, writing = PROCESSES.Pipe(duplex=False)
        # A file: a process whose output nobody reads would stop at a full pipe.
        self._errors = stderr or tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        place = str(cwd or os.getcwd())
        call = (function, arguments, writing, self._errors.name, place, dict(env or os.environ))
        self._process = PROCESSES.Process(target=_run, args=call)
        self._process.start()
        writing.close()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
        reading.close()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("program", timeout)
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=120):
        """The rest of stdout, and stderr, once the process has ended."""
        read = []
        if not self.stdout.closed:
            reader = Thread(target=lambda: read.append(self.stdout.read()), daemon=True)
            reader.start()
            reader.join(timeout)
            if reader.is_alive():
                raise TimeoutExpired("program", timeout)
            self.stdout.close()
        self.wait(timeout)
        return "".join(read), self.errors()

    def errors(self):
        """What it has written to stderr so far."""
        self._errors.seek(0)
        return self._errors.read()


def listwise(*arguments, **options):
    """Start a `listwise` command."""
    return Program(run_listwise, *map(str, arguments), **options)


def script(path, *arguments, **options):
    """Start a Python script."""
    return Program(_script, str(path), *map(str, arguments), **options)


def _run(function, arguments, writing, errors, place, environment):
    gc.freeze()  # a search for garbage would copy the memory of all that is imported
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # its own processes start as usual
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(writing.fileno(), 1)
    writing.close()
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # read when torch was imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    function(*arguments)


def run_listwise(*arguments):
    """Be the `listwise` command."""
    from listwise.cli.main import main

    sys.argv = ["listwise", *arguments]
    main()


def run_and_die(pattern, number, *arguments):
    """Be a command that dies just before it puts in place the `number`-th file that matches."""
    left = number

    def look(event, details):
        nonlocal left
        if event == "os.rename" and fnmatch.fnmatch(str(details[0]), pattern):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    run_listwise(*arguments)


def _script(path, *arguments):
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
