"""A tiny model, and indexes of its descriptors: fixtures for the tests of search and serving.

Every process of pytest reads this file, but only those that run tests import what takes long.
"""

import shutil

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    import torch

    from listwise.models import RetrievalNet

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("serving") / "model"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(folder)
    return folder


@pytest.fixture(scope="session")
def model(model_folder):
    from listwise.descriptors import load_model

    return load_model(model_folder, "cpu")


@pytest.fixture(scope="session")
def filled(model, model_folder, photos, tmp_path_factory):
    """The folder of an index of all photos; leave it as it is."""
    from listwise.data import read_images
    from listwise.search.filling import add_photos
    from listwise.search.opening import create_store, header_of

    folder = tmp_path_factory.mktemp("filled") / "index"
    with create_store(folder, header_of(model)) as store:
        assert len(add_photos(store, model, read_images(photos), workers=0).added) == 48
    return folder


@pytest.fixture
def folder(filled, tmp_path):
    """The same, to be written to."""
    shutil.copytree(filled, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture(scope="module")
def shared_folder(filled, tmp_path_factory):
    """The same, for all tests of a file."""
    return shutil.copytree(filled, tmp_path_factory.mktemp("shared") / "index")


@pytest.fixture
def index(folder, model):
    from listwise.search.index import Index
    from listwise.search.opening import open_store

    with open_store(folder) as store:
        yield Index(store, model)


def texture(seed, size=(240, 180)):
    """A photo of blobs that geometry can be verified on."""
    generator = np.random.default_rng(seed)
    total = np.zeros((size[1], size[0], 3))
    for cells in (12, 40):
        small = generator.integers(0, 255, (cells, cells, 3), dtype=np.uint8)
        total += np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))
    return Image.fromarray((total / 2).astype(np.uint8))
