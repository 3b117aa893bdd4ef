"""A linear layer on a frozen network, trained on descriptors that are computed once."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_net import TINY_NET
from training_examples import SETTINGS as SMALL
from training_examples import Witness

from listwise.evaluation import mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import Trainer, prepare

SETTINGS = {name: value for name, value in SMALL.items() if "batch" not in name}
SETTINGS |= {"adapter": True, "updates": 8, "learning_rate": 3e-3, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A run, with what its view has seen and its result."""
    view, folder = Witness(), tmp_path_factory.mktemp("adapter") / "run"
    return folder, view, Trainer(prepare(photos, SETTINGS), folder, view).fit()


def test_only_the_layer_is_trained_and_the_model_applies_it(photos, run):
    folder, _, result = run
    plan = prepare(photos, SETTINGS)
    torch.manual_seed(plan.config.seed)
    start = RetrievalNet(TINY_NET, weights="random").eval()
    trained = RetrievalNet.load(folder / "model")
    assert trained.config.projection == trained.dim == start.dim
    for name, value in start.state_dict().items():
        assert torch.equal(trained.state_dict()[name], value), name
    assert not torch.equal(trained.projection.weight, torch.eye(trained.dim))
    assert torch.equal(trained.projection.bias, torch.zeros(trained.dim))
    for net, expected in ((start, result.first_map), (trained, result.best_map)):
        found = embed_photos(net, plan.validation, max_side=48)
        value = mean_average_precision(found.descriptors, plan.validation.labels)
        assert value == pytest.approx(expected, abs=1e-3)
    assert result.best_map > result.first_map


def test_each_photo_is_described_once(photos, run):
    _, view, _ = run
    plan = prepare(photos, SETTINGS)
    for what, images in (("validating", plan.validation), ("describing the photos", plan.train)):
        assert view.work.count((what, len(images), len(images))) == view.done.count(what) == 1


def test_the_memory_knows_which_photos_were_drawn(photos, tmp_path):
    """Also if a photo whose header is right cannot be decoded."""
    shutil.copytree(photos, tmp_path / "photos")
    few = {"updates": 3, "batch_size": 6, "memory": 9, "memory_warmup": 0, "learning_rate": 1e-9}
    plan = prepare(tmp_path / "photos", SETTINGS | few)
    path = Path(plan.train.paths[0])
    path.write_bytes(path.read_bytes()[:-300])
    trainer = Trainer(plan, tmp_path / "run")
    trainer.fit()
    expected = embed_photos(trainer.net, plan.train, max_side=48)
    assert expected.kept == list(range(1, len(plan.train)))
    found = torch.from_numpy(expected.descriptors)[trainer.memory.photos]
    torch.testing.assert_close(trainer.memory.descriptors, found, rtol=0, atol=1e-4)
