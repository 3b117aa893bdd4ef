import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_images
from listwise.descriptors import Model, Whitening, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet


@pytest.fixture
def images(photos):
    return read_images(photos)


def learn(model, images, **options):
    return Whitening.learn([model.describe(images, workers=0).descriptors], **options)


def test_half_precision_gives_nearly_the_same(folder, images):
    model = load_model(folder, "cpu")
    exact = model.describe(images, workers=0).descriptors
    half = model.describe(images, precision="bfloat16", workers=0).descriptors
    assert 0.999 < (half * exact).sum(axis=1).min() < 0.9999999
    assert not model.net.training


def test_saved_and_loaded_to_the_bit(folder, images, tmp_path):
    plain = load_model(folder, "cpu")
    saved = Model(plain.net, learn(plain, images, dim=9, power=0.5)).save(tmp_path / "new")
    assert saved.folder == tmp_path / "new"
    for source in (tmp_path / "new", tmp_path / "new" / "model.safetensors"):
        again = load_model(source, "cpu")
        np.testing.assert_array_equal(again.whitening.mean, saved.whitening.mean)
        np.testing.assert_array_equal(again.whitening.projection, saved.whitening.projection)
        assert again.whitening.info == saved.whitening.info
        assert (again.folder, again.fingerprint) == (tmp_path / "new", saved.fingerprint)
    assert plain.save(tmp_path / "a.safetensors").folder == tmp_path / "a.safetensors"
    assert load_model(tmp_path / "a.safetensors", "cpu").fingerprint == plain.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "model", "new"]


def test_the_fingerprint_covers_network_and_whitening(folder, images):
    plain = load_model(folder, "cpu")
    first = Model(plain.net, learn(plain, images, dim=12))
    second = Model(plain.net, learn(plain, images, dim=12, power=0.5))
    torch.manual_seed(1)
    other = Model(RetrievalNet(TINY_NET, weights="random"), first.whitening)
    models = (plain, first, second, other)
    assert len({model.fingerprint for model in models}) == 4
    assert Model(plain.net, learn(plain, images, dim=12)).fingerprint == first.fingerprint


def test_devices_that_are_not_there_are_one_line(folder):
    with pytest.raises(InputError, match="`device` 'cuda:77' does not exist"):
        load_model(folder, "cuda:77")
    with pytest.raises(InputError, match="no model folder"):
        load_model(folder / "none")
