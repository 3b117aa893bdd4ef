"""Losses, poolings and backbones of the user's own, in the step and in a run."""

import functools

import pytest
import torch
import yaml
from custom_parts import (
    AttentionPooling,
    ProxyLoss,
    SharingWeights,
    SmallBackbone,
    pairwise_loss,
)
from step_examples import assert_equal_gradients, gradients, make_batch, make_net
from torch import nn
from training_examples import SETTINGS as SMALL
from training_examples import Witness

from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.models.storage import read_model
from listwise.training import MultistageStep, Trainer, prepare, resume
from listwise.training.run import read_metrics

SETTINGS = SMALL | {"micro_batch": 6, "updates": 3, "checkpoint_every": 2}
# A module that the user made has its weights.
OWN_BACKBONE = {k: v for k, v in SETTINGS.items() if k not in ("backbone", "weights")}


def pml_losses():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    return {"triplets": losses.TripletMarginLoss(), "proxies": losses.ProxyAnchorLoss(3, 6)}


def plain_gradients(net, loss, images, labels):
    """Loss and gradients of network and loss by ordinary backpropagation."""
    value = loss(net(images), labels)
    value.backward()
    found = all_gradients(net, loss)
    for part in (net, loss):
        if isinstance(part, nn.Module):
            part.zero_grad()
    return value.detach(), found


def all_gradients(net, loss):
    return gradients(net) | (gradients(loss) if isinstance(loss, nn.Module) else {})


@pytest.mark.parametrize("kind", ["function", "partial", "proxies", "pml triplets", "pml proxies"])
@pytest.mark.parametrize("micro_batch", [4, 64])
def test_any_loss_has_the_gradient_of_ordinary_backpropagation(kind, micro_batch):
    torch.manual_seed(2)
    whole = functools.partial(lambda scale, d, y: scale * pairwise_loss(d, y), 3.0)
    losses = {"function": pairwise_loss, "partial": whole, "proxies": ProxyLoss(3, 6)}
    loss = losses.get(kind) or pml_losses()[kind.removeprefix("pml ")]
    if isinstance(loss, nn.Module):
        loss.double()
    net, (images, labels) = make_net(), make_batch(11)
    value, expected = plain_gradients(net, loss, images, labels)
    actual = MultistageStep(net, loss, micro_batch)(images, labels)
    torch.testing.assert_close(actual, value, rtol=1e-12, atol=0)
    assert_equal_gradients(all_gradients(net, loss), expected, 1e-9)


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (SmallBackbone(), "gem"),
        lambda: (SmallBackbone(), AttentionPooling(10)),
        lambda: ("test_resnet", AttentionPooling(96)),
    ],
    ids=["backbone", "both", "pooling"],
)
def test_your_own_parts_have_the_gradient_of_ordinary_backpropagation(parts):
    torch.manual_seed(3)
    backbone, pooling = parts()
    weights = "random" if isinstance(backbone, str) else "auto"
    net = RetrievalNet(backbone, pooling, weights=weights).double().train()
    images, labels = make_batch(9, side=24)
    _, expected = plain_gradients(net, QuantizedAPLoss(), images, labels)
    expected = {name: gradient for name, gradient in expected.items() if gradient.norm() > 0}
    MultistageStep(net, QuantizedAPLoss(), 4)(images, labels)
    assert_equal_gradients({name: gradients(net)[name] for name in expected}, expected, 1e-9)


@pytest.mark.parametrize("backbone", [SmallBackbone, SharingWeights])
def test_half_precision_takes_any_backbone(backbone, photos):
    torch.manual_seed(4)
    net = RetrievalNet(backbone(), AttentionPooling(10)).train()
    images, labels = make_batch(9, torch.float32, side=24)
    value, expected = plain_gradients(net, pairwise_loss, images, labels)
    step = MultistageStep(net, pairwise_loss, 4, autocast=torch.bfloat16)
    torch.testing.assert_close(step(images, labels), value, rtol=0.05, atol=0)
    actual, wanted = (
        torch.cat([found[name].flatten() for name in expected])
        for found in (gradients(net), expected)
    )
    assert (actual - wanted).norm() < 0.1 * wanted.norm()
    few = read_labelled(photos).subset(range(4))
    full, half = (
        embed_photos(net, few, max_side=32, autocast=autocast).descriptors
        for autocast in (None, torch.bfloat16)
    )
    assert (full * half).sum(1).min() > 0.99


