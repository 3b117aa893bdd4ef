"""A linear layer on a frozen network, trained on descriptors that are computed once."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_net import TINY_NET

from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import Trainer, prepare, resume
from listwise.training.run.view import TrainView
from listwise.training.starting import make_trainer

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "adapter": True,
    "val_fraction": 0.4,
    "val_max_side": 48,
    "updates": 8,
    "learning_rate": 3e-3,
    "warmup": 0,
    "validate_every": 2,
    "checkpoint_every": 1,
    "device": "cpu",
    "workers": 0,
}


class Witness(TrainView):
    def __init__(self, stop_at=None):
        self.stop_at = stop_at
        self.work = []

    def progress(self, what, done, total):
        self.work.append((what, done, total))

    def update(self, report):
        if report.update == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """A run, with what its view has seen and its result."""
    view, folder = Witness(), tmp_path_factory.mktemp("adapter") / "run"
    return folder, view, make_trainer(prepare(photos, SETTINGS), folder, view).fit()


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
        value = mean_average_precision(found.descriptors.numpy(), plan.validation.labels)
        assert value == pytest.approx(expected, abs=1e-3)
    assert result.best_map > result.first_map


def test_the_photos_of_a_batch_are_known_before_it_is_drawn(photos, tmp_path):
    plan = prepare(photos, SETTINGS | {"batch_size": 12})
    trainer = make_trainer(plan, tmp_path / "run", Witness())
    batches = trainer._start_loading()  # a GPU compiles the loss for the first batch now
    for update in range(2):
        drawn = trainer._draw(update)
        assert len(drawn) == 12
        assert next(batches).labels.tolist() == plan.train.labels[drawn].tolist()


def test_each_photo_is_described_once(photos, run):
    _, view, _ = run
    plan = prepare(photos, SETTINGS)
    done = {what: total for what, done, total in view.work if done == total}
    assert done == {"validating": len(plan.validation), "describing the photos": len(plan.train)}
    for what, total in done.items():
        assert sum(1 for each in view.work if each == (what, total, total)) == 1


def test_a_resumed_run_ends_with_the_same_bits(photos, run, tmp_path):
    folder, _, _ = run
    with pytest.raises(KeyboardInterrupt):
        make_trainer(prepare(photos, SETTINGS), tmp_path / "run", Witness(stop_at=4)).fit()
    resume(tmp_path / "run").fit()
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        first, second = load_file(folder / name), load_file(tmp_path / "run" / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("other", [{"projection": 8}, {"loss": "triplet"}])
def test_settings_that_do_not_fit_are_refused(photos, other):
    with pytest.raises(InputError, match="adapter"):
        prepare(photos, SETTINGS | other)


def test_the_memory_knows_which_photos_were_drawn(photos, tmp_path):
    """Also if a photo whose header is right cannot be decoded."""
    shutil.copytree(photos, tmp_path / "photos")
    few = {"updates": 3, "batch_size": 6, "memory": 9, "memory_warmup": 0, "learning_rate": 1e-9}
    plan = prepare(tmp_path / "photos", SETTINGS | few)
    path = Path(plan.train.paths[0])
    path.write_bytes(path.read_bytes()[:-300])
    trainer = make_trainer(plan, tmp_path / "run")
    trainer.fit()
    expected = embed_photos(trainer.net, plan.train, max_side=48)
    assert expected.kept == list(range(1, len(plan.train)))
    found = expected.descriptors[trainer.memory.photos - 1]
    torch.testing.assert_close(trainer.memory.descriptors, found, rtol=0, atol=1e-4)


def test_the_usual_trainer_does_not_ignore_the_setting(photos, tmp_path):
    with pytest.raises(InputError, match="`adapter` needs a trainer of its own"):
        Trainer(prepare(photos, SETTINGS), tmp_path / "run")


def test_the_chosen_batch_has_all_photos(photos):
    plan = prepare(photos, SETTINGS)
    assert plan.config.batch_size == len(plan.train)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_trains_the_layer_and_compiles_its_loss_meanwhile(photos, tmp_path):
    plan = prepare(photos, SETTINGS | {"device": "cuda", "updates": 2})
    result = make_trainer(plan, tmp_path / "run", TrainView()).fit()
    assert result.best_map >= result.first_map
    assert (tmp_path / "run" / "model").is_dir()
