"""Photos into an index: each once, whatever happens to the files."""

import dataclasses
import io
import os
import shutil
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image

from listwise.data import PhotoFile, load_image, read_images
from listwise.data.photos import THUMBNAIL_BYTES, thumbnail
from listwise.descriptors import extract, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.search import add_descriptors, add_photos, create_store, filling, header_of
from listwise.search.entries import entry_key
from listwise.search.filling import thumbnail_from_photo


@pytest.fixture
def index(tmp_path, model, model_folder):
    with create_store(tmp_path / "index", header_of(model)) as index:
        yield index


@pytest.fixture
def own(photos, tmp_path):
    """A copy of the photos that a test may change."""
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "photos"


def add(index, model, source):
    found = add_photos(index, model, read_images(source), workers=0)
    return {name: len(ids) for name, ids in vars(found).items() if ids}


def test_photos_are_found_with_all_that_is_known_of_them(index, model, photos, tmp_path):
    path = photos / "class3" / "2.jpg"
    (tmp_path / "t.csv").write_text(f'path,box,color\n{path},"4,5,40,41",red\n{path},,blue\n')
    assert add(index, model, tmp_path / "t.csv") == {"added": 2}
    boxed, whole = sorted(index, key=lambda entry: entry.box is None)
    assert boxed.id == f"{path}#4,5,40,41"
    assert (boxed.path, boxed.box, boxed.attributes) == (
        str(path),
        (4, 5, 40, 41),
        {"color": "red"},
    )
    assert (whole.width, whole.height) == (boxed.width, boxed.height) == Image.open(path).size
    expected = model.describe(read_images(tmp_path / "t.csv"), workers=0).descriptors
    found = index.vectors([boxed.key, whole.key])
    assert np.abs(found - expected).max() < 1e-6
    assert Image.open(io.BytesIO(index.thumbnail(boxed.key))).size == (36, 36)
    scores, keys = index.search(expected, 1)
    assert keys[:, 0].tolist() == [boxed.key, whole.key]
    assert np.allclose(scores, 1, atol=1e-5)


def test_large_files_are_read_in_small_groups(photos, monkeypatch):
    files = [PhotoFile(str(path)) for path in sorted(photos.rglob("*.jpg"))]
    monkeypatch.setattr(filling, "READ_BYTES", os.stat(files[0].path).st_size + 1)
    groups = list(filling.read_groups(files, lambda file: file))
    assert list(chain(*groups)) == files
    assert {len(group) for group in groups} <= {1, 2, 3}


def test_photos_are_committed_every_few_seconds(monkeypatch):
    now = 0.0
    monkeypatch.setattr(filling.time, "monotonic", lambda: now)
    sizes, found = filling.part_sizes(64), []
    for seconds in [0.01] * 8 + [1] * 6 + [20] * 2:  # per photo
        found.append(next(sizes))
        now += seconds * found[-1]
    assert found == [2, 4, 8, 16, 32, 64, 64, 64, 64, 3, 3, 3, 3, 3, 3, 1]


def test_the_same_photo_twice_is_one_entry(index, model, own):
    shutil.copy(own / "class1" / "0.jpg", own / "class1" / "copy.jpg")
    assert add(index, model, own) == {"added": 48, "copies": 1}
    assert add(index, model, own) == {"unchanged": 48, "copies": 1}
    shutil.copy(own / "class0" / "0.jpg", own / "class0" / "again.jpg")
    assert add(index, model, own) == {"unchanged": 48, "copies": 2}
    assert len(index) == 48


def test_a_changed_photo_is_replaced(index, model, own):
    add(index, model, own)
    changed = own / "class2" / "3.jpg"
    key = entry_key("class2/3.jpg")
    before, small = index.vectors([key]), index.thumbnail(key)
    Image.effect_noise((50, 60), 90).save(changed)
    assert add(index, model, own) == {"unchanged": 47, "replaced": 1}
    assert len(index) == 48
    assert np.abs(index.vectors([key]) - before).max() > 1e-3
    assert index.thumbnail(key) != small
    assert (index.get([key])[key].width, index.get([key])[key].height) == (50, 60)


