"""The command line, run in this process."""

import functools
import sys

import pytest
import typer

from listwise.cli.main import main

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
