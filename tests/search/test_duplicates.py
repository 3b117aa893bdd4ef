"""Duplicates: files with the same content, and copies that were altered."""

import csv
import io
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from index_examples import texture
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

from listwise.data.photos import thumbnail
from listwise.errors import InputError
from listwise.search import Index, duplicates
from listwise.search.duplicates import find_duplicates
from listwise.search.entries import Entry, NewEntries, NoEntryError
from listwise.search.opening import create_store, header_of
from listwise.search.store import IndexHeader
from listwise.search.views import draw_duplicates

DIM = 4
HEADER = IndexHeader(model="f" * 64, model_folder="/models/m", whitened=True, dim=DIM)
REAL = os.environ.get("LISTWISE_REAL_DATA")


@pytest.fixture(scope="module", params=["embedded", "lite", "server"])
def store(request):
    with create_store(request.getfixturevalue(f"{request.param}_places")(), HEADER) as made:
        yield made


def fill(store, photos, **sizes):
    """Replace the entries by thumbnails of photos by name."""
    store.remove([entry.key for entry in store])
    sizes = {name: sizes.get(name, photo.size) for name, photo in photos.items()}
    entries = [Entry(name, "", *sizes[name], None, f"digest of {name}") for name in photos]
    rows = np.full((len(photos), DIM), 0.5, np.float32)
    store.put(NewEntries(entries, rows, list(map(thumbnail, photos.values()))))


def ids(groups):
    return [tuple(entry.id for entry in group.entries) for group in groups]


def saved(photo, quality=90):
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def cropped(photo, left, top):
    width, height = photo.size
    start = round(left * width / 10), round(top * height / 10)
    return photo.crop((*start, start[0] + round(0.9 * width), start[1] + round(0.9 * height)))