def test_a_moved_photo_moves_without_being_described_again(index, model, own, monkeypatch):
    add(index, model, own)
    moved = own.with_name("elsewhere")
    own.rename(moved)
    os.rename(moved / "class0" / "0.jpg", moved / "class0" / "renamed.jpg")
    vectors = {entry.digest: index.vectors([entry.key]) for entry in index}
    described = []
    whole = type(model).describe_parts

    def counted(self, files, *rest, **more):
        for found in whole(self, files, *rest, **more):
            described.extend(found.kept)
            yield found

    monkeypatch.setattr(type(model), "describe_parts", counted)
    assert add(index, model, moved) == {"moved": 48}
    assert not described
    assert len(index) == 48
    for entry in index:
        assert entry.path == str(moved / entry.id)
        assert np.array_equal(index.vectors([entry.key]), vectors[entry.digest])


def exchange(one, other):
    os.rename(one, one.with_suffix(".held"))
    os.rename(other, one)
    os.rename(one.with_suffix(".held"), other)


def test_photos_that_change_names_are_found_under_them(index, model, own):
    add(index, model, own)
    first, second = own / "class0" / "0.jpg", own / "class1" / "0.jpg"
    keys = [entry_key("class0/0.jpg"), entry_key("class1/0.jpg")]
    before = index.vectors(keys)
    exchange(first, second)
    assert add(index, model, own) == {"unchanged": 46, "moved": 2}
    assert np.array_equal(index.vectors(keys), before[::-1])
    assert add(index, model, own) == {"unchanged": 48}

    os.rename(first, own / "class0" / "renamed.jpg")
    Image.effect_noise((50, 60), 90).save(first)
    assert add(index, model, own) == {"unchanged": 47, "moved": 1, "added": 1}
    renamed = index.vectors([entry_key("class0/renamed.jpg"), keys[0]])
    assert np.array_equal(renamed[0], before[1])
    assert np.abs(renamed[1] - before[1]).max() > 1e-3
    assert add(index, model, own) == {"unchanged": 49}


def labelled(index, model, own):
    """Add the photos, and label each with the name it has."""
    add(index, model, own)
    for entry in list(index):
        index.set_attributes([entry.key], {"label": entry.id})


@pytest.mark.parametrize("together", [1, 2, 64])
def test_attributes_follow_the_content(index, model, own, monkeypatch, together):
    own = own / "class0"
    labelled(index, model, own)
    vectors = {entry.digest: index.vectors([entry.key]) for entry in index}
    monkeypatch.setattr(filling, "READ", together)

    def labels():
        return {entry.id: entry.attributes.get("label") for entry in index}

    exchange(own / "0.jpg", own / "5.jpg")
    assert add(index, model, own) == {"unchanged": 4, "moved": 2}
    expected = {f"{i}.jpg": f"{i}.jpg" for i in range(6)} | {"0.jpg": "5.jpg", "5.jpg": "0.jpg"}
    assert labels() == expected

    for number in range(6, 0, -1):  # names move up, and the first is a new photo
        os.rename(own / f"{number - 1}.jpg", own / f"{number}.jpg")
    Image.effect_noise((50, 60), 90).save(own / "0.jpg")
    assert add(index, model, own) == {"moved": 6, "added": 1}
    series = {f"{i + 1}.jpg": expected[f"{i}.jpg"] for i in range(6)} | {"0.jpg": None}
    assert labels() == series

    for number in range(1, 7):  # and down; the first is lost
        os.rename(own / f"{number}.jpg", own / f"{number - 1}.jpg")
    assert add(index, model, own) == {"moved": 6}
    assert labels() == expected

    os.rename(own / "3.jpg", own / "1.jpg")
    assert add(index, model, own) == {"unchanged": 4, "moved": 1}
    assert labels() == {name: text for name, text in expected.items() if name != "3.jpg"} | {
        "1.jpg": "3.jpg"
    }
    for entry in index:
        assert np.array_equal(index.vectors([entry.key]), vectors[entry.digest])


