import multiprocessing
import os

import numpy as np
import pytest
import torch
from interpreter import run_script, skip_if_interpreter_is_broken
from PIL import Image
from tiny_net import TINY_NET

from listwise.data import DecodedPhoto, Decoding, Images, load_image, pipeline, whole_image
from listwise.models import RetrievalNet, embed
from listwise.models.embed import embed_photos

SIZES = [(64, 48), (48, 64), (64, 48), (90, 40), (64, 48), (48, 64), (200, 120), (64, 48)]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return RetrievalNet(TINY_NET, weights="random")


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    paths = []
    for i, (width, height) in enumerate(SIZES):
        coarse = generator.integers(0, 255, (5, 5, 3)).astype(np.uint8)
        paths.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(coarse).resize((width, height)).save(paths[-1])
    return Images(tuple(paths), tuple(paths), None)


def one_by_one(net, images, max_side=None):
    net.eval()
    with torch.no_grad():
        rows = [
            net(whole_image(load_image(path, images.box(i)), max_side)[None])
            for i, path in enumerate(images.paths)
        ]
    return torch.cat(rows)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("max_side", [None, 60])
def test_mixed_shapes_keep_their_order(net, images, workers, max_side, monkeypatch):
    monkeypatch.setitem(embed.BATCH_PIXELS, "cpu", 3 * 64 * 48)
    monkeypatch.setattr(pipeline, "START_BYTES", 1)
    found = embed_photos(net, images, max_side=max_side, workers=workers)
    assert found.kept == list(range(8))
    assert found.errors == []
    torch.testing.assert_close(
        found.descriptors, one_by_one(net, images, max_side), rtol=0, atol=1e-5
    )


