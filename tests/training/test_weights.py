"""The weights of a run: their start, the rates of layers, LoRA, and the moving average."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training_examples import SETTINGS

from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import Trainer, prepare
from listwise.training.run import read_metrics
from listwise.training.weights import (
    _SHRINKAGE,
    WeightAverage,
    layer_groups,
    set_learning_rate,
    start_projection,
)

AVERAGED = SETTINGS | {"micro_batch": 16, "updates": 4, "ema": 0.9}


def unit_rows(count, width):
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return nn.functional.normalize(rows * torch.arange(width, 0, -1), dim=1)


def test_a_projection_divides_principal_directions_by_the_fourth_root_of_their_variance():
    rows = unit_rows(200, 12)
    layer = nn.Linear(12, 5)
    size = layer.weight.std()
    assert start_projection(layer, rows)
    centered = rows.double().numpy() - rows.double().numpy().mean(0)
    _, values, directions = np.linalg.svd(centered, full_matrices=False)
    variances = values**2 / len(rows)
    shrunk = (1 - _SHRINKAGE) * variances + _SHRINKAGE * variances.mean()
    expected = centered @ (directions / shrunk[:, None] ** 0.25)[:5].T
    found = layer(rows).detach().double().numpy()
    signs = np.sign((found * expected).sum(0))
    scale = np.abs(found).sum() / np.abs(expected).sum()
    np.testing.assert_allclose(found * signs, expected * scale, rtol=0, atol=1e-5)
    assert 0.7 < layer.weight.std() / size < 1.4


def test_a_projection_stays_random_if_no_pca_can_be_learned():
    for layer, rows in [
        (nn.Linear(4, 6), unit_rows(20, 4)),
        (nn.Linear(4, 2), unit_rows(1, 4)),
        (nn.Linear(4, 2), torch.ones(9, 4) / 2),
    ]:
        before = layer.weight.clone()
        assert not start_projection(layer, rows)
        assert torch.equal(layer.weight, before)
    layer = nn.Linear(4, 3)
    assert start_projection(layer, unit_rows(2, 4))  # fewer photos than dimensions
    assert torch.isfinite(layer.weight).all()


def test_training_starts_with_the_pca_and_a_resumed_run_does_not(photos, tmp_path):
    given = {"projection": 8, "updates": 1, "learning_rate": 1e-9}
    plan = prepare(photos, SETTINGS | given)
    trainer = Trainer(plan, tmp_path / "run")
    random = trainer.net.projection.weight.clone()
    trainer.fit()
    plain = RetrievalNet(trainer.net.backbone, trainer.net.pooling).eval()
    vectors = embed_photos(plain, plan.train, max_side=48).descriptors
    expected = nn.Linear(plain.dim, 8)
    assert start_projection(expected, torch.from_numpy(vectors))
    weight = trainer.net.projection.weight
    assert torch.allclose(weight.abs(), expected.weight.abs(), rtol=0, atol=1e-3)
    assert not torch.allclose(weight, random, rtol=0, atol=1e-3)
    assert RetrievalNet.load(tmp_path / "run" / "model").config.normalize_pooled
    again = Trainer(plan, tmp_path / "run", resume=True)
    assert torch.equal(again.net.projection.weight, weight)
    assert len(read_metrics(tmp_path / "run")) == 2


def test_the_rate_warms_up_and_falls(photos, tmp_path):
    plan = prepare(photos, SETTINGS | {"warmup": 2, "updates": 4})
    trainer = Trainer(plan, tmp_path / "run")
    rates = [set_learning_rate(plan.config, trainer.optimizer, update) for update in range(4)]
    assert rates == pytest.approx([1e-3 * r for r in (1 / 3, 0.75 * 2 / 3, 0.5, 0.25)])


def test_each_layer_learns_with_its_own_rate(photos, tmp_path):
    plan = prepare(photos, SETTINGS | {"backbone": "test_vit", "layer_decay": 0.5})
    trainer = Trainer(plan, tmp_path / "run")
    set_learning_rate(plan.config, trainer.optimizer, 0)
    rates = {p: group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert rates.keys() == set(trainer.net.parameters())
    net = trainer.net.backbone
    order = [net.patch_embed.proj, *(block.attn.qkv for block in net.blocks)]
    expected = [1e-3 * 0.5**i for i in reversed(range(len(order)))]
    assert [rates[layer.weight] for layer in order] == pytest.approx(expected)

    own = RetrievalNet(nn.Conv2d(3, 4, 3))
    (group,) = layer_groups(own, 1.0)
    assert group["params"] == list(own.parameters())
    with pytest.raises(InputError, match="`layer_decay` needs a timm backbone"):
        layer_groups(own, 0.75)


def test_lora_trains_changes_and_saves_a_plain_network(photos, tmp_path):
    given = {"backbone": "test_vit", "val_max_side": 32, "lora": 2, "updates": 2, "batch_size": 6}
    plan = prepare(photos, SETTINGS | given)
    Trainer(plan, tmp_path / "run").fit()
    torch.manual_seed(plan.config.seed)
    start = RetrievalNet("test_vit", weights="random").state_dict()
    assert load_file(tmp_path / "run/model/model.safetensors").keys() == start.keys()
    checkpoint = load_file(tmp_path / "run/checkpoint.safetensors")
    original = "backbone.blocks.0.mlp.fc1.parametrizations.weight.original"
    assert torch.equal(checkpoint[f"net.{original}"], start["backbone.blocks.0.mlp.fc1.weight"])


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


def test_a_run_keeps_the_better_of_the_weights_and_their_average(photos, tmp_path):
    plan = prepare(photos, AVERAGED)
    result = Trainer(plan, tmp_path / "run").fit()
    found = embed_photos(RetrievalNet.load(result.model), plan.validation, max_side=48)
    value = mean_average_precision(found.descriptors, plan.validation.labels)
    assert value == pytest.approx(result.best_map, abs=1e-4)
    # Training itself does not depend on the average.
    Trainer(prepare(photos, AVERAGED | {"ema": 0}), tmp_path / "plain").fit()
    plain = load_file(tmp_path / "plain" / "checkpoint.safetensors")
    averaged = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert all(torch.equal(plain[name], averaged[name]) for name in plain)
    assert any(name.endswith(".average") for name in averaged.keys() - plain.keys())
