import json
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from safetensors.torch import load_file, save_file

from listwise.data import Images, PhotoFile, pipeline
from listwise.errors import InputError
from listwise.local.delf import extractor as extractor_module
from listwise.local.delf.extractor import DelfExtractor, detect, find_locations, pyramid_sizes
from listwise.local.delf.net import Delf, DelfConfig, resize
from listwise.local.delf.settings import DelfSettings
from listwise.local.extract import Extractor, extract_features
from listwise.local.verification import similar_pairs
from listwise.models import RetrievalNet
from listwise.models.storage import CONFIG_FILE, WEIGHTS_FILE

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


def attend_to(net: Delf, wanted: torch.Tensor, unwanted: torch.Tensor) -> None:
    """Make the attention high where features [C] are like the wanted ones."""
    direction = torch.nn.functional.normalize(wanted - unwanted, dim=0)
    middle = direction @ (wanted + unwanted) / 2
    with torch.no_grad():
        for parameter in net.attention.parameters():
            parameter.zero_()
        net.attention[0].weight[0, :, 0, 0] = direction
        net.attention[0].bias[0] = -middle
        net.attention[2].weight[0, 0, 0, 0] = 10.0
        net.attention[2].bias[0] = -5.0


def with_blob(x: int, y: int) -> torch.Tensor:
    grid_y, grid_x = np.mgrid[:256, :256]
    bright = np.exp(-((grid_x - x) ** 2 + (grid_y - y) ** 2) / (2 * 20.0**2))
    return torch.from_numpy((60 + 190 * bright).astype(np.uint8)).expand(1, 3, -1, -1)


@pytest.mark.parametrize(("x", "y"), [(80, 80), (176, 80), (112, 176)])
def test_the_strongest_points_follow_a_blob(x, y):
    net = make_net()
    seen = net.features(resize(with_blob(128, 128), (256, 256)))[0].detach()
    attend_to(net, seen[:, 8, 8], seen[:, 2, 8])
    (found,) = detect(net, with_blob(x, y), DelfSettings(count=9, scales=(1.0, 0.7071)))
    assert np.abs(found.points - (x, y)).max() <= 32
    assert np.abs(found.points.mean(axis=0) - (x, y)).max() <= 10


def test_points_of_a_photo_and_of_its_enlargement_agree(net):
    small = smooth_photo(160, 112)
    large = small.resize((320, 224), Image.Resampling.BICUBIC)
    (one,) = detect(net, pixels(small), DelfSettings(count=EVERYTHING, scales=(1.0,)))
    (two,) = detect(net, pixels(large), DelfSettings(count=EVERYTHING, scales=(0.5,)))
    assert len(one) == 10 * 7
    one = one.scaled(2)
    first, second = (np.lexsort(np.rint(each.points).T) for each in (one, two))
    np.testing.assert_allclose(one.points[first], two.points[second], atol=1e-3)
    np.testing.assert_allclose(one.scales, 32.0)
    np.testing.assert_allclose(two.scales, 32.0)
    nearest = (one.descriptors[first] @ two.descriptors[second].T).argmax(axis=1)
    assert (nearest == np.arange(len(one))).mean() > 0.9


def test_every_level_covers_the_photo(net):
    settings = DelfSettings(count=EVERYTHING)
    (found,) = detect(net, pixels(smooth_photo(211, 149)), settings)
    for scale in np.unique(found.scales):
        points = found.points[found.scales == scale]
        assert points.min() >= -0.5
        assert (points.max(axis=0) <= (210.5, 148.5)).all()
        assert (points.min(axis=0) < scale).all()
        assert (points.max(axis=0) > np.array([211, 149]) - 1.5 * scale).all()
    # Twice the photo's size down to the level whose short side is 64 or more.
    assert len(np.unique(found.scales)) == len(pyramid_sizes(211, 149, settings)) == 5
    np.testing.assert_array_equal(found.shapes, np.broadcast_to(np.eye(2), found.shapes.shape))


# Levels