def marked(photo):
    font = ImageFont.load_default(size=max(10, photo.height // 10))
    photo = photo.copy()
    place = photo.width // 8, photo.height // 2
    ImageDraw.Draw(photo, "RGBA").text(place, "© Agency", fill=(255, 255, 255, 170), font=font)
    return photo


def copies_of(photo, left=0.3, top=0.8):
    """Altered copies of a photo by what was done to it."""
    altered = {
        "half": photo.resize((photo.width // 2, photo.height // 2)),
        "cropped": cropped(photo, left, top),
        "brighter": ImageEnhance.Brightness(photo).enhance(1.3),
        "border": ImageOps.expand(photo, round(0.05 * max(photo.size)), "white"),
        "watermark": marked(photo),
        "compressed": photo,
    }
    return {name: saved(each, 40 if name == "compressed" else 90) for name, each in altered.items()}


def test_altered_copies_are_one_group_across_blocks(store, monkeypatch):
    monkeypatch.setattr(duplicates, "_BLOCK", 7)
    photos = {f"photo{number}": texture(number) for number in range(20)}
    photos |= {f"copy {name}": copy for name, copy in copies_of(texture(3)).items()}
    photos["another size"] = texture(5, (480, 360))
    fill(store, photos, photo3=(1000, 750))
    steps = []
    first, second = find_duplicates(store, on_progress=steps.append)
    assert sum(steps) == 2 * len(photos)
    assert first.entries[0].id == "photo3"
    assert {entry.id for entry in first.entries} == {"photo3"} | {
        name for name in photos if name.startswith("copy")
    }
    assert ids([second]) == [("another size", "photo5")]
    assert (first.exact, first.reason, second.files) == (False, "most pixels", 2)
    assert all(0.8 <= group.score <= 1 for group in (first, second))

    def stop(count):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        find_duplicates(store, on_progress=stop)
    for threshold in (0, 1.5):
        with pytest.raises(InputError, match="`threshold` must be above 0 and at most 1"):
            find_duplicates(store, threshold)


def test_mirrored_copies_are_found_if_wanted(store):
    photo = texture(1)
    fill(store, {"a": photo, "b": saved(ImageOps.mirror(photo)), "c": texture(2)})
    assert find_duplicates(store) == []
    assert ids(find_duplicates(store, mirrored=True)) == [("a", "b")]


def test_photos_of_other_colors_and_plain_ones_are_no_duplicates(store):
    blank = {color: Image.new("RGB", (64, 48), color) for color in ("red", "blue", "gray")}
    red, green, blue = texture(1).split()
    fill(store, {"a": texture(1), "b": Image.merge("RGB", (blue, red, green)), **blank})
    assert find_duplicates(store) == []
    fill(store, {})
    assert find_duplicates(store, mirrored=True) == []


def test_things_of_another_shape_are_no_duplicates(store):
    """Products before a white background, whose frames have the same content but not its shape."""
    thing = texture(1, (200, 200))
    photos = {f"{width}": thing.resize((width, 200)) for width in (100, 140, 200, 280)}
    framed = {name: saved(ImageOps.expand(photo, 40, "white")) for name, photo in photos.items()}
    copy = framed["200"].resize((140, 140))
    fill(store, {**framed, "copy": copy})
    assert ids(find_duplicates(store)) == [("200", "copy")]


def test_a_burst_is_one_group(store):
    """Photos of one moment, in which the camera moves: the first and the last differ."""
    wide = {"a": texture(1, (300, 200)), "b": texture(2, (300, 200))}
    photos = {
        f"{name}{step:02}": saved(photo.crop((step, step // 2, 240 + step, 180 + step // 2)))
        for name, photo in wide.items()
        for step in range(25)
    }
    fill(store, photos)
    assert sorted(ids(find_duplicates(store))) == [
        tuple(sorted(name for name in photos if name[0] == first)) for first in "ab"
    ]


@pytest.fixture
def index(model, tmp_path):
    with create_store(tmp_path / "index", header_of(model)) as store:
        yield Index(store, model)


def test_files_with_the_same_content_are_remembered(index, tmp_path):
    folder = tmp_path / "photos"
    (folder / "b").mkdir(parents=True)
    texture(1).save(folder / "a.png")
    texture(2).save(folder / "other.png")
    for name in ("b/a.png", "c.png"):
        shutil.copy(folder / "a.png", folder / name)
    added = index.add(folder, workers=0, progress=False)
    paths = [str(folder / name) for name in ("b/a.png", "c.png")]
    assert (added.added, added.copies) == (
        ["a.png", "other.png"],
        [(path, "a.png") for path in paths],
    )
    assert index.entry("a.png").copies == tuple(paths)
    assert index.entry("a.png").copy_names == ["b/a.png", "c.png"]
    again = index.add(folder, workers=0, progress=False)
    assert (again.unchanged, again.copies) == (["a.png", "other.png"], added.copies)
    assert index.entry("a.png").copies == tuple(paths)
    assert index.check(photos=True).ok

    (group,) = index.duplicates(progress=False)
    assert (group.exact, group.files, group.score, group.entries[0].id) == (True, 3, 1, "a.png")
    Path(paths[0]).unlink()  # copies that are gone are not shown
    texture(3).save(paths[1])
    assert index.duplicates(progress=False) == []

    (folder / "b" / "a.png").write_bytes((folder / "a.png").read_bytes())
    (group,) = index.duplicates(progress=False)
    assert index.remove(group.entries[0].copies) == 1  # the entry stays
    assert index.entry("a.png").copies == (paths[1],)
    (folder / "a.png").rename(folder / "z.png")
    assert index.add(folder / "z.png", workers=0, progress=False).moved
    (moved,) = [entry for entry in index if entry.path.endswith("z.png")]
    assert moved.copies == (paths[1],)


def test_the_file_of_an_entry_is_lost_but_not_its_copy(index, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    texture(1).save(folder / "a.png")
    shutil.copy(folder / "a.png", folder / "b.png")
    index.add(folder, workers=0, progress=False)
    (folder / "a.png").unlink()
    assert index.add(folder, workers=0, progress=False).moved == [("a.png", "b.png")]
    assert [(entry.id, entry.copies) for entry in index] == [("b.png", ())]
    with pytest.raises(NoEntryError):
        index.remove(folder / "a.png")


def test_photos_without_thumbnails_are_read(index, tmp_path):
    photo = texture(1)
    photo.save(tmp_path / "a.jpg", quality=95)
    photo.resize((160, 120)).save(tmp_path / "small.jpg", quality=85)
    texture(2).save(tmp_path / "b.jpg")
    Image.new("RGB", (64, 48), "red").save(tmp_path / "plain.jpg")
    names = ("a.jpg", "small.jpg", "b.jpg", "plain.jpg")
    index.add([tmp_path / name for name in names], thumbnails=False, workers=0, progress=False)
    (group,) = index.duplicates(progress=False)
    assert [Path(entry.path).name for entry in group.entries] == ["a.jpg", "small.jpg"]
    assert draw_duplicates([group]).height > 96
    (tmp_path / "a.jpg").unlink()  # what exists is better than what does not
    texture(1).save(tmp_path / "c.jpg", quality=80)
    index.add(tmp_path / "c.jpg", workers=0, progress=False)
    (group,) = index.duplicates(progress=False)
    assert Path(group.entries[0].path).name == "c.jpg"
    assert group.reason == "most pixels"
    index.remove(group.entries[1:])
    assert index.duplicates(progress=False) == []


@pytest.mark.skipif(REAL is None, reason="LISTWISE_REAL_DATA is not set")
def test_copies_of_real_photos_are_found_and_other_photos_are_not(embedded_places):
    """Two photos of each landmark, taken at different times, and copies of one of them."""
    folder = Path(REAL) / "data" / "landmarks"
    of = {}
    for row in csv.DictReader((folder / "landmarks.csv").open()):
        of.setdefault(row["label"], []).append(row["path"])
    random = np.random.default_rng(0)
    photos = {}
    for paths in of.values():
        one, other = (Image.open(folder / path).convert("RGB") for path in (paths[0], paths[-1]))
        photos |= {f"{paths[0]}|original": one, f"{paths[-1]}|other": other}
        altered = copies_of(one, *random.uniform(0, 1, 2))
        photos |= {f"{paths[0]}|{name}": copy for name, copy in altered.items()}
    with create_store(embedded_places(), HEADER) as store:
        fill(store, photos)
        groups = [{tuple(name.split("|")) for name in each} for each in ids(find_duplicates(store))]
    found = Counter()
    for group in groups:
        original = {path for path, name in group if name == "original"}
        found.update(name for path, name in group if path in original)
    names = set(found) - {"original", "other"}
    assert len(names) == 6
    assert min(found[name] for name in names) >= 0.95 * len(of), found
    wrong = [{path for path, _ in group} for group in groups]
    assert sum(len(paths) for paths in wrong if len(paths) > 1) <= 0.01 * 2 * len(of), wrong
