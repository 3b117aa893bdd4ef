"""The command line, run in this process."""

import functools
import shlex
import sys

import pytest
import typer

from listwise.cli.main import app, main

# Typer builds all commands for every call, which takes longer than most commands do.
typer.main.get_command = functools.cache(typer.main.get_command)


@pytest.fixture
def listwise(monkeypatch, capsys, tmp_path):
    """Run `listwise` in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["listwise", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


def _walk(command, words=()):
    yield words, command
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from _walk(command.get_command(None, name), (*words, name))


@functools.cache
def all_commands():
    """Every group and command, by the words typed for it."""
    return dict(_walk(typer.main.get_command(app)))


def parse(words):
    """Parse what is typed after `listwise`, without running it; gives the words of the command."""
    commands = all_commands()
    path = max((each for each in commands if tuple(words[: len(each)]) == each), key=len)
    commands[path].make_context("listwise", list(words[len(path) :]))
    return path


def typed_commands(text):
    """The `listwise` commands in a text, as words without environment variables and torchrun."""
    for line in text.replace("\\\n", " ").splitlines():
        if " listwise " in f" {line} ":
            words = shlex.split(line, comments=True)
            if "listwise" in words:
                yield words[words.index("listwise") + 1 :]
