"""Indexes of every engine; those in a Milvus server need one."""

import itertools
import logging
import os
from collections.abc import Callable, Iterator

import pytest
from index_examples import *  # noqa: F403
from milvus_server import Server, find_program, running

Places = Callable[[], str]


@pytest.fixture(scope="session")
def own_server(tmp_path_factory) -> Iterator[Server | None]:
    """A Milvus server that is started here; None if no program is known."""
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    program = find_program()
    if os.environ.get("LISTWISE_MILVUS") or not program:
        yield None
        return
    with running(program, tmp_path_factory.mktemp("milvus")) as server:
        yield server


@pytest.fixture(scope="session")
def milvus_server(own_server: Server | None) -> str:
    """The address of a Milvus server: a running one, or one that is started here."""
    if address := os.environ.get("LISTWISE_MILVUS"):
        return address
    if own_server is None:
        pytest.skip(
            "no Milvus server: set LISTWISE_MILVUS_SERVER to the program milvus-server "
            "(pip install milvus), or LISTWISE_MILVUS to the host:port of a running server"
        )
    return own_server.address


@pytest.fixture
def killable_server(own_server: Server | None, milvus_server: str) -> Server:
    """A Milvus server that a test may kill, if it starts it again."""
    if own_server is None:
        pytest.skip("no Milvus server to kill: set LISTWISE_MILVUS_SERVER, not LISTWISE_MILVUS")
    return own_server


@pytest.fixture(scope="session")
def server_places(milvus_server: str) -> Iterator[Places]:
    """Names for new indexes in the server; their collections are dropped at the end."""
    from pymilvus import MilvusClient

    names = [f"listwise_test_{os.getpid()}_{number}" for number in range(100)]
    left = iter(names)
    yield lambda: f"milvus://{milvus_server}/{next(left)}"
    client = MilvusClient(f"http://{milvus_server}", timeout=5, dedicated=True)
    for name in [*names, *(f"{name}_marks" for name in names)]:
        if client.has_collection(name):
            client.drop_collection(name)
    client.close()


@pytest.fixture(scope="session")
def lite_places(tmp_path_factory) -> Places:
    """Names for new indexes in files of milvus-lite."""
    pytest.importorskip("milvus_lite")
    folder = tmp_path_factory.mktemp("lite")
    numbers = itertools.count()
    return lambda: str(folder / f"{next(numbers)}.db")


@pytest.fixture(scope="session")
def embedded_places(tmp_path_factory) -> Places:
    """Names for new indexes in folders."""
    folder = tmp_path_factory.mktemp("embedded")
    numbers = itertools.count()
    return lambda: str(folder / f"index{next(numbers)}")
