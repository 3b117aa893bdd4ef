"""A model folder for the tests of descriptors."""

import pytest
import torch
from tiny_net import TINY_NET

from listwise.models import RetrievalNet


@pytest.fixture
def folder(tmp_path):
    """A folder with a network of two convolutions, without a whitening."""
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    return tmp_path / "model"
