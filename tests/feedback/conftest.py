"""An index with marks that its photos deserve, and the command line in this process."""

import sys

import pytest
from index_examples import *  # noqa: F403

from listwise.cli.main import main

QUICK = {"device": "cpu", "workers": 0, "learning_rate": 3e-3}


def mark_truly(index, queries, k=6):
    """Mark the first results of entries by the folders that their photos are in."""
    for query in queries:
        kind = query.split("/")[0]
        hits = [hit.id for hit in index.search(like=query, k=k)]
        same = [photo for photo in hits if photo.startswith(f"{kind}/")]
        index.mark(query, same=same, different=[photo for photo in hits if photo not in same])


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
