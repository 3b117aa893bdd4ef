"""Photos in memory are described as their files are."""

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import Images, load_image, read_images
from listwise.descriptors import Model, Whitening
from listwise.models import RetrievalNet


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return RetrievalNet(TINY_NET, weights="random").eval()


@pytest.fixture(scope="module")
def images(photos):
    found = read_images(photos).subset(range(9))
    boxes = tuple((5.0, 8.0, 40.0, 48.0) if i % 4 == 0 else None for i in range(len(found)))
    return Images(found.paths, found.ids, boxes)


@pytest.mark.parametrize(
    "options", [{}, {"max_side": 48}, {"scales": (1.0, 0.7)}, {"precision": "bfloat16"}]
)
@pytest.mark.parametrize("whitened", [False, True])
def test_as_their_files_are(net, images, options, whitened):
    plain = Model(net)
    whitening = Whitening.learn([plain.describe(images, workers=0).descriptors], dim=6)
    model = Model(net, whitening) if whitened else plain
    settings = model.settings(
        **{"max_side": None, "scales": (1.0,), "power": 3.0} | {"precision": "float32", **options}
    )
    expected = model.describe(images, workers=0, **settings.arguments())
    loaded = [load_image(path, images.box(i)) for i, path in enumerate(images.paths)]
    assert len({photo.size for photo in loaded}) == 3
    found = model.describe_photos(loaded, settings)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.descriptors, rtol=0, atol=2e-6)


def test_many_photos_go_in_several_batches(net, images, monkeypatch):
    loaded = [load_image(path) for path in images.paths]
    settings = Model(net).settings(None, (1.0,), 3.0, "float32")
    expected = Model(net).describe_photos(loaded, settings)
    sizes = []
    hook = net.register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    try:
        monkeypatch.setattr("listwise.models.embed.BATCH_PIXELS", {"cpu": 2 * 64 * 64})
        found = Model(net).describe_photos(loaded, settings)
    finally:
        hook.remove()
    assert sorted(sizes) == [1, 2, 2, 2, 2]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_no_photos_have_no_descriptors(net):
    settings = Model(net).settings(None, (1.0,), 3.0, "float32")
    assert Model(net).describe_photos([], settings).shape == (0, net.dim)
