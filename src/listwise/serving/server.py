"""The server's process: its socket, and running until a signal."""

import errno
import logging
import math
import signal
import socket

import uvicorn
from fastapi import FastAPI

from listwise.errors import InputError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "the port is taken: give another with `port`"
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None


def run_server(app: FastAPI, listening: socket.socket, timeout: float) -> None:
    """Serve until a signal, which ends the process without an error."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        limit_concurrency=1000,
        timeout_graceful_shutdown=math.ceil(timeout) + 1,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the server raises what stopped it once more
    uvicorn.Server(config).run(sockets=[listening])
