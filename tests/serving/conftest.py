"""A tiny model, indexes of its descriptors, and servers of them."""

import shutil

import httpx
import pytest
import torch
from serving_examples import InThread

from listwise.data import read_images
from listwise.descriptors import load_model
from listwise.models import RetrievalNet
from listwise.search.filling import add_photos, header_of
from listwise.search.index import create_index, open_index
from listwise.search.searcher import Searcher
from listwise.serving.settings import ServeSettings


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("serving") / "model"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(folder)
    return folder


@pytest.fixture(scope="session")
def model(model_folder):
    return load_model(model_folder, "cpu")


@pytest.fixture(scope="session")
def filled(model, model_folder, photos, tmp_path_factory):
    """The folder of an index of all photos; leave it as it is."""
    folder = tmp_path_factory.mktemp("filled") / "index"
    with create_index(folder, header_of(model, model_folder)) as index:
        assert len(add_photos(index, model, read_images(photos), workers=0).added) == 48
    return folder


@pytest.fixture
def folder(filled, tmp_path):
    """The same, to be written to."""
    shutil.copytree(filled, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def searcher(folder, model):
    with open_index(folder) as index:
        yield Searcher(index, model)


@pytest.fixture
def serve():
    """Start a server of a searcher; gives a client, with `.url` and `.address` on the server."""
    started = []

    def start(searcher, **settings):
        server = InThread(searcher, ServeSettings(**settings))
        client = httpx.Client(base_url=server.url, timeout=30)
        started.append((server, client))
        return client

    yield start
    for server, client in started:
        client.close()
        server.stop()