@given(
    st.integers(1, 6000),
    st.integers(1, 6000),
    st.lists(st.floats(0.05, 4), min_size=1, max_size=8),
    st.integers(32, 2048),
)
def test_levels_are_the_wanted_sizes_within_the_limits(width, height, scales, max_side):
    settings = DelfSettings(scales=tuple(scales), max_side=max_side)
    found = pyramid_sizes(width, height, settings)
    assert found
    assert found == sorted(found, reverse=True)
    for columns, rows in found:
        assert min(abs(columns - max(1, width * scale)) for scale in scales) <= 0.5 + 1e-9
        assert min(abs(rows - max(1, height * scale)) for scale in scales) <= 0.5 + 1e-9
    if len(found) > 1:
        assert max(map(max, found)) <= max_side
        assert min(map(min, found)) >= 64


def test_photos_of_any_usual_size_cost_about_the_same():
    def work(width: int, height: int) -> int:
        return sum(columns * rows for columns, rows in pyramid_sizes(width, height))

    assert [max(size) for size in pyramid_sizes(362, 272)] == [724, 512, 362, 256, 181, 128, 90]
    assert max(map(max, pyramid_sizes(1024, 768))) == 1024
    assert work(1024, 768) < 2 * work(362, 272) * 1.1
    with pytest.raises(ValueError, match="scales"):
        DelfSettings(scales=())


# What is chosen, and how it is described


def test_the_locations_of_most_attention_come_first(net):
    photo = pixels(smooth_photo(128, 96))
    settings = DelfSettings(count=EVERYTHING, scales=(1.0, 0.7071))
    (everything,) = find_locations(net, photo, settings)
    with torch.inference_mode():
        scores = [net.scores(each[None, :, None, None]).item() for each in everything.features]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1] + 1e-4
    (few,) = find_locations(net, photo, DelfSettings(count=11, scales=settings.scales))
    np.testing.assert_array_equal(few.places, everything.places[:11])
    np.testing.assert_array_equal(few.features, everything.features[:11])


def test_descriptors_are_the_projection_of_unit_features(net):
    photo = pixels(smooth_photo(128, 96))
    net = make_net()
    net.pca_mean.copy_(torch.rand(net.channels) / 10)
    (found,) = find_locations(net, photo)
    rows = found.features.double().numpy()
    rows /= np.sqrt((rows**2).sum(axis=1, keepdims=True))
    expected = (rows - net.pca_mean.double().numpy()) @ net.pca_projection.double().numpy().T
    expected /= np.sqrt((expected**2).sum(axis=1, keepdims=True))
    (features,) = detect(net, photo)
    np.testing.assert_allclose(features.descriptors, expected, atol=1e-5)
    assert features.descriptors.dtype == features.points.dtype == np.float32


def test_photos_are_seen_alike_alone_and_together(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(extractor_module, "WINDOW", 4)
    sizes = [(96, 72), (72, 96), (96, 72), (300, 200), (96, 72), (96, 72), (80, 64)]
    paths = [str(tmp_path / f"{number}.png") for number in range(len(sizes))]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        smooth_photo(*size, number).save(path)
    Path(paths[4]).write_text("no photo")
    boxes = (None, None, (10, 0, 90, 70), None, None, None, None)
    images = Images(tuple(paths), tuple(paths), boxes)
    extractor = DelfExtractor(folder, DelfSettings(count=40, max_side=128), "cpu")
    wanted = [6, 0, 1, 2, 3, 4, 5]
    found = list(extractor.extract_many(images, wanted, workers=0))
    assert "4.png" in found.pop(5)
    wanted.remove(4)
    for index, (width, height, together) in zip(wanted, found, strict=True):
        assert (width, height) == sizes[index]
        alone = extractor(images.file(index))
        np.testing.assert_allclose(together.points, alone.points, atol=1e-3)
        np.testing.assert_allclose(together.scales, alone.scales, rtol=1e-5)
        np.testing.assert_allclose(together.descriptors, alone.descriptors, atol=1e-4)


def test_a_decoding_process_that_the_system_ends_is_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "START_BYTES", 1)  # start workers for small files too
    monkeypatch.setattr(extractor_module, "WINDOW", 2)
    monkeypatch.setattr(DelfExtractor, "prefers_batches", True)
    monkeypatch.setattr(DelfExtractor, "_batch_size", lambda self, width, height: 1)
    path = str(tmp_path / "photo.png")
    smooth_photo(96, 72, 0).save(path)
    images = Images((path,) * 40, tuple(map(str, range(40))), None)
    extractor = DelfExtractor(folder, DelfSettings(count=20), "cpu")

    def end_workers(count):
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)

    with pytest.raises(InputError, match="fewer `workers`"):
        extract_features(
            images, tmp_path / "f.arrow", extractor, workers=1, on_progress=end_workers
        )


