"""Losses, poolings and backbones of the user's own, in the step and in a run."""

import functools
import json

import pytest
import torch
import yaml
from custom_parts import (
    AttentionPooling,
    ProxyLoss,
    SharingWeights,
    SmallBackbone,
    WithLock,
    pairwise_loss,
)
from step_examples import assert_equal_gradients, gradients, make_batch, make_net
from tiny_net import TINY_NET
from torch import nn

from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss, class_balanced_weights
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import MultistageStep, Trainer, prepare, resume
from listwise.training.objective import accepted_arguments
from listwise.training.run.record import read_metrics
from listwise.training.run.view import TrainView

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.4,
    "val_max_side": 48,
    "batch_size": 16,
    "micro_batch": 6,
    "crops": {"size": 32},
    "updates": 3,
    "learning_rate": 1e-3,
    "warmup": 0,
    "validate_every": 2,
    "checkpoint_every": 2,
    "patience": None,
    "device": "cpu",
    "workers": 0,
}
# A module that the user made has its weights.
OWN_BACKBONE = {k: v for k, v in SETTINGS.items() if k not in ("backbone", "weights")}


def pml_losses():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    return {"triplets": losses.TripletMarginLoss(), "proxies": losses.ProxyAnchorLoss(3, 6)}


@pytest.mark.parametrize("kind", ["function", "partial", "proxies", "pml triplets", "pml proxies"])
@pytest.mark.parametrize("micro_batch", [4, 64])
def test_any_loss_has_the_gradient_of_ordinary_backpropagation(kind, micro_batch):
    if kind.startswith("pml"):
        loss = pml_losses()[kind.removeprefix("pml ")]
    else:
        torch.manual_seed(2)
        whole = functools.partial(lambda scale, d, y: scale * pairwise_loss(d, y), 3.0)
        losses = {"function": pairwise_loss, "partial": whole, "proxies": ProxyLoss(3, 6)}
        loss = losses[kind]
    if isinstance(loss, nn.Module):
        loss.double()
    net, (images, labels) = make_net(), make_batch(11)
    value = loss(net(images), labels)
    value.backward()
    expected = gradients(net) | (gradients(loss) if isinstance(loss, nn.Module) else {})
    net.zero_grad()
    if isinstance(loss, nn.Module):
        loss.zero_grad()
    actual_value = MultistageStep(net, loss, micro_batch)(images, labels)
    torch.testing.assert_close(actual_value, value.detach(), rtol=1e-12, atol=0)
    actual = gradients(net) | (gradients(loss) if isinstance(loss, nn.Module) else {})
    assert_equal_gradients(actual, expected, 1e-9)


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
    loss = QuantizedAPLoss()
    value = loss(net(images), labels)
    value.backward()
    expected = {name: g for name, g in gradients(net).items() if g.norm() > 0}
    net.zero_grad()
    MultistageStep(net, loss, 4)(images, labels)
    assert_equal_gradients({name: gradients(net)[name] for name in expected}, expected, 1e-9)


@pytest.mark.parametrize("backbone", [SmallBackbone, WithLock, SharingWeights])
def test_half_precision_takes_any_backbone(backbone, photos):
    torch.manual_seed(4)
    net = RetrievalNet(backbone(), AttentionPooling(10)).train()
    images, labels = make_batch(9, torch.float32, side=24)
    value = pairwise_loss(net(images), labels)
    value.backward()
    expected = gradients(net)
    net.zero_grad()
    step = MultistageStep(net, pairwise_loss, 4, autocast=torch.bfloat16)
    torch.testing.assert_close(step(images, labels), value.detach(), rtol=0.05, atol=0)
    actual = gradients(net)
    whole = [
        torch.cat([found[name].flatten() for name in expected]) for found in (actual, expected)
    ]
    assert (whole[0] - whole[1]).norm() < 0.1 * whole[1].norm()
    few = read_labelled(photos).subset(range(4))
    full, half = (
        embed_photos(net, few, max_side=32, autocast=autocast).descriptors.float()
        for autocast in (None, torch.bfloat16)
    )
    assert (full * half).sum(1).min() > 0.99


def takes_both(descriptors, labels, weights=None, *, queries=None): ...
def takes_weights(descriptors, labels, weights): ...
def takes_anything(*arguments, **options): ...


@functools.wraps(takes_both)
def wrapped(*arguments, **options): ...


def test_what_a_loss_takes_is_in_its_signature():
    assert accepted_arguments(takes_both) == {"weights", "queries"}
    assert accepted_arguments(wrapped) == {"weights", "queries"}
    assert accepted_arguments(QuantizedAPLoss()) == {"weights", "queries"}
    assert accepted_arguments(functools.partial(takes_both, weights=None)) == {"queries"}
    assert accepted_arguments(functools.partial(takes_weights, weights=None)) == set()
    assert accepted_arguments(pairwise_loss) == accepted_arguments(takes_anything) == set()
    assert accepted_arguments(ProxyLoss(2, 2)) == set()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (QuantizedAPLoss, r"not a class: pass QuantizedAPLoss\(\)"),
        ("ap", "a callable of descriptors and labels, not str"),
        (lambda descriptors: descriptors.sum(), r"cannot be called as loss\(descriptors, labels\)"),
        (takes_weights, "missing a required argument: 'weights'"),
    ],
)
def test_what_is_no_loss_is_refused_at_once(loss, message):
    with pytest.raises(InputError, match=message):
        MultistageStep(make_net(), loss)


def test_weights_need_a_loss_that_takes_them():
    with pytest.raises(InputError, match="this loss does not take weights: leave `weighting` out"):
        MultistageStep(make_net(), pairwise_loss, weighting=class_balanced_weights)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda d, y: d.sum(1), r"must return a scalar tensor, not \[8\]"),
        (lambda d, y: 1.0, "must return a scalar tensor, not float"),
        (lambda d, y: d.detach().sum(), "does not depend on the descriptors"),
    ],
)
def test_what_a_loss_returns_is_checked(loss, message):
    with pytest.raises(InputError, match=message):
        MultistageStep(make_net(), loss, 4)(*make_batch(8))


def test_an_error_in_the_loss_is_raised_unchanged():
    def broken(descriptors, labels):
        return descriptors + None

    with pytest.raises(TypeError, match="unsupported operand"):
        MultistageStep(make_net(), broken, 4)(*make_batch(8))


class Stop(TrainView):
    """Stops a run at an update."""

    def __init__(self, at):
        self.at = at

    def update(self, report):
        if report.update == self.at:
            raise KeyboardInterrupt


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
    kept = json.loads((tmp_path / "whole" / "model" / "config.json").read_text())
    assert kept["provenance"]["training"]["settings"] == config

    again = run_parts(kind)
    with pytest.raises(KeyboardInterrupt):
        Trainer(prepare(photos, again), tmp_path / "broken", Stop(3)).fit()
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


def test_a_backbone_of_your_own_is_not_chosen_for_you(photos):
    plan = prepare(photos, {"backbone": SmallBackbone(), "device": "cpu", "val_fraction": 0.4})
    assert plan.config.backbone == "custom:custom_parts.SmallBackbone"
    assert "backbone" not in plan.reasons
