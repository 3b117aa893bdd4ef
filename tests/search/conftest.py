"""Indexes of every engine; those in a Milvus server need one."""

import itertools
import logging
import os
from collections.abc import Callable, Iterator

import pytest
from index_examples import *  # noqa: F403
from milvus_server import Server, find_program, running

Places = Callable[[], str]
started: list[Server] = []


def server_use(item: pytest.Item) -> int:
    """0 for a test without a Milvus server, 1 with one, 2 if it kills the server."""
    if "killable_server" in item.fixturenames:
        return 2
    callspec = getattr(item, "callspec", None)
    given = [value for value in callspec.params.values() if type(value) is str] if callspec else []
    return int("server" in given or "server_places" in item.fixturenames)


def pytest_collection_modifyitems(items):
    """Put the tests with a server last, one after the other: it uses a core even while it waits."""
    items.sort(key=server_use)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """Stop the server after the last test that uses it, though other tests are left."""
    if nextitem is None or not server_use(nextitem):
        while started:
            started.pop().close()


@pytest.fixture(scope="session")
def own_server(tmp_path_factory) -> Iterator[Server | None]:
    """A Milvus server that is started here; None if no program is known."""
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    program = find_program()
    if os.environ.get("LISTWISE_MILVUS") or not program:
        yield None
        return
    with running(program, tmp_path_factory.mktemp("milvus")) as server:
        started.append(server)
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
def server_places(own_server: Server | None, milvus_server: str) -> Iterator[Places]:
    """Names for new indexes in the server; a server that is not ours is left without them."""
    from pymilvus import MilvusClient

    names = [f"listwise_test_{os.getpid()}_{number}" for number in range(100)]
    left = iter(names)
    yield lambda: f"milvus://{milvus_server}/{next(left)}"
    if own_server is not None:
        return
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
