"""What goes wrong outside of the program is one line, whichever command it meets."""

import os
import subprocess
import sys

import pytest
import typer

from listwise.cli import main as main_module
from listwise.errors import InputError


@pytest.fixture
def said(monkeypatch, capsys):
    """Run the command line here, which must leave with 2; gives the one line it says."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["listwise", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main_module.main()
        line = capsys.readouterr().err
        assert left.value.code == 2
        assert line.count("\n") == 1
        return line

    return run


def test_a_folder_that_cannot_be_made(said, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "inside"
    line = said("download", "roxford5k", "--to", folder)
    assert line == f"listwise: {folder}: Not a directory\n"


@pytest.mark.parametrize("error", [OSError("no space"), OSError(28, "no space")])
def test_an_error_of_the_system_without_a_file(said, monkeypatch, error):
    def fail(**_):
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    assert said() == f"listwise: {error}\n"


def test_memory_that_does_not_suffice(said, monkeypatch):
    import torch

    def fail(**_):
        raise torch.OutOfMemoryError("GPU 0 is full:\nuse a smaller one")

    monkeypatch.setattr(main_module, "app", fail)
    assert said() == "listwise: GPU 0 is full: use a smaller one\n"


def test_an_array_that_does_not_fit_into_memory(said, monkeypatch):
    def fail(**_):
        raise MemoryError("Unable to allocate 28 GiB")

    monkeypatch.setattr(main_module, "app", fail)
    assert said() == "listwise: not enough memory: Unable to allocate 28 GiB\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(**_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        main_module.main()


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
    assert done.stderr == b""
    assert done.returncode == 1


def test_closed_streams_are_no_error():
    program = (
        "import sys; from listwise import __main__ as program; from listwise.cli import main; "
        "sys.modules['torch'] = object(); main.app = lambda **_: print(1); program.run()"
    )
    for stream in ("1", "2"):
        command = f'exec "$0" -c "$1" {stream}>&-'
        done = subprocess.run(["sh", "-c", command, sys.executable, program], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "message", "shown"),
    [
        (["extract", "m", "photos", "out"], "lower `max_side`", "lower --max-side"),
        (["train", "photos"], "raise `triplet.pool`", "raise --triplet-pool"),
        (["train", "photos"], 'use `weights="random"`', "use --weights random"),
        (["train", "photos"], "choose another `run_folder`", "choose another --run-folder"),
        (["whiten", "m"], "give `source`, not `folder`", "give PHOTOS, not `folder`"),
        (["index", "build", "i"], "`scales` must be numbers", "--scales must be numbers"),
    ],
)
def test_the_arguments_of_an_error_are_written_as_typed(said, monkeypatch, words, message, shown):
    command = main_module.app

    def fail(**_):
        raise InputError(message)

    monkeypatch.setattr(type(command), "__call__", lambda self, **_: fail())
    assert said(*words) == f"listwise: {shown}\n"


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def stop(**_):
        raise typer.Abort

    monkeypatch.setattr(main_module, "app", stop)
    with pytest.raises(SystemExit) as left:
        main_module.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "listwise: stopped\n")


ENDING = """
import atexit, sys, threading
from listwise import __main__ as program
from listwise.cli import main
sys.modules["torch"] = object()

def app(**_):
    atexit.register(print, "then libraries")
    threading.Timer(0.2, print, ["first threads"]).start()
    print("before")
    if sys.argv[1] == "raise":
        raise ValueError("unexpected")
    sys.exit(int(sys.argv[1]))

atexit.register(print, "at the very end")
main.app = app
program.run()
"""


@pytest.mark.parametrize(("argument", "code"), [("0", 0), ("3", 3), ("raise", 1)])
def test_a_command_ends_quickly_but_after_threads_and_libraries(argument, code):
    command = [sys.executable, "-c", ENDING, argument]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    expected = ["before", "first threads", "then libraries"]
    if argument == "raise":
        expected.append("at the very end")
    assert done.stdout.splitlines() == expected
    assert ("ValueError" in done.stderr) == (argument == "raise")
