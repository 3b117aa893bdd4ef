"""Low-rank changes of frozen weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.backbone import create_backbone
from listwise.models.lora import LoRA, add_lora


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
    torch.manual_seed(0)
    tiny = {} if backbone == "test_vit" else {"embed_dim": 32, "depth": 2, "num_heads": 2}
    net = RetrievalNet(create_backbone(backbone, **tiny), projection=8)
    add_lora(net, rank=2, alpha=4)
    parts = [part for part in net.modules() if isinstance(part, LoRA)]
    for part in parts:
        nn.init.normal_(part.up, std=0.1)
    photos, net = images(), net.double().eval()
    net(photos)[:, 0].sum().backward()
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, p in net.named_parameters() if p.grad is not None}
    assert all("parametrizations.weight.0." in name for name in trained if "backbone" in name)
    assert {"projection.weight", "projection.bias", "pooling.p"} < trained
    for parameter in (parts[0].up, parts[0].down, parts[-1].up, parts[-1].down):
        values = []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                parameter[1, 1] += step
                values.append(net(photos)[:, 0].sum())
                parameter[1, 1] -= step
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(parameter.grad[1, 1], slope, rtol=1e-5, atol=1e-9)


def test_a_network_without_linear_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no linear layers: `lora` is for transformers"):
        add_lora(RetrievalNet("test_resnet", weights="random"))
