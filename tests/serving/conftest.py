"""Servers of indexes, and a browser to open their pages with."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from index_examples import *  # noqa: F403
from serving_examples import Process, serving


@pytest.fixture(scope="module")
def browser():
    """A browser for the tests of a file."""
    from chromium import chromium  # playwright is imported only for such tests

    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def module_index(filled, model):
    """An index that is only read from."""
    from listwise.search.index import Index
    from listwise.search.opening import open_store

    with open_store(filled) as store:
        yield Index(store, model)


@pytest.fixture(scope="module")
def window(browser, server):
    """The window of most tests: loading the page for each of them would take most of the time."""
    from browser import WINDOW, Person

    opened = Person(browser, server.url, **WINDOW)
    opened.see("#samples .tile >> nth=0")
    yield opened
    opened.context.close()


@pytest.fixture
def newcomer(browser, server):
    """Opens the page in a new window; in the end only `expected` was complained of."""
    opened = []

    def open_page(address="", expected="", **settings):
        from browser import Person

        opened.append((Person(browser, server.url, address, **settings), expected))
        return opened[-1][0]

    yield open_page
    for each, expected in opened:
        each.leave(expected)


@pytest.fixture
def person(window):
    """Begins at the start of the page, or at an address, in the window that tests share.

    With a name, it is someone who knows the token of the server.
    """
    allowed = []

    def begin(address="", expected="", name=None):
        allowed.append(expected)
        window.begin()
        if name:
            window.sign_in(name)
        if address:
            window.go_to(address)
        return window

    yield begin
    for expected in allowed:
        window.check(expected)


@pytest.fixture
def serve():
    """Start a server of an index; gives a client."""
    with ExitStack() as running:
        yield lambda index, **settings: running.enter_context(serving(index, **settings))


@pytest.fixture(scope="module")
def start():
    """Start `listwise serve` in processes, which are killed at the end."""
    started = []

    def run(*arguments, **options):
        started.append(Process(*arguments, **options))
        return started[-1]

    yield run
    for server in started:
        server.end()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(64) as pool:
        yield pool
