"""The Milvus server is killed while a command changes an index in it.

30 kills, which only LISTWISE_SOAK=1 (`make soak`) runs.
"""

import gc
import multiprocessing
import os
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from listwise.search import open_index
from listwise.search.entries import entry_key

KILLS = 10  # of each kind
PROCESSES = multiprocessing.get_context("forkserver")


def run_command(arguments: list[str], log: Path, calls: Path, seconds: float) -> None:
    """The command line, which notes how many requests it has sent, and waits less for answers."""
    from listwise.cli.main import main
    from listwise.search.filling import COMMITTED
    from listwise.search.milvus.connection import Connection

    gc.freeze()  # as in programs.py
    original, sent = Connection.call, 0

    def call(self, method, **options):
        nonlocal sent
        sent += 1
        calls.write_text(str(sent))
        return original(self, method, **{"timeout": seconds, **options})

    Connection.call = call
    COMMITTED["cpu"] = 3
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["listwise", *arguments]
    main()


class Command:
    """A command in a process of its own."""

    def __init__(self, arguments, folder, seconds=60.0):
        self.log, self.calls = folder / "log", folder / "calls"
        self.calls.write_text("0")
        given = ([str(each) for each in arguments], self.log, self.calls, seconds)
        self.process = PROCESSES.Process(target=run_command, args=given)
        self.process.start()

    def wait_for(self, calls):
        """Wait until it has sent so many requests, or has ended."""
        while self.process.is_alive() and int(self.calls.read_text() or 0) < calls:
            time.sleep(0.002)

    def end(self):
        """Its exit code and what it printed; an error is one line."""
        self.process.join(120)
        text = self.log.read_text()
        assert self.process.exitcode in (0, 2), text
        assert "Traceback" not in text
        if self.process.exitcode:
            assert sum(line.startswith("listwise: ") for line in text.splitlines()) == 1, text
        return self.process.exitcode, text


def contents(place):
    """Descriptors by id."""
    with open_index(place) as index:
        ids = [entry.id for entry in index]
        assert len(index) == len(ids) == len(set(ids))
        rows = index.store.vectors([entry_key(name) for name in ids])
        return dict(zip(ids, rows, strict=True))


@pytest.mark.thorough  # a server takes half a minute to start again
@pytest.mark.parametrize("kind", ["build", "add", "remove"])
def test_a_killed_server_loses_nothing(
    kind, killable_server, server_places, photos, filled, model_folder, tmp_path
):
    chance = random.Random(kind)
    expected, gone = contents(filled), f"class3{os.sep}"
    some = tmp_path / "some"
    shutil.copytree(photos / "class0", some / "class0")
    model, how = ("--model", model_folder), ("--device", "cpu", "--workers", 0)
    interrupted = 0
    for _ in range(KILLS):
        place = server_places()
        command = ["index", "build", place, photos, *model, *how]
        if kind == "add":
            assert Command(["index", "build", place, some, *model, *how], tmp_path).end()[0] == 0
            command = ["index", "add", place, photos, *how]
        elif kind == "remove":
            assert Command(command, tmp_path).end()[0] == 0
            command = ["index", "remove", place, photos / "class3"]
        disturbed = Command(command, tmp_path, seconds=4)
        disturbed.wait_for(chance.randint(*((1, 5) if kind == "remove" else (1, 30))))
        killable_server.kill()
        code, text = disturbed.end()
        interrupted += code == 2
        killable_server.start()
        killable_server.wait()
        until = time.monotonic() + 180
        while True:
            code, text = Command(command, tmp_path).end()
            if code == 0 or "has no entry for" in text:
                break
            assert time.monotonic() < until, text  # it may answer before it has read everything
        wanted = expected
        if kind == "remove":
            wanted = {name: row for name, row in expected.items() if not name.startswith(gone)}
        found = contents(place)
        assert found.keys() == wanted.keys()
        for name, row in wanted.items():  # which photos share a batch changes the last bits
            np.testing.assert_allclose(found[name], row, rtol=0, atol=1e-5)
    assert interrupted >= KILLS / 2
    print(f"{kind}: {KILLS} kills of the server, {interrupted} interrupted the command")