def takes_weights(descriptors, labels, weights): ...


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (QuantizedAPLoss, r"not a class: pass QuantizedAPLoss\(\)"),
        ("ap", "a callable of descriptors and labels, not str"),
        (lambda descriptors: descriptors.sum(), r"cannot be called as loss\(descriptors, labels\)"),
        (takes_weights, "missing a required argument: 'weights'"),
        (lambda d, y: d.sum(1), r"must return a scalar tensor, not \[8\]"),
        (lambda d, y: 1.0, "must return a scalar tensor, not float"),
        (lambda d, y: d.detach().sum(), "does not depend on the descriptors"),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        MultistageStep(make_net(), loss, 4)(*make_batch(8))


def run_parts(kind):
    """Settings of a run with a part of each kind."""
    torch.manual_seed(5)
    return {
        "function": lambda: SETTINGS | {"loss": pairwise_loss},
        "proxies": lambda: SETTINGS | {"loss": ProxyLoss(5, 6), "pooling": AttentionPooling(96)},
        "pml": lambda: SETTINGS | {"loss": pml_losses()["triplets"]},
        "pooling": lambda: SETTINGS | {"pooling": AttentionPooling(96)},
        "backbone": lambda: OWN_BACKBONE | {"backbone": SmallBackbone()},
    }[kind]()


@pytest.mark.parametrize("kind", ["function", "proxies", "pml", "pooling", "backbone"])
def test_a_run_with_a_part_of_your_own_and_its_resumption(photos, tmp_path, kind):
    given = run_parts(kind)
    result = Trainer(prepare(photos, given), tmp_path / "whole").fit()
    assert result.updates == 3
    losses = [line["loss"] for line in read_metrics(tmp_path / "whole")[1:]]
    assert len(losses) == 3
    config = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())
    own = {name: part for name, part in given.items() if name in ("loss", "backbone", "pooling")}
    own = {name: part for name, part in own.items() if not isinstance(part, str)}
    for name, part in own.items():
        made = part if name == "loss" and kind == "function" else type(part)
        assert config[name] == f"custom:{made.__module__}.{made.__qualname__}"
    kept = read_model(tmp_path / "whole" / "model").info.network
    assert kept.provenance["training"]["settings"] == config

    again = run_parts(kind)
    with pytest.raises(KeyboardInterrupt):
        Trainer(prepare(photos, again), tmp_path / "broken", Witness(stop_at=3)).fit()
    fresh = {name: part for name, part in run_parts(kind).items() if name in own}
    for part in fresh.values():
        for parameter in part.parameters() if isinstance(part, nn.Module) else ():
            nn.init.zeros_(parameter)
    first = next(iter(own))
    with pytest.raises(
        InputError, match=f"the {first} of this run is your own .*: pass that object"
    ):
        resume(tmp_path / "broken")
    resume(tmp_path / "broken", **fresh).fit()
    assert [line["loss"] for line in read_metrics(tmp_path / "broken")[1:]] == losses


def test_resume_wants_the_same_part(photos, tmp_path):
    Trainer(prepare(photos, SETTINGS | {"loss": pairwise_loss}), tmp_path / "own")
    with pytest.raises(InputError, match=r"started with the loss 'custom:.*pairwise_loss', not"):
        resume(tmp_path / "own", loss=ProxyLoss(5, 6))
    Trainer(prepare(photos, SETTINGS), tmp_path / "plain")
    with pytest.raises(InputError, match="started with the loss 'ap', not"):
        resume(tmp_path / "plain", loss=pairwise_loss)


def test_class_weights_are_dropped_with_a_note(photos):
    plan = prepare(photos, SETTINGS | {"loss": pairwise_loss})
    assert not plan.config.class_weights
    assert plan.notes[-1] == "this loss does not take weights: `class_weights` is off"
    plan = prepare(photos, SETTINGS | {"loss": QuantizedAPLoss(bins=5)})
    assert plan.config.class_weights
    assert not plan.notes
