import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.models import POOLINGS, RetrievalNet
from listwise.models.backbone import create_backbone, feature_map
from listwise.models.net import live_batch_norms
from listwise.models.storage import NetConfig

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


def stir_batch_norm(net: nn.Module) -> None:
    """Give every batch norm statistics unlike the initial ones."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_any_size_gives_unit_rows(backbone: str) -> None:
    dim, _ = BACKBONES[backbone]
    net = RetrievalNet(backbone, weights="random").eval()
    assert net.dim == dim
    with torch.no_grad():
        for size in ((97, 130), (64, 224)):
            descriptors = net(photos(2, *size))
            assert descriptors.shape == (2, dim)
            assert descriptors.dtype == torch.float32
            torch.testing.assert_close(descriptors.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_feature_map_keeps_the_layout_of_the_image(backbone: str) -> None:
    channels, grid = BACKBONES[backbone]
    model = create_backbone(backbone).eval()
    images = torch.randn(1, 3, 97, 130)
    with torch.no_grad():
        assert feature_map(model, images).shape == (1, channels, *grid)


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_patch_tokens_stay_where_their_patches_are(backbone: str) -> None:
    model = create_backbone(backbone).eval()
    model.blocks = nn.Identity()  # without attention a patch decides its own token alone
    images = torch.randn(1, 3, 96, 128)
    changed = images.clone()
    changed[:, :, 32:48, 80:96] += 1.0  # the patch at row 2, column 5
    with torch.no_grad():
        moved = (feature_map(model, images) - feature_map(model, changed)).abs().amax(dim=(0, 1))
    assert moved.nonzero().tolist() == [[2, 5]]


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


def test_is_backbone_then_gem_then_unit_length() -> None:
    net = RetrievalNet("resnet18", weights="random").double().eval()
    images = photos()
    mean = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64).view(3, 1, 1)
    with torch.no_grad():
        features = net.backbone.forward_features((images / 255.0 - mean) / std)
        vectors = features.clamp(min=1e-6).pow(3).mean(dim=(2, 3)).pow(1 / 3)
        expected = vectors / vectors.norm(dim=1, keepdim=True)
        torch.testing.assert_close(net(images), expected, rtol=1e-5, atol=1e-6)


def test_uint8_and_float_images_mean_the_same() -> None:
    net = small_net().eval()
    images = photos()
    torch.testing.assert_close(net(images), net(images.float() / 255))


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
    stir_batch_norm(net)
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


def test_live_batch_norms_are_named() -> None:
    net = small_net()
    assert live_batch_norms(net) == []
    net.backbone.layer1.train()
    assert live_batch_norms(net) == ["backbone.layer1.0.bn1", "backbone.layer1.0.bn2"]
    foreign = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert live_batch_norms(foreign) == ["1"]
    assert live_batch_norms(foreign.eval()) == []
    assert live_batch_norms(nn.BatchNorm1d(2, track_running_stats=False).eval()) == [""]


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
    net = RetrievalNet("dla34", weights="random")
    with pytest.raises(InputError, match=r"97×130.*use images of 224×224"):
        net(photos(1, 97, 130))


def test_a_backbone_without_a_map_is_refused() -> None:
    net = RetrievalNet("cait_xxs24_224", weights="random")
    with pytest.raises(InputError, match="must return a feature map"):
        net(photos(1, 224, 224))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_save_and_load_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    net = small_net(projection=12).to(dtype).eval()
    stir_batch_norm(net)
    net.config.provenance["epochs"] = 3
    net.save(tmp_path / "runs" / "first")
    assert sorted(p.name for p in (tmp_path / "runs" / "first").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    again = RetrievalNet.load(tmp_path / "runs" / "first")
    images = photos()
    with torch.no_grad():
        assert torch.equal(again(images), net(images))
    assert again.config == net.config
    assert not again.training
    assert again.fingerprint() == net.fingerprint()


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_transformers_are_saved_whole(tmp_path: Path, backbone: str) -> None:
    net = RetrievalNet(backbone, "spoc", weights="random").eval()
    net.save(tmp_path)
    images = photos()
    with torch.no_grad():
        assert torch.equal(RetrievalNet.load(tmp_path)(images), net(images))


def forget_fingerprint(folder: Path) -> None:
    """Save the weights as earlier versions did: a config may then be edited."""
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


def test_preprocessing_comes_from_the_folder(tmp_path: Path) -> None:
    net = small_net().eval()
    net.save(tmp_path)
    forget_fingerprint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["mean"] = [0.1, 0.2, 0.3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = RetrievalNet.load(tmp_path)
    torch.testing.assert_close(other.mean.flatten(), torch.tensor([0.1, 0.2, 0.3]))
    assert other.fingerprint() != net.fingerprint()
    images = photos()
    assert not torch.allclose(other(images), net(images), atol=1e-4)


def test_fingerprint_sees_one_weight_and_not_the_provenance() -> None:
    net = small_net()
    first = net.fingerprint()
    net.config.provenance["note"] = "the same network"
    assert net.fingerprint() == first
    with torch.no_grad():
        net.backbone.conv1[0].weight[0, 0, 0, 0] += 1e-3
    assert net.fingerprint() != first


def test_a_save_that_fails_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small_net()
    net.save(tmp_path)
    before = net.fingerprint()
    with torch.no_grad():
        net.pooling.p += 1

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        net.save(tmp_path)
    assert RetrievalNet.load(tmp_path).fingerprint() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_only_a_network_with_a_teacher_has_fields_that_earlier_versions_refuse() -> None:
    known = {"format_version", "backbone", "pooling", "projection", "normalize_pooled", "mean"}
    known |= {"std", "image_size", "provenance"}
    config = NetConfig(backbone="x", pooling="gem", mean=(0, 0, 0), std=(1, 1, 1), image_size=224)
    assert set(json.loads(config.model_dump_json())) == known
    student = config.model_copy(update={"teacher": "abc"})
    assert set(json.loads(student.model_dump_json())) == known | {"teacher"}


def test_a_file_is_not_saved_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match="is a file"):
        small_net().save(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_folders_that_hold_no_network(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model folder"):
        RetrievalNet.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"expected config\.json"):
        RetrievalNet.load(tmp_path)
    small_net().save(tmp_path)
    path = tmp_path / "config.json"
    good = path.read_text()

    def with_fields(**fields: object) -> str:
        return json.dumps(json.loads(good) | fields)

    for text, reason in [
        ("{", "not JSON"),
        ("[]", "is not the config of a network"),
        (with_fields(format_version=99), "newer Listwise"),
        (with_fields(color="red"), "color"),
        (with_fields(mean=[0.5]), "mean"),
        (with_fields(backbone="resnet00"), "do not match the fingerprint"),
        (with_fields(backbone="resnet34"), "do not match the fingerprint"),
        (with_fields(projection=4), "do not match the fingerprint"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=reason) as caught:
            RetrievalNet.load(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_text(good)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(InputError, match="damaged"):
        RetrievalNet.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"expected model\.safetensors"):
        RetrievalNet.load(tmp_path)
