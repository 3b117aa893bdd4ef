"""The moving average of the weights."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_net import TINY_NET
from torch import nn

from listwise.evaluation import mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import Trainer, prepare
from listwise.training.averaging import WeightAverage
from listwise.training.run.record import read_metrics

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.4,
    "val_max_side": 48,
    "batch_size": 16,
    "micro_batch": 16,
    "crops": {"size": 32},
    "updates": 4,
    "learning_rate": 1e-3,
    "warmup": 0,
    "patience": None,
    "validate_every": 2,
    "device": "cpu",
    "workers": 0,
}


def test_the_average_follows_the_weights_and_is_put_back():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([net.weight], lr=0.1)
    average = WeightAverage(net, optimizer, 0.6)
    expected = None
    for update in range(20):
        net.weight.grad = torch.randn(2, 3)
        optimizer.step()
        average.update(update)
        weight, bias = net.weight.detach().clone(), net.bias.detach().clone()
        decay = min(0.6, (1 + update) / (10 + update))
        expected = weight if expected is None else decay * expected + (1 - decay) * weight
        with average.applied():
            torch.testing.assert_close(net.weight.detach(), expected)
            assert torch.equal(net.bias, bias)
        assert torch.equal(net.weight, weight)
    assert not torch.allclose(expected, weight)


def test_the_weights_are_put_back_after_an_error():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    average = WeightAverage(net, optimizer, 0.9)
    for update in range(2):
        net.weight.grad = torch.ones(2, 2)
        optimizer.step()
        average.update(update)
    before = net.weight.detach().clone()
    inside = []

    def stop():
        with average.applied():
            inside.append(net.weight.detach().clone())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert not torch.equal(inside[0], before)
    assert torch.equal(net.weight, before)


def validations(trainer):
    """Train, and return the mAP of each validation of weights, in order."""
    values = []
    measure = trainer._validate_weights

    def witness(record):
        values.append(measure(record))
        return values[-1]

    trainer._validate_weights = witness
    result = trainer.fit()
    return result, values


def test_a_run_keeps_the_better_of_the_weights_and_their_average(photos, tmp_path):
    plan = prepare(photos, SETTINGS | {"ema": 0.9})
    trainer = Trainer(plan, tmp_path / "run")
    result, values = validations(trainer)
    assert len(values) == 1 + 2 * 2  # once before training, then twice each
    assert result.best_map == max(values)
    assert values[1] != values[2]  # the average has other weights
    found = embed_photos(RetrievalNet.load(result.model), plan.validation, max_side=48)
    value = mean_average_precision(found.descriptors.numpy(), plan.validation.labels)
    assert value == pytest.approx(result.best_map, abs=1e-4)
    lines = read_metrics(tmp_path / "run")
    found = [line["validation_map"] for line in lines if "validation_map" in line]
    assert found == [values[0], max(values[1:3]), max(values[3:5])]
    # Training itself does not depend on the average.
    Trainer(prepare(photos, SETTINGS), tmp_path / "plain").fit()
    plain = load_file(tmp_path / "plain" / "checkpoint.safetensors")
    averaged = load_file(tmp_path / "run" / "checkpoint.safetensors")
    same = {name for name in plain if torch.equal(plain[name], averaged[name])}
    assert same == plain.keys()
    assert any(name.endswith(".average") for name in averaged.keys() - plain.keys())


def test_the_saved_model_has_the_average_if_that_is_better(photos, tmp_path, monkeypatch):
    plan = prepare(photos, SETTINGS | {"ema": 0.9})
    trainer = Trainer(plan, tmp_path / "run")
    measured = iter([0.1, 0.2, 0.3, 0.2, 0.25])
    monkeypatch.setattr(
        "listwise.training.trainer.mean_average_precision", lambda *_: next(measured)
    )
    kept = {}
    save = trainer._save_model

    def witness(value, *photos):
        kept[value] = {k: v.clone() for k, v in trainer.net.state_dict().items()}
        save(value, *photos)

    trainer._save_model = witness
    result = trainer.fit()
    assert (result.best_map, result.best_update) == (0.3, 2)
    model = RetrievalNet.load(result.model).state_dict()
    assert all(torch.equal(model[name], kept[0.3][name]) for name in model)
    assert not all(torch.equal(kept[0.2][name], kept[0.3][name]) for name in model)
    assert trainer.progress.validations_since_best == 1
