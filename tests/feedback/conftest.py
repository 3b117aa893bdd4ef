"""An index with marks that its photos deserve, and the command line in this process."""

import shutil

import pytest
from command_line import listwise  # noqa: F401
from feedback_examples import mark_truly
from index_examples import *  # noqa: F403


@pytest.fixture(scope="session")
def marked_folder(filled, model, tmp_path_factory):
    """The folder of an index with marks of the results of one photo of each class."""
    from listwise.search.index import Index
    from listwise.search.opening import open_store

    folder = tmp_path_factory.mktemp("marked") / "index"
    shutil.copytree(filled, folder)
    with open_store(folder) as store:
        mark_truly(Index(store, model), [f"class{kind}/0.jpg" for kind in range(8)])
    return folder


@pytest.fixture
def marked(marked_folder, model, tmp_path):
    """Such an index, to be written to."""
    from listwise.search.index import Index
    from listwise.search.opening import open_store

    shutil.copytree(marked_folder, tmp_path / "index")
    with open_store(tmp_path / "index") as store:
        yield Index(store, model)
