"""Losses and poolings of another package, installed as pip would install it."""

import os
import sys

import programs
import pytest
import torch
import yaml

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.pooling import POOLINGS, TOKEN_POOLINGS
from listwise.plugins import BUILT_IN, check_name, load_installed
from listwise.settings import make_config
from listwise.training.objective import LOSSES, make_loss

CODE = """
import torch
from torch import nn

def spread(descriptors, labels):
    same = (labels[:, None] == labels).to(descriptors.dtype)
    return (descriptors @ descriptors.T - same).square().mean()

class Margin(nn.Module):
    def forward(self, descriptors, labels, weights=None):
        return spread(descriptors, labels)

class Largest(nn.Module):
    def forward(self, features):
        return features.flatten(2).amax(2)

def nothing():
    return 3
"""
ENTRY_POINTS = """
[listwise.losses]
spread = acme_parts:spread
margin = acme_parts:Margin
lost = acme_missing:Loss

[listwise.poolings]
largest = acme_parts:Largest
nothing = acme_parts:nothing
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder on the path with an installed distribution, for this process and those it starts."""
    folder = tmp_path / "site-packages"
    about = folder / "acme_parts-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "acme_parts.py").write_text(CODE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    yield folder
    sys.modules.pop("acme_parts", None)


def test_the_names_built_in_are_those_that_are_there():
    assert BUILT_IN["loss"] == tuple(LOSSES)
    assert BUILT_IN["pooling"] == (*POOLINGS, *TOKEN_POOLINGS)


def test_a_function_is_the_loss_and_a_class_is_made(installed):
    descriptors = torch.eye(4)[[0, 0, 1, 2]]
    labels = torch.tensor([0, 0, 1, 1])
    for name in ("spread", "margin"):
        loss = make_loss(make_config({"loss": name}, "here"))
        assert loss(descriptors, labels).item() == pytest.approx(2 / 16)


def test_what_cannot_be_loaded_is_one_line(installed):
    with pytest.raises(
        InputError, match=r"cannot load the loss .*\(acme_missing:Loss\): ModuleNot"
    ):
        load_installed("loss", "lost")
    with pytest.raises(InputError, match="installed package returns int: it must return an nn"):
        RetrievalNet("test_resnet", "nothing", weights="random")
    with pytest.raises(
        InputError,
        match="unknown loss 'spred': choose one of ap, tie-aware, .*, or one of an installed "
        r"package \(lost, margin, spread\)",
    ):
        check_name("loss", "spred")


def test_the_command_trains_with_them(installed, photos, tmp_path):
    small = "--backbone test_resnet.r160_in1k --weights random --updates 1 --device cpu --workers 0"
    parts = "--loss spread --pooling largest --val-fraction 0.4 --crops-size 32 --batch-size 8"
    run = tmp_path / "run"
    train = ("train", photos, "--run-folder", run, *small.split(), *parts.split())
    process = programs.listwise(*train)
    out, err = process.communicate(300)
    assert process.returncode == 0, err
    assert "this loss does not take weights: --class-weights is off" in out
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["loss"], config["pooling"]) == ("spread", "largest")
    assert RetrievalNet.load(run / "model").config.pooling == "largest"
