from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from safetensors.torch import load_file

from listwise.data import Images, PhotoFile
from listwise.errors import InputError
from listwise.local.delf import (
    Delf,
    DelfConfig,
    DelfExtractor,
    DelfSettings,
    detect,
    find_locations,
    pyramid_sizes,
)
from listwise.local.extract import extract_features
from listwise.models import RetrievalNet
from listwise.models.storage import MODEL_FILE

BACKBONE = "test_resnet.r160_in1k"
EVERYTHING = 100_000


def make_net(seed: int = 0, dim: int = 8) -> Delf:
    torch.manual_seed(seed)
    config = DelfConfig(backbone=BACKBONE, hidden=16, dim=dim, mean=(0.5,) * 3, std=(0.25,) * 3)
    net = Delf(config).eval()
    rotation = torch.linalg.qr(torch.randn(net.channels, dim))[0].T
    net.pca_projection.copy_(rotation)
    return net


def smooth_photo(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    blurred = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(6))
    values = np.asarray(blurred).astype(float)
    values = (values - values.min()) / (values.max() - values.min()) * 255
    return Image.fromarray(values.astype(np.uint8))


def pixels(photo: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None]


@pytest.fixture(scope="module")
def net() -> Delf:
    return make_net()


@pytest.fixture(scope="module")
def folder(net, tmp_path_factory):
    out = tmp_path_factory.mktemp("delf") / "net"
    net.save(out)
    return out


# Where locations look