def test_where_it_is_faster_photos_are_extracted_many_at_a_time(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "START_BYTES", 1)  # start workers for small files too
    extractor = DelfExtractor(folder, DelfSettings(count=20), "cpu")
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(paths):
        smooth_photo(96 - 16 * number, 72, number).save(path)
    images = Images(tuple(paths), tuple("abc"), None)
    alone = extract_features(images, tmp_path / "alone.arrow", extractor, workers=0)
    monkeypatch.setattr(DelfExtractor, "prefers_batches", True)
    together = extract_features(images, tmp_path / "together.arrow", extractor, workers=2)
    assert alone.ids == together.ids
    np.testing.assert_array_equal(alone.sizes, together.sizes)
    for one, two in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.points, two.points, atol=1e-3)
        np.testing.assert_allclose(one.descriptors, two.descriptors, atol=0.02)


def test_a_large_photo_is_reduced_and_its_points_are_not(folder):
    extractor = DelfExtractor(folder, DelfSettings(count=EVERYTHING, max_side=128), "cpu")
    small, large = (extractor.features(smooth_photo(*size)) for size in ((128, 96), (512, 384)))
    assert len(small) == len(large)
    np.testing.assert_allclose(
        np.sort(large.points, axis=0), np.sort(small.scaled(4).points, axis=0), atol=1e-3
    )


def test_half_precision_finds_nearly_the_same(net):
    photo = pixels(smooth_photo(128, 96))
    full, half = (
        detect(net, photo, DelfSettings(count=EVERYTHING), autocast)[0]
        for autocast in (None, torch.bfloat16)
    )
    first, second = (np.lexsort((*each.points.T, each.scales)) for each in (full, half))
    similarity = (full.descriptors[first] * half.descriptors[second]).sum(axis=1)
    assert 0.99 < np.median(similarity) < 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_finds_the_same(folder):
    photo = smooth_photo(128, 96)
    settings = DelfSettings(count=EVERYTHING)
    one = DelfExtractor(folder, settings, "cpu").features(photo)
    two = DelfExtractor(folder, settings, "cuda", bfloat16=False).features(photo)
    first, second = (np.lexsort((*each.points.T, each.scales)) for each in (one, two))
    assert (one.descriptors[first] * two.descriptors[second]).sum(axis=1).min() > 0.999


@given(st.integers(0, 12), st.integers(0, 12), st.floats(-0.5, 0.9), st.integers(0, 99))
def test_pairs_are_each_others_nearest_and_similar(one, two, least, seed):
    generator = np.random.default_rng(seed)
    query, other = (generator.normal(size=(count, 3)) for count in (one, two))
    query, other = (
        (rows / np.sqrt((rows**2).sum(axis=1, keepdims=True))).astype(np.float32)
        for rows in (query, other)
    )
    expected = [
        [i, j]
        for i in range(one)
        for j in range(two)
        if query[i] @ other[j] >= least
        and all(query[i] @ other[j] >= query[i] @ another for another in other)
        and all(query[i] @ other[j] >= another @ other[j] for another in query)
    ]
    assert similar_pairs(query, other, least).tolist() == expected


# The extractor


def test_boxes_are_placed_in_the_whole_photo(folder, tmp_path):
    photo = smooth_photo(160, 128)
    photo.save(tmp_path / "photo.png")
    extractor = DelfExtractor(folder, DelfSettings(count=30), "cpu")
    whole = extractor(PhotoFile(str(tmp_path / "photo.png")))
    np.testing.assert_array_equal(whole.points, extractor.features(photo).points)
    part = extractor(PhotoFile(str(tmp_path / "photo.png"), (40, 30, 140, 120)))
    inside = extractor.features(photo.crop((40, 30, 140, 120)))
    np.testing.assert_allclose(part.points, inside.moved(40, 30).points, atol=1e-4)
    np.testing.assert_array_equal(part.descriptors, inside.descriptors)


