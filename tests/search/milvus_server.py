"""A Milvus server for tests, which ends with the process that started it.

    python milvus_server.py PROGRAM FOLDER PORT

runs until its standard input ends, however that comes about.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTING = 180  # seconds; it unpacks itself first


def find_program() -> str | None:
    """The server named by LISTWISE_MILVUS_SERVER, or milvus-server on the path."""
    return os.environ.get("LISTWISE_MILVUS_SERVER") or shutil.which("milvus-server")


@contextmanager
def running(program: str, folder: Path) -> Iterator[str]:
    """Start a server with its data in a folder: the address that it answers at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The keeper sees the pipe end when this process does, even if that is killed.
    keeper = subprocess.Popen(
        [sys.executable, __file__, program, str(folder), str(port)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _wait_for(f"127.0.0.1:{port}", keeper)
        yield f"127.0.0.1:{port}"
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait(30)


def keep(program: str, folder: str, port: str) -> None:
    """Run a server until standard input ends, and leave no process and no data behind."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "server.log").open("w") as log:
        server = subprocess.Popen(
            [program, "--data", folder, "--proxy-port", port],
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # waiting threads leave cores alone
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        sys.stdin.read()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)  # half a gigabyte


def _wait_for(address: str, keeper: subprocess.Popen[bytes]) -> None:
    from pymilvus import MilvusClient, MilvusException

    end = time.monotonic() + STARTING
    while True:
        try:
            client = MilvusClient(f"http://{address}", timeout=2, dedicated=True)
            client.list_collections(timeout=2)
            client.close()
            return
        except MilvusException as error:
            if keeper.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no Milvus server at {address}: {error}") from error
            time.sleep(0.5)


if __name__ == "__main__":
    keep(*sys.argv[1:])
