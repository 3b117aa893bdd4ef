"""The process of a server: its socket, and running it until a signal arrives."""

import errno
import gc
import logging
import math
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI

from listwise.errors import InputError
from listwise.serving.connections import bounded_protocol
from listwise.serving.settings import Limits

# A thread that runs Python code passes the interpreter on after so many seconds. Answers are sent
# by one thread, which would otherwise wait 5 ms for a thread that searches.
SWITCH_SECONDS = 0.001
# Objects that are created between two searches for garbage, as is usual in Python. Commands search
# less often (`__main__.py`), but the garbage of a request can hold a decoded photo.
BETWEEN_COLLECTIONS = 700


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use: choose another with `port`"
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None


def server_config(app: FastAPI, limits: Limits) -> uvicorn.Config:
    """Settings of the uvicorn server that runs the app within its limits."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=math.ceil(limits.seconds) + 1,
    )


def run_server(app: FastAPI, listening: socket.socket, limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM; running requests are completed first."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(BETWEEN_COLLECTIONS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    server = uvicorn.Server(server_config(app, limits))

    def stop(*_: object) -> None:
        """Called for a signal that arrives before uvicorn handles them.

        uvicorn also raises a signal again after it has stopped, which is not an error here.
        """
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    server.run(sockets=[listening])
