"""Servers of indexes."""

import httpx
import pytest
from index_examples import *  # noqa: F403
from serving_examples import InThread

from listwise.serving.settings import ServeSettings


@pytest.fixture
def serve():
    """Start a server of a index; gives a client, with `.url` and `.address` on the server."""
    started = []

    def start(index, **settings):
        server = InThread(index, ServeSettings(**settings))
        client = httpx.Client(base_url=server.url, timeout=120)
        started.append((server, client))
        return client

    yield start
    for server, client in started:
        client.close()
        server.stop()
