"""An index with marks that its photos deserve, and the command line in this process."""

import sys

import pytest
from feedback_examples import mark_truly
from index_examples import *  # noqa: F403

from listwise.cli.main import main


@pytest.fixture
def marked(index):
    """An index with marks of the results of one photo of each class."""
    mark_truly(index, [f"class{kind}/0.jpg" for kind in range(8)])
    return index


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
