"""Processes that append marks to a folder are killed at any moment; prints what they had stored.

It is a program of its own, because a process with the threads of other tests must not fork.
"""

import os
import select
import signal
import sys
from pathlib import Path

from listwise.search.folder.mark_file import MarkFile
from listwise.search.mark_log import mark_line
from listwise.search.marks import Mark, MarkedQuery


def line(name: str) -> str:
    """A line of the log with a mark of this id."""
    return mark_line(Mark(name, MarkedQuery("q", "", None, ""), "e", True, "", "2026-01-01"))


def write_for_ever(folder: Path, notes: int, name: str) -> None:
    """Append three marks at a time, and note each time that they are stored."""
    log, count = MarkFile(folder), 0
    while True:
        log.append([line(f"{name}-{count}-{part}") for part in range(3)])
        os.write(notes, f"{name}-{count} ".encode())
        count += 1


def start(folder: Path, notes: int, name: str) -> int:
    """Start a process that writes; returns its process id."""
    process = os.fork()
    if process == 0:
        try:
            write_for_ever(folder, notes, name)
        finally:
            os._exit(1)
    return process


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    reader, writer = os.pipe()
    for number in range(6):
        processes = [start(folder, writer, f"{number}{side}") for side in "ab"]
        stored = b""
        while stored.count(b" ") < 10 + number or not {b"a", b"b"} <= {
            note[1:2] for note in stored.split()
        }:
            stored += os.read(reader, 4096)
        for process in processes:
            os.kill(process, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(process, 0)[1]), "the writer ended by itself"
        while select.select([reader], [], [], 0)[0]:
            stored += os.read(reader, 4096)
        MarkFile(folder).append([line(f"after-{number}")])  # the lock is free
        print(stored.decode(), end="")
