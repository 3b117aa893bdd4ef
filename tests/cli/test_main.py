"""What goes wrong outside of the program is one line, whichever command it meets."""

import os
import socket
import subprocess
import sys

import pytest
import torch
import typer

from listwise.cli import main as main_module


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError("no space"), 2, "no space"),
        (OSError(28, "no space"), 2, "[Errno 28] no space"),
        (OSError(28, "no space", "a.jpg"), 2, "a.jpg: no space"),
        (MemoryError(), 2, "not enough memory"),
        (torch.OutOfMemoryError("GPU 0 is full:\nuse less"), 2, "GPU 0 is full: use less"),
        (typer.Abort(), 130, "stopped"),
    ],
)
def test_an_error_of_the_system_is_one_line(listwise, monkeypatch, error, code, said):
    def fail(**_):
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    assert listwise() == (code, "", f"listwise: {said}\n")


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(**_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        main_module.main()


def test_a_taken_port_is_named(listwise):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = listwise("serve", "index", "--port", port)
    reason = "the port is in use: choose another with --port"
    assert (code, err) == (2, f"listwise: cannot listen on 127.0.0.1, port {port}: {reason}\n")


# What is short is written only at the end.
PRINTS = "from listwise.cli import main; main.app = lambda **_: print({}); main.main()"


@pytest.mark.parametrize(
    "arguments",
    [["-m", "listwise", "--help"], ["-c", PRINTS.format("'x' * 10**6")], ["-c", PRINTS.format(1)]],
)
def test_a_reader_that_left_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, *arguments], stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("stream", [1, 2])
def test_closed_streams_are_no_error(stream):
    command = ["sh", "-c", f'exec "$0" -c "$1" {stream}>&-', sys.executable, PRINTS.format(1)]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
