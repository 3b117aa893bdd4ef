"""The projection of a network starts as a square-rooted PCA of training photos."""

import numpy as np
import torch
from tiny_net import TINY_NET
from torch import nn

import listwise
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import Trainer, prepare
from listwise.training.projection import _SHRINKAGE, start_projection
from listwise.training.run.record import read_metrics

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "projection": 8,
    "val_fraction": 0.4,
    "val_max_side": 48,
    "batch_size": 16,
    "crops": {"size": 32},
    "updates": 1,
    "learning_rate": 1e-9,
    "device": "cpu",
    "workers": 0,
}


def unit_rows(count, width):
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return nn.functional.normalize(rows * torch.arange(width, 0, -1), dim=1)


def test_it_divides_principal_directions_by_the_fourth_root_of_their_variance():
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


def test_it_stays_random_if_no_pca_can_be_learned():
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
    plan = prepare(photos, SETTINGS)
    trainer = Trainer(plan, tmp_path / "run")
    random = trainer.net.projection.weight.clone()
    trainer.fit()
    plain = RetrievalNet(trainer.net.backbone, trainer.net.pooling).eval()
    vectors = embed_photos(plain, plan.train, max_side=48).descriptors
    expected = nn.Linear(plain.dim, 8)
    assert start_projection(expected, vectors)
    weight = trainer.net.projection.weight
    assert torch.allclose(weight.abs(), expected.weight.abs(), rtol=0, atol=1e-3)
    assert not torch.allclose(weight, random, rtol=0, atol=1e-3)
    assert RetrievalNet.load(tmp_path / "run" / "model").config.normalize_pooled
    again = Trainer(plan, tmp_path / "run", resume=True)
    assert torch.equal(again.net.projection.weight, weight)
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_network_without_projection_is_as_before(photos, tmp_path):
    settings = {name: value for name, value in SETTINGS.items() if name != "projection"}
    run = listwise.train(photos, tmp_path / "run", progress=False, **settings)
    assert not run.model.net.config.normalize_pooled
