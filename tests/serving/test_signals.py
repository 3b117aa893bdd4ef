"""Signals at moments that are hard to meet from outside."""

import subprocess
import sys

STOPPED_BEFORE = """
import os, signal, uvicorn
from fastapi import FastAPI
from listwise.serving.server import listen, run_server
from listwise.serving.settings import Limits

run = uvicorn.Server.run

def stopped_before(server, sockets):
    os.kill(os.getpid(), signal.SIGTERM)
    run(server, sockets)

uvicorn.Server.run = stopped_before
run_server(FastAPI(), listen("127.0.0.1", 0), Limits())
"""


def test_a_signal_that_comes_before_uvicorn_handles_it_stops_the_server():
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_BEFORE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