@pytest.mark.parametrize("steps", range(12))
def test_attributes_follow_the_content_after_a_kill(index, model, own, monkeypatch, steps):
    own = own / "class0"
    labelled(index, model, own)
    expected = {f"{i + 1}.jpg": f"{i}.jpg" for i in range(5)} | {"0.jpg": "5.jpg"}
    os.rename(own / "5.jpg", own / "held.jpg")
    for number in range(5, 0, -1):
        os.rename(own / f"{number - 1}.jpg", own / f"{number}.jpg")
    os.rename(own / "held.jpg", own / "0.jpg")
    monkeypatch.setattr(filling, "READ", 1)
    with monkeypatch.context() as patched:
        left = iter(range(steps))
        for step in ("put", "remove"):
            whole = getattr(type(index), step)

            def counted(self, given, whole=whole):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return whole(self, given)

            patched.setattr(type(index), step, counted)
        with pytest.raises(KeyboardInterrupt):
            add(index, model, own)
    add(index, model, own)
    assert {entry.id: entry.attributes.get("label") for entry in index} == expected
    assert {entry.path for entry in index} == {str(own / name) for name in expected}


def test_exif_of_new_content_is_new(index, model, own, monkeypatch):
    def at(date, attributes=()):
        monkeypatch.setattr(PhotoFile, "exif", lambda _: {"date": date})
        images = read_images(own / "class0" / "0.jpg")
        given = dataclasses.replace(images, attributes=(dict(attributes),) if attributes else None)
        add_photos(index, model, given, exif=True, workers=0)
        (entry,) = index
        return entry.attributes

    assert at("1") == {"date": "1"}
    index.set_attributes(index.keys(), {"date": "by hand", "label": "a"})
    assert at("1") == {"date": "by hand", "label": "a"}
    Image.effect_noise((50, 60), 90).save(own / "class0" / "0.jpg")
    assert at("2") == {"date": "2", "label": "a"}
    Image.effect_noise((50, 60), 80).save(own / "class0" / "0.jpg")
    assert at("3", {"date": "given"}) == {"date": "given", "label": "a"}


@pytest.mark.parametrize("step", ["put", "remove"])
def test_a_kill_while_photos_move_leaves_one_entry_of_each(index, model, own, monkeypatch, step):
    labelled(index, model, own)
    os.rename(own / "class0" / "0.jpg", own / "class0" / "renamed.jpg")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(index), step, killed)
        with pytest.raises(KeyboardInterrupt):
            add(index, model, own)
    add(index, model, own)
    assert sorted(entry.path for entry in index) == sorted(read_images(own).paths)
    labels = {entry.id: entry.attributes["label"] for entry in index}
    assert labels.pop("class0/renamed.jpg") == "class0/0.jpg"
    assert all(name == label for name, label in labels.items())


def test_a_photo_that_vanishes_once_read_is_added_whole(index, model, own, monkeypatch):
    whole = type(model).describe_parts
    lost = own / "class0" / "0.jpg"
    expected = thumbnail(load_image(lost))

    def vanish(self, files, *rest, **more):
        for number, file in enumerate(files):
            if not number:
                lost.unlink()
            yield from whole(self, chain([file], files), *rest, **more)

    monkeypatch.setattr(type(model), "describe_parts", vanish)
    assert add(index, model, own / "class0") == {"added": 6}
    assert index.thumbnail(entry_key("0.jpg")) == expected


def test_a_photo_that_is_added_again_keeps_its_attributes(index, model, own):
    (own / "class0" / "t.csv").write_text("path,color\n1.jpg,red\n2.jpg,blue\n")
    assert add(index, model, own / "class0" / "t.csv") == {"added": 2}
    (own / "class0" / "t.csv").unlink()
    assert add(index, model, own / "class0") == {"added": 4, "unchanged": 2}
    Image.effect_noise((60, 50), 80).save(own / "class0" / "1.jpg")  # new content
    (own / "class0" / "2.jpg").rename(own / "class0" / "moved.jpg")
    assert add(index, model, own / "class0") == {"replaced": 1, "moved": 1, "unchanged": 4}
    kept = {entry.id: entry.attributes for entry in index if entry.attributes}
    assert kept == {"1.jpg": {"color": "red"}, "moved.jpg": {"color": "blue"}}
    (own / "class0" / "t.csv").write_text("path,color\n1.jpg,green\n")
    assert add(index, model, own / "class0" / "t.csv") == {"updated": 1}
    assert index.get([entry_key("1.jpg")])[entry_key("1.jpg")].attributes == {"color": "green"}