def test_a_location_looks_at_the_pixels_around_its_point():
    torch.manual_seed(0)
    config = DelfConfig(backbone="resnet18", hidden=1, dim=1, mean=(0.5,) * 3, std=(0.25,) * 3)
    net = Delf(config).eval()
    for name, values in net.backbone.named_parameters():
        if name.endswith("bn2.weight"):  # new blocks are their shortcuts alone
            torch.nn.init.ones_(values)
    row, column, side = 8, 7, 240
    support = torch.zeros(side, side)
    for _ in range(2):
        photo = torch.rand(1, 3, side, side, requires_grad=True)
        net.features(photo)[0, :, row, column].sum().backward()
        support += photo.grad[0].abs().sum(dim=0)
    rows, columns = (torch.nonzero(support.sum(dim=d))[:, 0] for d in (1, 0))
    assert 200 < columns.max() - columns.min() < side - 1
    assert (columns.min() + columns.max()) / 2 == net.stride * column
    assert (rows.min() + rows.max()) / 2 == net.stride * row
    # The points of an image and of its half: the centers of their pixels.
    photo = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
    found = find_locations(net, photo, DelfSettings(count=EVERYTHING, scales=(1.0, 0.5)))
    x, y, scale = found.places[0].T.numpy()
    whole, half = scale == net.stride, scale == 2 * net.stride
    assert whole.sum() + half.sum() == len(scale)
    for places in (x, y):
        assert set(places[whole]) == set(range(0, side, net.stride))
        assert set(places[half]) == {2 * p + 0.5 for p in range(0, side // 2, net.stride)}


# Levels


@given(
    st.integers(1, 6000),
    st.integers(1, 6000),
    st.lists(st.floats(0.05, 4), min_size=1, max_size=8),
    st.integers(32, 2048),
)
def test_levels_are_the_wanted_sizes_within_the_limits(width, height, scales, max_side):
    settings = DelfSettings(scales=tuple(sorted(scales, reverse=True)), max_side=max_side)
    found = pyramid_sizes(width, height, settings)
    assert found
    assert found == sorted(found, reverse=True)
    for columns, rows in found:
        assert min(abs(columns - max(1, width * scale)) for scale in scales) <= 0.5 + 1e-9
        assert min(abs(rows - max(1, height * scale)) for scale in scales) <= 0.5 + 1e-9
    if len(found) > 1:
        assert max(map(max, found)) <= max_side
        assert min(map(min, found)) >= 64


# What is chosen, and how it is described


def test_the_locations_of_most_attention_come_first(net):
    photo = pixels(smooth_photo(128, 96))
    settings = DelfSettings(count=EVERYTHING, scales=(1.0, 0.7071))
    everything = find_locations(net, photo, settings)
    with torch.inference_mode():
        scores = [net.scores(each[None, :, None, None]).item() for each in everything.features[0]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1] + 1e-4
    few = find_locations(net, photo, DelfSettings(count=11, scales=settings.scales))
    np.testing.assert_array_equal(few.places, everything.places[:, :11])
    np.testing.assert_array_equal(few.features, everything.features[:, :11])


def test_descriptors_are_the_projection_of_unit_features(net):
    photo = pixels(smooth_photo(128, 96))
    net = make_net()
    net.pca_mean.copy_(torch.rand(net.channels) / 10)
    found = find_locations(net, photo)
    rows = found.features[found.kept].double().numpy()
    rows /= np.sqrt((rows**2).sum(axis=1, keepdims=True))
    expected = (rows - net.pca_mean.double().numpy()) @ net.pca_projection.double().numpy().T
    expected /= np.sqrt((expected**2).sum(axis=1, keepdims=True))
    (features,) = detect(net, photo)
    np.testing.assert_allclose(features.descriptors, expected, atol=1e-5)
    assert features.descriptors.dtype == features.points.dtype == np.float32


def test_photos_are_seen_alike_alone_and_together_as_on_a_gpu(folder, tmp_path, monkeypatch):
    sizes = [(96, 72), (72, 96), (96, 72), (300, 200), (96, 72), (96, 72), (80, 64)]
    paths = [str(tmp_path / f"{number}.png") for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        smooth_photo(*size, number).save(path)
    Path(paths[4]).write_text("no photo")
    boxes = (None, None, (10, 0, 90, 70), None, None, None, None)
    images = Images(tuple(paths), tuple(paths), boxes)
    extractor = DelfExtractor(folder, DelfSettings(count=40, max_side=128), "cpu", bfloat16=False)
    alone = extract_features(images, tmp_path / "alone", extractor, workers=0)
    monkeypatch.setattr(DelfExtractor, "on_gpu", True)
    together = extract_features(images, tmp_path / "together", extractor, workers=2)
    assert alone.ids == together.ids == tuple(path for path in paths if path != paths[4])
    assert "4.png" in together.header.unreadable[0]
    assert together.sizes.tolist() == [list(size) for size in sizes[:4] + sizes[5:]]
    for one, two in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.points, two.points, atol=1e-3)
        np.testing.assert_allclose(one.scales, two.scales, rtol=1e-5)
        np.testing.assert_allclose(one.descriptors, two.descriptors, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_finds_the_same(folder, tmp_path):
    smooth_photo(128, 96).save(tmp_path / "photo.png")
    file, settings = PhotoFile(str(tmp_path / "photo.png")), DelfSettings(count=EVERYTHING)
    one = DelfExtractor(folder, settings, "cpu")(file)
    two = DelfExtractor(folder, settings, "cuda", bfloat16=False)(file)
    first, second = (np.lexsort((*each.points.T, each.scales)) for each in (one, two))
    assert (one.descriptors[first] * two.descriptors[second]).sum(axis=1).min() > 0.999


# The extractor


def test_points_are_in_pixels_of_the_whole_photo(folder, tmp_path):
    """For a part of a photo, a photo that is reduced, and a JPEG file decoded at a fraction."""
    photo = smooth_photo(160, 128)
    photo.save(tmp_path / "photo.png")
    photo.crop((40, 30, 140, 120)).save(tmp_path / "part.png")
    photo.resize((640, 512)).save(tmp_path / "large.png")
    photo.resize((640, 512)).save(tmp_path / "large.jpg", quality=95)
    extractor = DelfExtractor(folder, DelfSettings(count=EVERYTHING, max_side=160), "cpu")
    part = extractor(PhotoFile(str(tmp_path / "photo.png"), (40, 30, 140, 120)))
    inside = extractor(PhotoFile(str(tmp_path / "part.png")))
    np.testing.assert_allclose(part.points, inside.moved(40, 30).points, atol=1e-4)
    np.testing.assert_array_equal(part.descriptors, inside.descriptors)
    whole = np.sort(extractor(PhotoFile(str(tmp_path / "photo.png"))).scaled(4).points, axis=0)
    for name in ("large.png", "large.jpg"):
        large = np.sort(extractor(PhotoFile(str(tmp_path / name))).points, axis=0)
        np.testing.assert_allclose(large, whole, atol=1e-3)


# On disk


def test_a_saved_network_is_the_same(net, folder):
    again = Delf.load(folder)
    assert again.fingerprint() == net.fingerprint()
    photo = pixels(smooth_photo(96, 72))
    for one, two in zip(detect(net, photo), detect(again, photo), strict=True):
        np.testing.assert_allclose(one.points, two.points)
        np.testing.assert_allclose(one.descriptors, two.descriptors, atol=1e-5)
    assert [file.name for file in folder.iterdir()] == [MODEL_FILE]
    assert not any("layer4" in key for key in load_file(folder / MODEL_FILE))


def test_folders_that_are_none_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"expected model\.safetensors"):
        Delf.load(tmp_path)
    RetrievalNet(BACKBONE, weights="random").save(tmp_path / "global")
    with pytest.raises(InputError, match="DELF network"):
        Delf.load(tmp_path / "global")


def test_networks_that_cannot_be_are_refused():
    common = {"hidden": 4, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with pytest.raises(InputError, match="is not a ResNet of timm"):
        Delf(DelfConfig(backbone="mobilenetv3_small_050", dim=8, **common))
    with pytest.raises(InputError, match="192 dimensions"):
        Delf(DelfConfig(backbone=BACKBONE, dim=193, **common))
