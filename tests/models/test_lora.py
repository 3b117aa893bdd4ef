"""Low-rank changes of frozen weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss
from listwise.models import RetrievalNet
from listwise.models.backbone import create_backbone
from listwise.models.lora import LoRA, add_lora
from listwise.training import MultistageStep

LABELS = torch.arange(6) // 2


def changed_net(backbone: str = "test_vit") -> RetrievalNet:
    """A network in float64 with changes that are not zero."""
    torch.manual_seed(0)
    tiny = {} if backbone == "test_vit" else {"embed_dim": 32, "depth": 2, "num_heads": 2}
    net = RetrievalNet(create_backbone(backbone, **tiny), projection=8)
    add_lora(net, rank=2, alpha=4)
    for part in net.modules():
        if isinstance(part, LoRA):
            nn.init.normal_(part.up, std=0.1)
    return net.double().eval()


class Channels(nn.Module):
    """Moves the channels to the end for linear layers, or back."""

    def __init__(self, back: bool = False) -> None:
        super().__init__()
        self.order = (0, 3, 1, 2) if back else (0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


def images() -> Tensor:
    return torch.rand(6, 3, 40, 33, generator=torch.Generator().manual_seed(1)).double()


def test_nothing_changes_at_the_start() -> None:
    net = RetrievalNet("test_vit", weights="random").eval()
    before, state = net(images().float()), net.fingerprint()
    add_lora(net)
    torch.testing.assert_close(net(images().float()), before, rtol=0, atol=0)
    assert net.fingerprint() == state


def test_the_saved_network_is_plain_and_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = RetrievalNet("test_vit", projection=8, weights="random").eval()
    plain = set(net.state_dict())
    add_lora(net, rank=2)
    for part in net.modules():
        if isinstance(part, LoRA):
            nn.init.normal_(part.up)
    net.save(tmp_path)
    again = RetrievalNet.load(tmp_path)
    assert set(again.state_dict()) == plain
    assert not any(parametrize.is_parametrized(part) for part in again.modules())
    assert torch.equal(again(images().float()), net(images().float()))
    assert again.fingerprint() == net.fingerprint()


def test_parametrizations_of_the_user_are_saved_as_they_are(tmp_path: Path) -> None:
    def backbone() -> nn.Module:
        layer = weight_norm(nn.Linear(3, 4))
        return nn.Sequential(Channels(), layer, nn.Linear(4, 4), Channels(back=True))

    net = RetrievalNet(backbone(), "spoc").eval()
    add_lora(net, rank=2)  # only the second layer
    nn.init.normal_(next(part for part in net.modules() if isinstance(part, LoRA)).up)
    net.save(tmp_path)
    again = RetrievalNet.load(tmp_path, backbone=backbone())
    assert torch.equal(again(images().float()), net(images().float()))


@pytest.mark.parametrize("backbone", ["test_vit", "eva02_tiny_patch14_224"])
def test_gradients_are_the_slopes_of_the_loss(backbone: str) -> None:
    """EVA reads the weights of its attention without calling the layer."""
    net, photos = changed_net(backbone), images()

    def loss() -> Tensor:
        return net(photos)[:, 0].sum() + net(photos)[:, 1].square().sum()

    loss().backward()
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, p in net.named_parameters() if p.grad is not None}
    assert all("parametrizations.weight.0." in name for name in trained if "backbone" in name)
    assert {"projection.weight", "projection.bias", "pooling.p"} < trained
    parts = [part for part in net.modules() if isinstance(part, LoRA)]
    for part in (parts[0], parts[-1]):
        for parameter in (part.up, part.down):
            assert parameter.grad is not None
            with torch.no_grad():
                values = []
                for step in (1e-5, -1e-5):
                    parameter[1, 1] += step
                    values.append(loss())
                    parameter[1, 1] -= step
            slope = (values[0] - values[1]) / 2e-5
            torch.testing.assert_close(parameter.grad[1, 1], slope, rtol=1e-5, atol=1e-9)


def test_the_three_stages_give_the_gradient_of_the_whole_batch() -> None:
    net, photos = changed_net(), images()
    loss = QuantizedAPLoss()
    loss(net(photos), LABELS).backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    MultistageStep(net, loss, micro_batch=2)(photos, LABELS)
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_a_network_without_linear_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no linear layers: `lora` is for transformers"):
        add_lora(RetrievalNet("test_resnet", weights="random"))
