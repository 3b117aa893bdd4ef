"""Servers of indexes, and a browser to open their pages with."""

import httpx
import pytest
from index_examples import *  # noqa: F403
from serving_examples import InThread

from listwise.serving.settings import ServeSettings


@pytest.fixture(scope="module")
def browser():
    """A browser for the tests of a file."""
    from browser import chromium  # playwright is imported only for such tests

    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def window(browser, server):
    """The window of most tests: loading the page for each of them would take most of the time."""
    from browser import WINDOW, Person

    opened = Person(browser, server.url, **WINDOW)
    opened.see("#samples .tile >> nth=0")
    yield opened
    opened.context.close()


@pytest.fixture
def serve():
    """Start a server of a index; gives a client, with `.url` and `.address` on the server."""
    started = []

    def start(index, **settings):
        server = InThread(index, ServeSettings(**settings))
        client = httpx.Client(verify=False, base_url=server.url, timeout=120)
        started.append((server, client))
        return client

    yield start
    for server, client in started:
        client.close()
        server.stop()
