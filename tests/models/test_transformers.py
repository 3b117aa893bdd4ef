"""Vision transformers at any size: positions, patches, tokens and poolings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.backbone import create_backbone, split_features
from listwise.models.weights import load_backbone

TINY: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
# Backbones with and without class token, register tokens, and rotary positions: number of tokens
# before the patches, whether the first one is a class token, side of a patch.
FAMILIES = {
    "test_vit": (1, True, 16),
    "vit_small_patch14_reg4_dinov2": (5, True, 14),
    "vit_small_patch16_dinov3": (5, True, 16),
    "vit_base_patch32_siglip_256": (0, False, 32),
    "vit_mediumd_patch16_reg4_gap_256": (4, False, 16),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tiny(name: str, **options: Any) -> nn.Module:
    model = create_backbone(name, **({} if name == "test_vit" else TINY), **options)
    return model.double().eval()


def cubic_matrix(before: int, after: int) -> NDArray[np.float64]:
    """Cubic interpolation (a = -1/2) of `before` samples to `after`, averaged when it shrinks."""
    ratio = before / after
    width = max(ratio, 1.0)
    matrix = np.zeros((after, before))
    for row in range(after):
        center = (row + 0.5) * ratio
        for column in range(before):
            x = abs(column + 0.5 - center) / width
            if x < 1:
                matrix[row, column] = 1.5 * x**3 - 2.5 * x**2 + 1
            elif x < 2:
                matrix[row, column] = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return matrix / matrix.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("size", [(97, 130), (300, 96), (160, 160)])
def test_positions_are_interpolated_to_the_patches_of_the_photo(size: tuple[int, int]) -> None:
    net = RetrievalNet("test_vit", weights="random").double().eval()
    model: Any = net.backbone
    nn.init.normal_(model.pos_embed)
    images = torch.rand(2, 3, *size, dtype=torch.float64)
    rows, columns = (-(-side // 16) for side in size)

    pixels = (images - net.mean) / net.std
    pixels = F.pad(pixels, (0, 16 * columns - size[1], 0, 16 * rows - size[0]))
    patches = pixels.reshape(2, 3, rows, 16, columns, 16).permute(0, 2, 4, 1, 3, 5)
    weight = model.patch_embed.proj.weight.flatten(1)
    tokens = patches.reshape(2, rows * columns, -1) @ weight.T + model.patch_embed.proj.bias
    grid = model.pos_embed[0, 1:].detach().numpy().reshape(10, 10, -1)
    positions = np.einsum("ij,kl,jlc->ikc", cubic_matrix(10, rows), cubic_matrix(10, columns), grid)
    tokens = tokens + torch.from_numpy(positions).reshape(1, rows * columns, -1)
    first = (model.cls_token + model.pos_embed[:, :1]).expand(2, -1, -1)
    tokens = model.norm(model.blocks(torch.cat([first, tokens], dim=1)))
    expected = F.normalize(tokens[:, 1:].clamp(min=1e-6).pow(3).mean(dim=1).pow(1 / 3), dim=1)

    # timm interpolates in float32.
    torch.testing.assert_close(net(images), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_patches_are_in_the_feature_map(name: str) -> None:
    before, has_class, side = FAMILIES[name]
    model: Any = tiny(name)
    images = torch.randn(2, 3, 70, 101, dtype=torch.float64)
    features, class_token = split_features(model, images)
    tokens = model.forward_features(images)
    rows, columns = -(-70 // side), -(-101 // side)
    assert tokens.shape[1] == before + rows * columns
    torch.testing.assert_close(features[:, :, 1, 2], tokens[:, before + columns + 2])
    assert (class_token is not None) is has_class
    if class_token is not None:
        torch.testing.assert_close(class_token, tokens[:, 0])
    alone = torch.cat([split_features(model, image[None])[0] for image in images])
    torch.testing.assert_close(alone, features, rtol=0, atol=1e-12)


def test_class_token_and_patches_are_pooled_together() -> None:
    images = torch.rand(3, 3, 50, 66, dtype=torch.float64)
    model = tiny("vit_small_patch16_dinov3")
    dims, found = {}, {}
    for pooling in ("gem", "cls", "cls+gem"):
        net = RetrievalNet(model, pooling).eval()
        dims[pooling], found[pooling] = net.dim, net(images)
    assert dims == {"gem": 32, "cls": 32, "cls+gem": 64}
    both = torch.cat([found["cls"], found["gem"]], dim=1) / 2**0.5
    torch.testing.assert_close(found["cls+gem"], both)


def test_a_pooled_network_is_saved_with_its_pooling(tmp_path: Path) -> None:
    net = RetrievalNet("test_vit", "cls+gem", weights="random").eval()
    assert net.dim == 128
    net.save(tmp_path)
    images = torch.rand(1, 3, 40, 90)
    torch.testing.assert_close(RetrievalNet.load(tmp_path)(images), net(images))


@pytest.mark.parametrize("backbone", ["test_vit2", "test_resnet"])
def test_a_class_token_that_does_not_exist_is_refused(backbone: str) -> None:
    with pytest.raises(InputError, match="no class token: choose the `pooling` gem"):
        RetrievalNet(backbone, "cls", weights="random")


@pytest.mark.parametrize("name", ["test_vit2", "test_vit3"])
def test_released_weights_keep_their_last_norm(name: str, tmp_path: Path) -> None:
    """`test_vit2` averages patches and has its norm after that, `test_vit3` has a pooling head."""
    released: Any = timm.create_model(name, dynamic_img_size=True).eval()
    for part in (released.norm, released.fc_norm):
        for parameter in part.parameters():
            nn.init.normal_(parameter)
    file = tmp_path / "released.safetensors"
    save_file(released.state_dict(), file)
    images = torch.randn(1, 3, 64, 96)
    expected: Tensor = released.fc_norm(released.forward_features(images))[:, 1:]
    by_name = create_backbone(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)})
    for loaded in (by_name, load_backbone(name, file)[0]):
        features, _ = split_features(loaded.eval(), images)
        torch.testing.assert_close(features.flatten(2).transpose(1, 2), expected)
