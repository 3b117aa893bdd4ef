"""Servers to test, and photos for them."""

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import httpx
import programs
import uvicorn

from listwise.serving.app import create_app
from listwise.serving.server import server_config

TOKEN = "a token of this test"
# A transparent WebP file of 46 bytes that declares 7000 × 7000 pixels.
HUGE = base64.b64decode("UklGRiYAAABXRUJQVlA4TBkAAAAvV9vVFgdQgVQIIAAKGgJJW7ztj4+I6H8AAA==")


def slowness():
    """How many times longer a computation takes than its CPU time, because of other processes."""
    wall, used = time.perf_counter(), time.thread_time()
    while time.thread_time() < used + 0.2:
        pass
    return max(1, (time.perf_counter() - wall) / (time.thread_time() - used))


class InThread:
    """A real server in a thread, so that a test can reach into it."""

    def __init__(self, index, settings):
        config = server_config(create_app(index, settings), settings.limits)
        self.server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = listening.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        wait_for(lambda: self.server.started)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive()


class Process:
    """`listwise serve` in a process of its own, which a `program` of Python starts if given."""

    def __init__(self, *arguments, token=None, program=None, preload=""):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if preload:
            environment["LD_PRELOAD"] = str(preload)
        environment.pop("LISTWISE_TOKEN", None)
        if token:
            environment["LISTWISE_TOKEN"] = token
        command = ["serve", *map(str, arguments)]
        if "--port" not in arguments:
            command += ["--port", "0"]
        # A file: a server whose log nobody reads would stop at a full pipe.
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        options = {"env": environment, "stderr": self._log}
        if program is None:
            self.popen = programs.listwise(*command, **options)
        else:
            options |= {"stdout": subprocess.PIPE, "text": True}
            self.popen = subprocess.Popen([sys.executable, *program, *command], **options)
        self.said = self.popen.stdout.readline()
        found = re.search(r"http://[\w.:\[\]]+", self.said)
        assert found, (self.popen.wait(30), self.log())
        self.url = found[0]
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(verify=False, base_url=self.url, timeout=120, headers=headers)

    def stop(self, number=signal.SIGTERM):
        """Exit code and what was said on stderr."""
        self.client.close()
        self.popen.send_signal(number)
        self.popen.communicate(timeout=120)
        return self.popen.returncode, self.log()

    def log(self):
        """What the process has written to stderr."""
        self._log.seek(0)
        return self._log.read()


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
