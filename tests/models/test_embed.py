from contextlib import closing
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET, one_by_one

from listwise.data import Decoding, Images, pipeline
from listwise.descriptors import Model
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


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.fixture
def on_gpu(monkeypatch):
    """The network's GPU decodes; here the CPU does in its place, by the same functions."""
    pytest.importorskip("torchvision")

    def flat(chunks, device):
        with closing(chunks):
            yield from chain.from_iterable(chunks)

    monkeypatch.setattr(pipeline, "gpu_decodes", lambda device: True)
    monkeypatch.setattr(pipeline, "_on_own_stream", flat)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("max_side", [None, 60])
def test_mixed_shapes_keep_their_order(net, images, workers, max_side, monkeypatch):
    monkeypatch.setitem(embed.BATCH_PIXELS, "cpu", 3 * 64 * 48)
    monkeypatch.setattr(pipeline, "START_BYTES", 1)
    found = embed_photos(net, images, max_side=max_side, workers=workers)
    assert found.kept == list(range(8))
    assert found.errors == []
    assert found.sizes.tolist() == [list(size) for size in SIZES]
    close(found.descriptors, one_by_one(net, images, max_side))


@pytest.mark.parametrize("training", [True, False])
def test_photos_of_different_shapes_are_in_one_batch(images, training, mixed_batches):
    # Validation and mining embed photos in this way, in evaluation mode.
    torch.manual_seed(0)
    net = RetrievalNet("mobilenetv3_small_050", weights="random").train(training)
    net.backbone.conv_stem.register_forward_hook(
        lambda conv, inputs, output: torch.nn.functional.dropout(output, 0.5, conv.training)
    )
    results = {side: embed_photos(net, images, max_side=side) for side in (None, 60)}
    assert net.training is training
    assert max(len(set(sizes)) for sizes in mixed_batches) > 1  # (48, 64) and (40, 90)
    for side, found in results.items():
        close(found.descriptors, one_by_one(net, images, side))


def test_boxes_are_cut_out(net, images):
    boxes = ((10.0, 5.0, 50.0, 45.0), None, *[(0.0, 0.0, 40.0, 40.0)] * 6)
    boxed = Images(images.paths, images.ids, boxes)
    found = embed_photos(net, boxed).descriptors
    close(found, one_by_one(net, boxed))
    assert not np.allclose(found[0], embed_photos(net, images).descriptors[0], atol=1e-3)


@pytest.mark.parametrize("decoder", ["on_cpu", "on_gpu"])
def test_broken_photos_are_left_out_and_reported(net, images, tmp_path, decoder, request):
    if decoder == "on_gpu":
        request.getfixturevalue("on_gpu")
    jpeg = tmp_path / "cut.jpg"
    Image.open(images.paths[2]).save(jpeg, quality=95)
    jpeg.write_bytes(jpeg.read_bytes()[:-200])  # header whole, pixels not
    missing = str(tmp_path / "missing.jpg")
    paths = (*images.paths[:2], str(jpeg), *images.paths[3:5], missing, *images.paths[6:])
    seen = []
    found = embed_photos(net, Images(paths, paths, None), on_progress=seen.append)
    assert found.kept == [0, 1, 3, 4, 6, 7]
    close(found.descriptors, one_by_one(net, images)[found.kept])
    for path, error in zip((str(jpeg), missing), found.errors, strict=True):
        assert path in error
    assert sum(seen) == 8
    nothing = embed_photos(net, Images((missing,), ("no.jpg",), None))
    assert nothing.descriptors.shape == (0, net.dim)
    assert len(nothing.errors) == 1


def test_autocast_reaches_the_network(net, images):
    exact = embed_photos(net, images).descriptors
    half = embed_photos(net, images, autocast=torch.bfloat16).descriptors
    assert half.dtype == np.float32
    assert 1e-6 < np.abs(half - exact).max() < 0.05


def test_too_large_photos_are_one_line(net, images, monkeypatch):
    def forward(self, photos):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    monkeypatch.setattr(RetrievalNet, "forward", forward)
    with pytest.raises(ValueError, match=r"of 64 × 48 pixels do not fit.*`val_max_side`"):
        embed_photos(net, images)


def test_parts_decoded_on_a_gpu_are_what_they_are_alone(net, images, on_gpu):
    parts = [range(3), range(3, 4), range(4, 8)]
    whole = one_by_one(net, images)
    sizes = [len(part) for part in parts]
    embedded = embed.embed_parts(embed.PhotoNet(net, None), images.files(), sizes, Decoding())
    for part, found in zip(parts, embedded, strict=True):
        assert found.kept == list(range(len(part)))
        close(found.descriptors, whole[list(part)])


def test_a_model_follows_changes_of_its_network(images):
    torch.manual_seed(0)
    net = RetrievalNet(TINY_NET, weights="random").eval()
    model = Model(net)
    before = model.encode(images, workers=0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    changed = model.encode(images, workers=0)
    close(changed, Model(net).encode(images, workers=0))
    assert np.abs(changed - before).max() > 1e-3
    calls = []
    conv = next(layer for layer in net.modules() if isinstance(layer, torch.nn.Conv2d))
    conv.register_forward_hook(lambda *given: calls.append(1))
    close(model.encode(images, workers=0), changed)
    assert calls
