"""Photos and tables in memory, as other libraries hold them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from listwise.data import read_images
from listwise.data.catalog import list_photos
from listwise.data.photos import open_photo
from listwise.errors import InputError

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "photo",
    [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        PIXELS / 255,
        (PIXELS / 255).astype(np.float32).transpose(2, 0, 1),
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        torch.from_numpy(PIXELS).permute(2, 0, 1) / 255,
        (torch.from_numpy(PIXELS) / 255).requires_grad_(),
    ],
)
def test_arrays_and_tensors_of_pixels_are_photos(photo):
    assert np.array_equal(np.asarray(open_photo(photo)), PIXELS)


def test_bytes_and_open_files_are_photos(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    with path.open("rb") as file:
        for photo in (path.read_bytes(), file, io.BytesIO(path.read_bytes())):
            assert np.array_equal(np.asarray(open_photo(photo)), PIXELS)


@pytest.mark.parametrize(
    ("photo", "reason"),
    [
        (PIXELS.astype(np.float32), "from 0 to 1, not from 0 to 255: divide"),
        (PIXELS / 255 - 0.5, "from 0 to 1, not from -0.5 to 0.5"),
        (np.full((4, 4, 3), np.nan), "from 0 to 1, not from nan"),
        (PIXELS.astype(np.int64), "uint8 or float, not int64"),
        (np.zeros((3, 8, 3), np.uint8), r"\[3, 8, 3\] may be both: give a Pillow image"),
        (np.zeros((8, 8, 4), np.uint8), r"not \[8, 8, 4\]"),
        (torch.zeros(8, 8), r"not \[8, 8\]"),
        (None, "not NoneType"),
        (io.StringIO("a.jpg"), "not StringIO"),
        ({"path": "a.jpg"}, "not dict"),
    ],
)
def test_what_is_no_photo_is_refused_in_one_line(photo, reason):
    with pytest.raises(InputError, match=reason) as refused:
        open_photo(photo)
    assert "\n" not in str(refused.value)


def test_a_batch_is_a_list_of_photos():
    for batch in (np.stack([PIXELS] * 2), torch.zeros(2, 3, 8, 8), [PIXELS, b"photo"]):
        assert len(list_photos(batch)) == 2
    assert list_photos(np.array(["a.jpg", "b.jpg"])).ids == ("a.jpg", "b.jpg")
    with pytest.raises(InputError, match="a photo must be a file"):
        list_photos(3)


def test_a_table_in_memory_reads_like_one_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"path": "a.jpg", "price": 3, "color": None},
        {"path": "b.jpg", "box": (1, 2, 3, 4), "price": 2.5, "sold": True},
    ]
    found = read_images(rows)
    assert found.paths == (str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg"))
    assert found.ids == ("a.jpg", "b.jpg")
    assert found.boxes == (None, (1, 2, 3, 4))
    assert found.attributes == ({"price": "3"}, {"price": "2.5", "sold": "True"})
    with pytest.raises(InputError, match="the table: no column path; the columns are: file"):
        read_images([{"file": "a.jpg"}])
    with pytest.raises(InputError, match="the table, row 2: the cell in column path is empty"):
        read_images([{"path": "a.jpg"}, {"path": None}])


def test_a_dataframe_reads_like_a_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": ["a.jpg", "b.jpg"], "price": [3, 4], "size": [1.5, None]})
    frame["count"] = pandas.array([7, None], dtype="Int64")
    found = read_images(frame)
    assert found.attributes == ({"price": "3", "size": "1.5", "count": "7"}, {"price": "4"})
    assert list_photos(frame["path"]).ids == ("a.jpg", "b.jpg")
    named = list_photos(["a.jpg", "b.jpg"]).named(["x", "y"], frame[["price"]])
    assert named.attributes == ({"price": "3"}, {"price": "4"})
    cells = [pandas.NA, pandas.NaT, float("nan"), np.float32("nan"), None]
    rows = [{"path": f"{number}.jpg", "name": cell} for number, cell in enumerate(cells)]
    assert read_images([*rows, {"path": "n.jpg", "name": "nan"}]).attributes == (
        *({},) * len(cells),
        {"name": "nan"},
    )
