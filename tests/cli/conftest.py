import json

import pytest
import torch
from command_line import listwise  # noqa: F401
from tiny_net import TINY_NET

from listwise.models import RetrievalNet


@pytest.fixture
def model(listwise):  # noqa: F811
    """A model in the folder of `listwise`."""
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save("model")
    return "model"


@pytest.fixture
def run(listwise):  # noqa: F811
    """Run a command that must succeed; gives what it prints, or the value of its JSON."""

    def call(*arguments):
        code, out, err = listwise(*arguments)
        assert code == 0, err
        if "--json" in arguments:
            return json.loads(out)
        assert err == ""
        return out

    return call
