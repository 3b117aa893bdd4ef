"""Backbones and poolings of the user's own, in a network."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.storage import read_model


class Backbone(nn.Module):
    """[B, 3, H, W] -> [B, 12, H/2, W/2]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, 2, 1)
        self.norm = nn.BatchNorm2d(12)

    def forward(self, images):
        return self.norm(self.conv(images)).relu()


class Pooling(nn.Module):
    """[B, 12, H, W] -> [B, 5]."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, 5)

    def forward(self, features):
        return self.linear(features.mean((2, 3)))


IMAGES = torch.rand(4, 3, 40, 56, generator=torch.Generator().manual_seed(0))
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def test_a_network_of_your_own_parts_computes_what_they_say():
    backbone, pooling = Backbone(), Pooling()
    net = RetrievalNet(backbone, pooling)
    expected = (IMAGES - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
    expected = F.normalize(pooling(backbone.eval()(expected)), dim=1)
    torch.testing.assert_close(net(IMAGES), expected)
    assert net.dim == 5
    assert not net.backbone.norm.training, "batch norm is frozen"


def test_the_length_of_descriptors_is_found():
    assert RetrievalNet(Backbone(), "gem").dim == 12
    assert RetrievalNet(Backbone(), Pooling(), projection=3)(IMAGES).shape == (4, 3)
    assert RetrievalNet("test_resnet", Pooling(96), weights="random")(IMAGES).shape == (4, 5)


def test_mean_and_std_are_the_backbone_s_imagenet_s_or_given():
    of_timm = RetrievalNet(timm.create_model("test_vit", dynamic_img_size=True))
    assert of_timm.config.mean == (0.5, 0.5, 0.5)
    assert of_timm(torch.rand(1, 3, 160, 160)).shape == (1, of_timm.dim)
    net = RetrievalNet(Backbone())
    assert net.config.mean == pytest.approx(MEAN.tolist())
    assert net.config.std == pytest.approx(STD.tolist())
    net = RetrievalNet(Backbone(), mean=(0, 0, 0), std=[1, 1, 2])
    assert net.config.mean == (0, 0, 0)
    torch.testing.assert_close(net.std.flatten(), torch.tensor([1.0, 1.0, 2.0]))
    with pytest.raises(InputError, match="std must be three numbers"):
        RetrievalNet(Backbone(), std=[1])


def test_saved_and_opened_with_the_parts_again(tmp_path):
    net = RetrievalNet(Backbone(), Pooling(), mean=(0.1, 0.2, 0.3)).eval()
    net.save(tmp_path)
    config = read_model(tmp_path).info.network
    assert config.backbone == f"custom:{__name__}.Backbone"
    assert config.pooling == f"custom:{__name__}.Pooling"
    again = RetrievalNet.load(tmp_path, backbone=Backbone(), pooling=Pooling())
    torch.testing.assert_close(again(IMAGES), net(IMAGES), rtol=0, atol=0)
    assert again.fingerprint() == net.fingerprint()
    assert not again.training
    other = RetrievalNet(type("Other", (Backbone,), {})(), net.pooling, mean=(0.1, 0.2, 0.3))
    other.backbone.load_state_dict(net.backbone.state_dict())
    assert other.fingerprint() != net.fingerprint(), "the class is another one"


def test_opened_without_the_parts_it_names_them(tmp_path):
    RetrievalNet(Backbone(), Pooling()).save(tmp_path)
    with pytest.raises(InputError, match=r"Backbone.*Pooling.*backbone=Backbone\(\), pooling="):
        RetrievalNet.load(tmp_path)
    with pytest.raises(InputError, match=r"has a pooling of your own.*pooling=Pooling\(\)"):
        RetrievalNet.load(tmp_path, backbone=Backbone())
    with pytest.raises(InputError, match=r"do not fit its settings: tensors"):
        RetrievalNet.load(tmp_path, backbone=nn.Conv2d(3, 12, 3), pooling=Pooling())
    RetrievalNet("test_resnet", weights="random").save(tmp_path)
    with pytest.raises(InputError, match="'test_resnet': do not pass a `backbone`"):
        RetrievalNet.load(tmp_path, backbone=Backbone())


@pytest.mark.parametrize(
    ("backbone", "pooling", "message"),
    [
        (Backbone, "gem", r"not a class: pass Backbone\(\)"),
        (3, "gem", "backbone must be a name or an nn.Module, not int"),
        (Backbone(), lambda x: x, "pooling must be a name or an nn.Module, not function"),
        (torchvision.models.resnet18(), "gem", r"returns \[2, 1000.*cannot be pooled"),
        (nn.Linear(3, 4), "gem", "backbone Linear fails on an input"),
        (Backbone(), nn.Identity(), r"the pooling Identity returns \[2, 12, 112, 112\]"),
        (Backbone(), nn.Linear(7, 8), "the pooling Linear fails on an input"),
        (Backbone(), "gemm", "unknown pooling 'gemm': choose one of gem, mac"),
    ],
)
def test_parts_that_do_not_work_are_one_line(backbone, pooling, message):
    with pytest.raises(InputError, match=message) as caught:
        RetrievalNet(backbone, pooling)
    assert "\n" not in str(caught.value)