def test_another_photo_of_the_same_name_is_not_lost(index, model, own, tmp_path):
    add(index, model, own / "class0")
    found = add_photos(index, model, read_images(own / "class1"), workers=0)
    assert len(found.errors) == 6
    assert "another photo is in" in found.errors[0]
    assert str(own / "class0" / "0.jpg") in found.errors[0]
    assert {entry.path for entry in index} == {str(own / "class0" / f"{i}.jpg") for i in range(6)}


def test_what_cannot_be_read_is_named_and_the_rest_added(index, model, own):
    (own / "class0" / "wreck.jpg").write_bytes(b"\xff\xd8\xff")
    whole = (own / "class0" / "0.jpg").read_bytes()
    (own / "class0" / "torn.jpg").write_bytes(whole[: len(whole) // 2])
    os.rename(own / "class0" / "1.jpg", os.fsencode(own) + b"/class0/caf\xe9.jpg")
    found = add_photos(index, model, read_images(own), workers=0)
    assert len(found.added) == len(index) == 47
    errors = sorted(error.removeprefix(f"{own}/class0/") for error in found.errors)
    assert errors[0] == "caf\\udce9.jpg: the path is not UTF-8: rename the file or its folder"
    assert [error.partition(":")[0] for error in errors[1:]] == ["torn.jpg", "wreck.jpg"]
    assert index.get([entry_key(os.fsdecode(b"caf\xe9.jpg"))]) == {}


def test_another_models_descriptors_are_refused(index, photos, tmp_path):
    torch.manual_seed(1)
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(tmp_path / "other")
    other = load_model(tmp_path / "other", "cpu")
    with pytest.raises(InputError, match="not of"):
        add_photos(index, other, read_images(photos), workers=0)
    file = extract(other, read_images(photos), tmp_path / "other.parquet", workers=0)
    with pytest.raises(InputError, match="not of"):
        add_descriptors(index, file)
    assert len(index) == 0


def test_descriptor_files_go_in_as_they_are(index, model, photos, tmp_path):
    file = extract(model, read_images(photos), tmp_path / "photos.parquet", workers=0)
    found = add_descriptors(index, file, photos)
    assert len(found.added) == len(index) == 48
    assert len(add_descriptors(index, file, photos).replaced) == len(index) == 48
    keys = [entry_key(name) for name in file.ids]
    assert np.array_equal(index.vectors(keys), file.read())
    assert index.get(keys)[keys[0]].path == str(photos / file.ids[0])
    assert index.thumbnail(keys[0])
    other = extract(model, read_images(photos), tmp_path / "b.parquet", max_side=40, workers=0)
    with pytest.raises(InputError, match=r"--max-side 40 .* extract .*b\.parquet --max-side"):
        add_descriptors(index, other)
    table = 'path,box\n{0},"0,0,30,30"\n{0},"10,10,40,40"\n'
    (tmp_path / "t.csv").write_text(table.format(photos / "class0" / "0.jpg"))
    twice = extract(model, read_images(tmp_path / "t.csv"), tmp_path / "t.parquet", workers=0)
    with pytest.raises(InputError, match=r"has 2 rows for .*0\.jpg"):
        add_descriptors(index, twice)
    assert len(index) == 48


def test_thumbnails_can_be_left_out_and_made_later(index, model, photos):
    add_photos(index, model, read_images(photos / "class0"), thumbnails=False, workers=0)
    entry = next(iter(index))
    assert not index.thumbnail(entry.key)
    assert Image.open(io.BytesIO(thumbnail_from_photo(entry))).size == (entry.width, entry.height)
    assert thumbnail_from_photo(dataclasses.replace(entry, path="gone.jpg")) == b""


def test_thumbnails_are_small_whatever_the_photo():
    noise = Image.effect_noise((2000, 1900), 200).convert("RGB")
    content = thumbnail(noise)
    assert 0 < len(content) <= THUMBNAIL_BYTES
    assert max(Image.open(io.BytesIO(content)).size) == 320
