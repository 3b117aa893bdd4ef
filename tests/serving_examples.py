"""Servers to test, and photos for them."""

import base64
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import programs
import uvicorn

from listwise.serving.app import create_app
from listwise.serving.server import ServeSettings, listen, server_config

TOKEN = "a token of this test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
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
        listening = listen("127.0.0.1", 0)
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
        headers = BEARER if token else {}
        self.client = httpx.Client(verify=False, base_url=self.url, timeout=120, headers=headers)

    def stop(self, number=signal.SIGTERM):
        """Exit code and what was said on stderr."""
        self.client.close()
        self.popen.send_signal(number)
        self.popen.communicate(timeout=120)
        return self.popen.returncode, self.log()

    def end(self):
        """Kill it if it still runs."""
        self.client.close()
        self.popen.kill()
        self.popen.communicate()

    def log(self):
        """What the process has written to stderr."""
        self._log.seek(0)
        return self._log.read()


@contextmanager
def serving(index, *, headers=None, **settings):
    """A server of an index in a thread; gives a client of it."""
    running = InThread(index, ServeSettings(**settings))
    try:
        options = {"verify": False, "timeout": 120, "headers": headers}
        with httpx.Client(base_url=running.url, **options) as client:
            yield client
    finally:
        running.stop()


def url_of(client):
    """The address of the server of a client."""
    return str(client.base_url).rstrip("/")


def encoded(photo, kind="JPEG", **options):
    """The file of an image."""
    file = io.BytesIO()
    photo.save(file, kind, **options)
    return file.getvalue()


def upload(*photos, names=None, **fields):
    """The files and fields of a form; photos are images, paths or bytes."""
    contents = [each.read_bytes() if isinstance(each, Path) else each for each in photos]
    contents = [each if isinstance(each, bytes) else encoded(each, "PNG") for each in contents]
    names = names or [f"{number}.png" for number in range(len(photos))]
    files = [("photos", each) for each in zip(names, contents, strict=True)]
    files += [(name, (None, str(value))) for name, value in fields.items()]
    return {"files": files}


def search(client, *photos, **fields):
    """The answer to a search by photos."""
    return client.post("/api/search", **upload(*photos, **fields))


def numbers(client):
    """The values of /metrics by name and labels."""
    text = client.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", text, re.M)}


def connect(client):
    """A connection to the server of a client, for requests that no client sends."""
    found = socket.create_connection((client.base_url.host, client.base_url.port), 20)
    found.settimeout(20)
    return found


def head(*headers, path="/api/search"):
    """The head of a request that sends a form."""
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


# A form with a photo, in a request that is written by hand.
FORM = "multipart/form-data; boundary=b"
MULTIPART = f"Content-Type: {FORM}"
PART = b'--b\r\nContent-Disposition: form-data; name="photos"; filename="a.jpg"\r\n\r\n'


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
