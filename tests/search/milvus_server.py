"""A Milvus server for tests, which ends with the process that started it.

    python milvus_server.py PROGRAM FOLDER PORT

runs until its standard input ends, however that comes about. The line `kill` kills the server, and
the line `start` starts it again.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STARTING = 180  # seconds; it unpacks itself first
# Less work for a server that waits most of the time: no log lines, ticks in one channel instead of
# sixteen, no statistics for quotas.
SETTINGS = {
    "log.level": "error",
    "log.stdout": "false",
    "etcd.log.level": "error",
    "rootCoord.dmlChannelNum": "1",
    "quotaAndLimits.enabled": "false",
}


def find_program() -> str | None:
    """The server named by LISTWISE_MILVUS_SERVER, or milvus-server on the path."""
    return os.environ.get("LISTWISE_MILVUS_SERVER") or shutil.which("milvus-server")


class Server:
    """A server that can be killed and started again at the same address, with the same data."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        # The keeper sees the pipe end when this process does, even if that is killed.
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, program, str(folder), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until the server answers."""
        _wait_for(self.address, self._keeper)

    def kill(self) -> None:
        """Kill the server with SIGKILL, all its processes at the same time."""
        self._tell("kill")

    def start(self) -> None:
        """Start the server again."""
        self._tell("start")

    def _tell(self, line: str) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(line, file=self._keeper.stdin, flush=True)
        assert self._keeper.stdout.readline() == f"{line}\n"

    def close(self) -> None:
        """Stop the server and delete its data."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(30)


@contextmanager
def running(program: str, folder: Path) -> Iterator[Server]:
    """Start a server with its data in a folder."""
    server = Server(program, folder)
    try:
        server.wait()
        yield server
    finally:
        server.close()


def keep(program: str, folder: str, port: str) -> None:
    """Run a server until standard input ends, and leave no process and no data behind."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    settings = [f"--extra-config={key}={value}" for key, value in SETTINGS.items()]

    def start() -> subprocess.Popen[bytes]:
        with (Path(folder) / "server.log").open("a") as log:
            return subprocess.Popen(
                [program, "--data", folder, "--proxy-port", port, *settings],
                # Waiting threads leave the cores alone.
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    server = start()
    try:
        for line in sys.stdin:
            if line == "kill\n":
                kill()
            else:
                server = start()
            print(line, end="", flush=True)
    finally:
        kill()
        shutil.rmtree(folder, ignore_errors=True)  # half a gigabyte


def _wait_for(address: str, keeper: subprocess.Popen[str]) -> None:
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
