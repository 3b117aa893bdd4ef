import json
from pathlib import Path

import pytest
import torch
from tiny_net import trained
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.files import write_tensors
from listwise.models import POOLINGS, RetrievalNet
from listwise.models.storage import read_tensors, state_digest

BACKBONES = {
    "resnet18": (512, (4, 5)),
    "vit_tiny_patch16_224": (192, (7, 9)),
    "deit_tiny_distilled_patch16_224": (192, (7, 9)),
    "vit_tiny_r_s16_p8_224": (192, (4, 5)),
    "tf_efficientnet_lite0": (1280, (4, 5)),
    "convnext_atto": (320, (3, 4)),
    "swin_tiny_patch4_window7_224": (768, (4, 5)),
    "efficientvit_b0": (128, (4, 5)),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def small_net(pooling: str = "gem", projection: int | None = None) -> RetrievalNet:
    return RetrievalNet("test_resnet", pooling, projection, weights="random")


def photos(count: int = 2, height: int = 65, width: int = 97) -> Tensor:
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_any_size_gives_unit_rows(backbone: str) -> None:
    dim, grid = BACKBONES[backbone]
    net = RetrievalNet(backbone, weights="random").eval()
    assert net.dim == dim
    with torch.no_grad():
        assert net.features(photos(1, 97, 130)).shape == (1, dim, *grid)
        for size in ((97, 130), (64, 224)):
            descriptors = net(photos(2, *size))
            assert descriptors.shape == (2, dim)
            assert descriptors.dtype == torch.float32
            torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_and_projection(pooling: str) -> None:
    net = small_net(pooling, projection=16).eval()
    descriptors = net(photos())
    assert net.dim == 16
    assert descriptors.shape == (2, 16)
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))
    descriptors[:, 0].sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_images_of_another_kind_are_refused() -> None:
    net = small_net()
    with pytest.raises(InputError, match=r"\[B, 3, H, W\], not \[2, 1, 65, 97\]"):
        net(photos()[:, :1])
    with pytest.raises(InputError, match="int64"):
        net(photos().long())


def test_float64_stays_and_autocast_gives_single() -> None:
    net = small_net(projection=8)
    images = photos()
    exact = small_net(projection=8).double()
    exact.load_state_dict(net.state_dict())
    assert exact(images).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        descriptors = net(images)
    assert descriptors.dtype == torch.float32
    torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(descriptors.double(), exact(images), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
def test_batch_norm_is_frozen_in_training(backbone: str) -> None:
    net = RetrievalNet(backbone, weights="random")
    trained(net)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    images = photos(3)
    with torch.no_grad():
        alone = net.eval()(images[:1])
    assert net.train().training
    together = net(images)
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-6)
    together[:, 0].sum().backward()
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name]), name
    scales = [m.weight for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(scale.grad is not None for scale in scales)


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(InputError, match=r"'resnet1O1'.*resnet101"):
        RetrievalNet("resnet1O1", weights="random")
    with pytest.raises(InputError, match="hf-hub"):
        RetrievalNet("hf-hub:timm/resnet18.a1_in1k", weights="random")
    with pytest.raises(InputError, match=r"tagged 'no_such'.*resnet18\.a1_in1k"):
        RetrievalNet("resnet18.no_such", weights="random")
    with pytest.raises(InputError, match="unknown pooling"):
        RetrievalNet("resnet18", "max", weights="random")
    with pytest.raises(InputError, match="projection"):
        RetrievalNet("resnet18", projection=0, weights="random")


def test_a_size_that_a_backbone_cannot_take_is_reported() -> None:
    net = RetrievalNet("vit_relpos_small_patch16_224", weights="random")
    with pytest.raises(InputError, match=r"97×130.*use images of 224×224"):
        net(photos(1, 97, 130))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_save_and_load_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    net = small_net(projection=12).to(dtype).eval()
    trained(net)
    net.config.provenance["epochs"] = 3
    net.save(tmp_path / "runs" / "first")
    assert [p.name for p in (tmp_path / "runs" / "first").iterdir()] == ["model.safetensors"]
    again = RetrievalNet.load(tmp_path / "runs" / "first")
    images = photos()
    with torch.no_grad():
        assert torch.equal(again(images), net(images))
    assert again.config == net.config
    assert not again.training
    assert again.fingerprint() == net.fingerprint()
    again.config.provenance["note"] = "the same network"
    assert again.fingerprint() == net.fingerprint()
    with torch.no_grad():
        again.backbone.conv1[0].weight[0, 0, 0, 0] += 0.1
    assert again.fingerprint() != net.fingerprint()


def test_a_file_is_not_saved_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match="is a file"):
        small_net().save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_folders_that_hold_no_network(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model folder"):
        RetrievalNet.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"expected model\.safetensors"):
        RetrievalNet.load(tmp_path)
    small_net().save(tmp_path)
    tensors, metadata = read_tensors(tmp_path / "model.safetensors")
    good = json.loads(metadata["listwise"])

    def with_fields(**fields: object) -> str:
        return json.dumps(good | {"network": good["network"] | fields})

    for text, reason in [
        ("{", "header cannot be read"),
        ("[]", "header cannot be read"),
        (json.dumps(good | {"format_version": 99}), "newer Listwise"),
        (with_fields(color="red"), "color"),
        (with_fields(mean=[0.5]), "mean"),
        (with_fields(backbone="resnet00"), "resnet00"),
        (with_fields(backbone="resnet34"), "do not fit its settings"),
        (with_fields(projection=4), "do not fit its settings"),
    ]:
        checksum = state_digest({"listwise": text}, tensors)
        write_tensors(
            tmp_path / "model.safetensors", tensors, {"listwise": text, "checksum": checksum}
        )
        with pytest.raises(InputError, match=reason) as caught:
            RetrievalNet.load(tmp_path)
        assert "\n" not in str(caught.value)
    for kept, reason in (({}, "not a model of Listwise"), (metadata, "does not match its check")):
        write_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)}, kept)
        with pytest.raises(InputError, match=reason):
            RetrievalNet.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(InputError, match="damaged"):
        RetrievalNet.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"expected model\.safetensors"):
        RetrievalNet.load(tmp_path)