def test_photos_of_different_shapes_are_in_one_batch(net, images, mixed_batches):
    # Validation and mining embed photos in this way.
    found = embed_photos(net, images)
    assert found.sizes == SIZES
    reduced = embed_photos(net, images, max_side=60)
    assert max(len(set(sizes)) for sizes in mixed_batches) > 1  # (48, 64) and (40, 90)
    for result, side in ((found, None), (reduced, 60)):
        expected = one_by_one(net, images, side)
        torch.testing.assert_close(result.descriptors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_mixed_batches_are_computed_in_evaluation_mode(images, training, mixed_batches):
    torch.manual_seed(0)
    net = RetrievalNet("mobilenetv3_small_050", weights="random").train(training)
    net.backbone.conv_stem.register_forward_hook(
        lambda conv, inputs, output: torch.nn.functional.dropout(output, 0.5, conv.training)
    )
    found = embed_photos(net, images).descriptors
    assert net.training is training
    torch.testing.assert_close(found, one_by_one(net, images), rtol=0, atol=1e-5)
    assert mixed_batches


def test_boxes_are_cut_out(net, images):
    boxes = ((10.0, 5.0, 50.0, 45.0), None, *[(0.0, 0.0, 40.0, 40.0)] * 6)
    boxed = Images(images.paths, images.ids, boxes)
    found = embed_photos(net, boxed).descriptors
    torch.testing.assert_close(found, one_by_one(net, boxed), rtol=0, atol=1e-5)
    assert not torch.allclose(found[0], embed_photos(net, images).descriptors[0], atol=1e-3)


def test_broken_photos_are_left_out_and_reported(net, images, tmp_path):
    whole = embed_photos(net, images).descriptors
    with open(images.paths[2], "rb") as file:
        content = file.read()
    with open(images.paths[2], "wb") as file:
        file.write(content[: len(content) // 2])  # header whole, pixels not
    paths = (*images.paths[:5], str(tmp_path / "missing.png"), *images.paths[6:])
    seen = []
    found = embed_photos(net, Images(paths, paths, None), on_progress=seen.append)
    assert found.kept == [0, 1, 3, 4, 6, 7]
    torch.testing.assert_close(found.descriptors, whole[found.kept], rtol=0, atol=1e-5)
    assert len(found.errors) == 2
    assert paths[2] in found.errors[0]
    assert paths[5] in found.errors[1]
    assert sum(seen) == 8


def test_nothing_readable_gives_no_rows(net):
    found = embed_photos(net, Images(("no.jpg",), ("no.jpg",), None))
    assert found.descriptors.shape == (0, net.dim)
    assert len(found.errors) == 1


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_random_state_are_put_back(net, images, training, monkeypatch):
    monkeypatch.setattr(pipeline, "START_BYTES", 1)
    net.train(training)
    state = torch.get_rng_state()
    embed_photos(net, images, workers=1)
    assert net.training is training
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_reaches_the_network(net, images):
    exact = embed_photos(net, images).descriptors
    half = embed_photos(net, images, autocast=torch.bfloat16).descriptors
    assert half.dtype == torch.float32
    difference = (half - exact).abs().max()
    assert 1e-6 < difference < 0.05


def test_too_large_photos_are_one_line(net, images, monkeypatch):
    def forward(self, photos):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    monkeypatch.setattr(RetrievalNet, "forward", forward)
    with pytest.raises(ValueError, match=r"of 64 × 48 pixels do not fit.*`val_max_side`"):
        embed_photos(net, images)


@pytest.mark.parametrize("waiting", [1, 3, 100])
def test_rows_are_fetched_in_any_portions(net, images, waiting, monkeypatch):
    monkeypatch.setitem(embed.BATCH_PIXELS, "cpu", 2 * 64 * 48)
    expected = one_by_one(net, images)
    monkeypatch.setattr(embed, "WAITING", waiting)
    found = embed_photos(net, images)
    torch.testing.assert_close(found.descriptors, expected, rtol=0, atol=1e-5)
    assert found.sizes == SIZES


@pytest.mark.parametrize(("part", "started"), [(2, 2), (0.9, 0), (200, 2)])
def test_no_more_workers_are_started_than_pay(net, images, monkeypatch, part, started):
    everything = sum(os.path.getsize(path) for path in images.paths)
    monkeypatch.setattr(pipeline, "START_BYTES", everything / part)
    running = []
    embed_photos(
        net,
        images,
        workers=2,
        on_progress=lambda count: running.append(len(multiprocessing.active_children())),
    )
    assert max(running) == started


def test_a_part_is_computed_under_one_autocast(net, images):
    # Casts of the weights live as long as it does: one for all batches of a part, none after.
    seen = []

    def describe(photos, sizes):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return torch.zeros(len(photos), 2)

    parts = embed.embed_parts(
        net, images.files(), [4, 4], Decoding(), describe=describe, autocast=torch.bfloat16
    )
    for _ in parts:
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()
    assert set(seen) == {(True, True)}


# Decoded by the network's GPU; here the CPU decodes in its place, by the same functions.


@pytest.fixture
def on_gpu(monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setattr(pipeline, "gpu_decodes", lambda device: True)


@pytest.mark.parametrize("pixels", [3 * 64 * 48, 2**20])
def test_photos_decoded_on_a_gpu_keep_their_order(net, images, on_gpu, monkeypatch, pixels):
    monkeypatch.setitem(embed.BATCH_PIXELS, "cpu", pixels)
    boxes = ((10.0, 5.0, 50.0, 45.0), *[None] * 7)
    boxed = Images(images.paths, images.ids, boxes)
    seen = []
    found = embed_photos(net, boxed, workers=2, on_progress=seen.append)
    assert found.kept == list(range(8))
    assert found.sizes == [(40, 40), *SIZES[1:]]
    assert sum(seen) == 8
    assert not multiprocessing.active_children()
    torch.testing.assert_close(found.descriptors, one_by_one(net, boxed), rtol=0, atol=1e-5)


def test_parts_decoded_on_a_gpu_are_what_they_are_alone(net, images, on_gpu):
    parts = [range(3), range(3, 4), range(4, 8)]
    whole = one_by_one(net, images)
    sizes = [len(part) for part in parts]
    embedded = embed.embed_parts(net, images.files(), sizes, Decoding())
    for part, found in zip(parts, embedded, strict=True):
        assert found.kept == list(range(len(part)))
        torch.testing.assert_close(found.descriptors, whole[list(part)], rtol=0, atol=1e-5)


def test_broken_photos_decoded_on_a_gpu_are_left_out_and_reported(net, images, on_gpu, tmp_path):
    jpeg = tmp_path / "cut.jpg"
    Image.open(images.paths[0]).save(jpeg, quality=95)
    jpeg.write_bytes(jpeg.read_bytes()[:-200])
    paths = (str(jpeg), str(tmp_path / "missing.jpg"), *images.paths[2:])
    broken = Images(paths, paths, None)
    found = embed_photos(net, broken)
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr(pipeline, "gpu_decodes", lambda device: False)
        expected = embed_photos(net, broken)
    assert found.errors == expected.errors
    assert len(found.errors) == 2
    assert found.kept == expected.kept == list(range(2, 8))
    torch.testing.assert_close(found.descriptors, expected.descriptors, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_large_photos_are_reduced_on_a_gpu(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("torchvision")
    skip_if_interpreter_is_broken()
    script = """
import sys
import numpy as np
import torch
from PIL import Image
from listwise.data import Images, gpu_photos, gpu_resample, pipeline
from listwise.models import RetrievalNet, embed

torch.set_num_threads(1)
gpu_resample.ROWS = gpu_resample.COLUMNS = 64
gpu_photos.CHUNK_PIXELS = 6000
generator = np.random.default_rng(0)
paths = []
for i, size in enumerate([(90, 60), (48, 40), (90, 60), (60, 90), (91, 60)]):
    cells = generator.integers(0, 255, (5, 5, 3)).astype(np.uint8)
    paths.append(f"{sys.argv[2]}/{i}.png")
    Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC).save(paths[-1])
images = Images(tuple(paths), tuple(paths), None)
torch.manual_seed(0)
net = RetrievalNet("test_resnet.r160_in1k", weights="random")
expected = embed.embed_photos(net, images, max_side=48)
pipeline.gpu_decodes = lambda device: True
found = embed.embed_photos(net, images, max_side=48)
assert found.kept == expected.kept == list(range(5))
assert found.sizes == expected.sizes
print((found.descriptors * expected.descriptors).sum(1).min().item())
"""
    assert float(run_script(script, "cpu", str(tmp_path))) > 0.999


def test_what_is_described_may_have_more_dimensions():
    # Tuning describes a photo at several scales, with several poolings.
    sides = [30, 20, 30, 20, 10]
    photos = [
        DecodedPhoto(
            torch.full((3, side, side), number, dtype=torch.uint8), (side, side), (side, side)
        )
        for number, side in enumerate(sides)
    ]

    def describe(pixels, sizes):
        return pixels[:, :1, :1, :1].float().expand(-1, 4, 5, 16)

    found = embed.embed_decoded(photos, describe, 16, torch.device("cpu"))
    assert found.descriptors.shape == (5, 4, 5, 16)
    assert found.descriptors[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert found.sizes == [(side, side) for side in sides]
