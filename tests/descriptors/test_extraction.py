import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET, one_by_one

from listwise.data import Images, read_images
from listwise.descriptors import Model, Whitening, extract
from listwise.errors import InputError
from listwise.models import RetrievalNet

module = sys.modules["listwise.descriptors.extract"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model(RetrievalNet(TINY_NET, weights="random"))


@pytest.fixture
def images(photos):
    """Some of the photos of the session, of two shapes, one with a box."""
    images = read_images(photos).subset(range(0, 48, 3))
    return Images(images.paths, images.ids, ((3.0, 4.0, 50.0, 40.0), *[None] * 15))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setitem(module.PART, "cpu", 5)


def test_whole_photos_and_boxes_at_original_size(model, images, tmp_path):
    done = []
    file = extract(
        model, images, tmp_path / "a.parquet", max_side=0, workers=0, on_progress=done.append
    )
    np.testing.assert_allclose(file.read(), one_by_one(model.net, images), rtol=0, atol=1e-5)
    assert file.ids == images.ids
    assert file.model == model.net.fingerprint()
    assert file.sizes[:2].tolist() == [[47, 36], [72, 56]]
    assert dict(file.settings) == {
        "max_side": None,
        "scales": (1.0,),
        "power": 3.0,
        "precision": "float32",
    }
    assert sum(done) == 16
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    assert not file.header.whitened


def test_settings_and_whitening_reach_the_descriptors(model, images, tmp_path):
    plain = extract(model, images, tmp_path / "plain.parquet", max_side=40, workers=0)
    np.testing.assert_allclose(plain.read(), one_by_one(model.net, images, 40), rtol=0, atol=1e-5)
    assert plain.sizes[1].tolist() == [72, 56]
    how = {"scales": (1, 0.5), "power": 2.0, "max_side": 50, "workers": 0}
    several = extract(model, images, tmp_path / "several.parquet", **how)
    assert np.abs(several.read() - plain.read()).max() > 1e-3

    whitened = Model(model.net, Whitening.learn(several.batches(), dim=6))
    file = extract(whitened, images, tmp_path / "whitened.parquet", **how)
    assert file.dim == whitened.dim == 6
    assert file.header.whitened
    assert file.model == whitened.fingerprint != model.fingerprint
    np.testing.assert_allclose(
        file.read(), whitened.whitening.apply(several.read()), rtol=0, atol=1e-5
    )
    again = whitened.describe(images, **file.settings.arguments(), workers=0)
    np.testing.assert_allclose(again.descriptors, file.read(), rtol=0, atol=1e-5)
    assert again.kept == list(range(16))


def test_photos_of_different_shapes_are_in_one_batch(model, images, tmp_path, mixed_batches):
    fresh = Model(model.net)
    notes = []
    file = extract(fresh, images, tmp_path / "a.parquet", workers=0, on_note=notes.append)
    np.testing.assert_allclose(file.read(), one_by_one(model.net, images), rtol=0, atol=1e-5)
    assert max(len(set(sizes)) for sizes in mixed_batches) > 1
    assert notes == []
    # A part does not depend on its neighbors, to the last bit.
    second = extract(fresh, images.subset(range(5, 10)), tmp_path / "b.parquet", workers=0)
    np.testing.assert_array_equal(second.read(), file.read()[5:10])


def test_a_network_for_one_shape_at_a_time_is_noted(images, tmp_path, mixed_batches):
    torch.manual_seed(0)
    model = Model(RetrievalNet("test_vit.r160_in1k", weights="random").eval())
    notes = []
    file = extract(model, images, tmp_path / "a.parquet", workers=0, on_note=notes.append)
    assert notes == [
        "this network can only take photos of one shape in a batch: photos of many shapes take "
        "longer"
    ]
    assert mixed_batches == []
    np.testing.assert_allclose(file.read(), one_by_one(model.net, images), rtol=0, atol=1e-5)


@pytest.fixture
def some_broken(images, tmp_path):
    """The same photos; the first is missing, a middle one is cut, and one part has only wrecks."""
    folder = tmp_path / "photos"
    folder.mkdir()
    paths = list(images.paths)
    paths[0] = str(folder / "missing.jpg")
    for i in (7, 10, 11, 12, 13, 14):
        content = Path(paths[i]).read_bytes()
        paths[i] = str(folder / f"cut{i}.jpg")
        Path(paths[i]).write_bytes(content[: len(content) // 2])
    return Images(tuple(paths), images.ids, None)


def test_strict_stops_at_the_first_and_looks_again_next_time(model, some_broken, tmp_path):
    out = tmp_path / "a.parquet"
    with pytest.raises(InputError, match=r"missing\.jpg: no such file"):
        extract(model, some_broken, out, workers=0, strict=True)
    assert not out.exists()
    Image.new("RGB", (64, 64), "red").save(some_broken.paths[0])
    with pytest.raises(InputError, match=r"cut7\.jpg"):
        extract(model, some_broken, out, workers=0, strict=True)
    for i in (7, 10, 11, 12, 13, 14):
        Image.new("RGB", (64, 64), "red").save(some_broken.paths[i])
    notes = []
    file = extract(model, some_broken, out, workers=0, strict=True, on_note=notes.append)
    assert notes == ["resuming: 5 of 16 photos are already done"]
    assert len(file) == 16


def test_parts_of_another_run_are_not_used(model, images, tmp_path, monkeypatch):
    out = tmp_path / "a.parquet"

    class Stop(Exception):
        pass

    def interrupt(**change):
        def count(done):
            nonlocal seen
            seen += done
            if seen > 12:
                raise Stop

        seen = 0
        with pytest.raises(Stop):
            extract(model, images, out, workers=0, on_progress=count, **change)
        assert len(list((tmp_path / "a.parquet.partial").glob("*.parquet"))) == 2

    interrupt()
    notes = []
    before = extract(model, images, out, workers=0, on_note=notes.append).read()
    assert notes == ["resuming: 10 of 16 photos are already done"]

    torch.manual_seed(1)
    other = Model(RetrievalNet(TINY_NET, weights="random"))
    moved = Images(tuple(reversed(images.paths)), images.ids, None)
    unboxed = Images(images.paths, images.ids, None)
    for arguments, change in (
        ((model, images), {"max_side": 30}),
        ((other, images), {}),
        ((model, moved), {}),
        ((model, unboxed), {}),
    ):
        interrupt()
        notes = []
        changed = extract(*arguments, out, workers=0, on_note=notes.append, **change)
        assert len(notes) == 1
        assert notes[0].endswith("discarding it")
        assert np.abs(changed.read() - before).max() > 1e-3


def test_mistakes_are_one_line(model, images, tmp_path):
    picture = tmp_path / "photo.jpg"
    Image.new("RGB", (8, 8)).save(picture)
    empty = Images((), (), None)
    nothing = Images(("no.jpg", "none.jpg"), ("no", "none"), None)
    out = tmp_path / "a.parquet"
    for arguments, change, message in (
        ((images, picture), {}, "is not a descriptor file: give another name"),
        ((images, tmp_path), {}, "is not a descriptor file"),
        ((images, picture / "below"), {}, "cannot write"),
        ((empty, out), {}, "no photos"),
        ((nothing, out), {}, r"none of the 2 photos can be read; the first: no\.jpg"),
        ((images, out), {"scales": ()}, "`scales`: .*one or more"),
        ((images, out), {"scales": (1, -0.5)}, "above 0"),
        ((images, out), {"power": 0.0}, "`power` must be greater than 0, not 0.0"),
        ((images, out), {"max_side": -1}, "`max_side` must be .*, not -1"),
        ((images, out), {"precision": "half"}, "`precision` must be .*bfloat16.*, not .half."),
    ):
        with pytest.raises(InputError, match=message) as error:
            extract(model, *arguments, workers=0, **change)
        assert "\n" not in str(error.value)
    assert not out.exists()


def test_files_of_others_beside_the_parts_stay(model, images, tmp_path):
    taken = tmp_path / "a.parquet.partial"
    taken.mkdir()
    (taken / "mine.parquet").write_text("precious")
    assert len(extract(model, images, tmp_path / "a.parquet", workers=0)) == 16
    assert [(file.name, file.read_text()) for file in taken.iterdir()] == [
        ("mine.parquet", "precious")
    ]