def test_large_jpeg_files_have_points_in_their_own_pixels(folder, tmp_path):
    smooth_photo(640, 480).save(tmp_path / "photo.jpg", quality=95)
    extractor = DelfExtractor(folder, DelfSettings(count=EVERYTHING, max_side=160), "cpu")
    found = extractor(PhotoFile(str(tmp_path / "photo.jpg")))
    assert (found.points.max(axis=0) > (560, 400)).all()


def test_it_is_an_extractor_whose_copies_do_the_same(folder, tmp_path):
    extractor: Extractor = pickle.loads(
        pickle.dumps(DelfExtractor(folder, DelfSettings(count=20), "cpu"))
    )
    smooth_photo(96, 72).save(tmp_path / "photo.png")
    images = Images((str(tmp_path / "photo.png"),), ("photo.png",), None)
    file = extract_features(images, tmp_path / "features.arrow", extractor, workers=0)
    file.require(extractor.name)
    assert file.header.dim == 8
    expected = extractor(PhotoFile(str(tmp_path / "photo.png")))
    np.testing.assert_allclose(file.read(0).points, expected.points)
    np.testing.assert_allclose(file.read(0).descriptors, expected.descriptors, atol=0.02)


def test_the_name_says_the_network_and_the_settings(folder, tmp_path):
    make_net(seed=1).save(tmp_path / "other")
    names = {
        DelfExtractor(folder, device="cpu").name,
        DelfExtractor(folder, DelfSettings(count=999), "cpu").name,
        DelfExtractor(folder, DelfSettings(max_side=800), "cpu").name,
        DelfExtractor(folder, DelfSettings(scales=(1.0,)), "cpu").name,
        DelfExtractor(tmp_path / "other", device="cpu").name,
    }
    assert len(names) == 5


# On disk


def test_a_saved_network_is_the_same(net, folder):
    again = Delf.load(folder)
    assert again.fingerprint() == net.fingerprint()
    photo = pixels(smooth_photo(96, 72))
    for one, two in zip(detect(net, photo), detect(again, photo), strict=True):
        np.testing.assert_allclose(one.points, two.points)
        np.testing.assert_allclose(one.descriptors, two.descriptors, atol=1e-5)
    assert sorted(file.name for file in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert not any("layer4" in key for key in load_file(folder / WEIGHTS_FILE))


@pytest.mark.parametrize("changed", ["backbone.layer3.0.conv1.weight", "pca_mean"])
def test_the_fingerprint_is_of_all_weights(net, changed):
    other = make_net()
    assert other.fingerprint() == net.fingerprint()
    other.state_dict()[changed].view(-1)[0] += 1e-3
    assert other.fingerprint() != net.fingerprint()


def test_folders_that_are_none_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=r"expected config\.json"):
        Delf.load(tmp_path)
    RetrievalNet(BACKBONE, weights="random").save(tmp_path / "global")
    with pytest.raises(InputError, match="DELF network"):
        Delf.load(tmp_path / "global")
    make_net().save(tmp_path / "newer")
    config = json.loads((tmp_path / "newer" / CONFIG_FILE).read_text())
    (tmp_path / "newer" / CONFIG_FILE).write_text(json.dumps(config | {"format_version": 99}))
    with pytest.raises(InputError, match="newer Listwise"):
        Delf.load(tmp_path / "newer")
    make_net().save(tmp_path / "cut")
    state = load_file(tmp_path / "cut" / WEIGHTS_FILE)
    del state["attention.0.weight"]
    save_file(state, tmp_path / "cut" / WEIGHTS_FILE)
    with pytest.raises(InputError, match=r"1 missing \(attention.0.weight\)"):
        Delf.load(tmp_path / "cut")
    (tmp_path / "cut" / WEIGHTS_FILE).write_bytes(b"no tensors")
    with pytest.raises(InputError, match="damaged"):
        Delf.load(tmp_path / "cut")


def test_networks_that_cannot_be_are_refused():
    common = {"hidden": 4, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with pytest.raises(InputError, match="is not a ResNet of timm"):
        Delf(DelfConfig(backbone="mobilenetv3_small_050", dim=8, **common))
    with pytest.raises(InputError, match="192 dimensions"):
        Delf(DelfConfig(backbone=BACKBONE, dim=193, **common))
