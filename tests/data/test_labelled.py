import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from listwise.data import (
    ImageError,
    Images,
    LabelledImages,
    check_images,
    hold_out_classes,
    read_images,
    read_labelled,
)
from listwise.errors import InputError


def make_image(path: Path, size: tuple[int, int] = (8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "teal").save(path)
    return path


def named(images: LabelledImages) -> list[tuple[str, str]]:
    return [
        (name, images.class_names[label])
        for name, label in zip(images.ids, images.labels, strict=True)
    ]


def labelled(sizes: list[int]) -> LabelledImages:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    names = tuple(f"{label}/{number}.jpg" for number, label in enumerate(labels))
    classes = [f"class {label:03d}" for label in labels]
    return LabelledImages.from_names(Images(names, names, None), classes, None)


def error_of(source: Path, **options: str) -> str:
    with pytest.raises(InputError) as caught:
        read_labelled(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(source) in message
    return message


# Folders


def test_folder_of_class_folders(tmp_path, monkeypatch):
    for name in ("tower/b.jpg", "tower/2019/a.png", "bridge/c.webp", "bridge/.d.jpg", "x/no.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path.parent)
    for source in (tmp_path, str(tmp_path), tmp_path.name):
        images = read_labelled(source)
        assert images.class_names == ("bridge", "tower")
        assert named(images) == [
            ("bridge/c.webp", "bridge"),
            ("tower/2019/a.png", "tower"),
            ("tower/b.jpg", "tower"),
        ]
        assert images.paths == tuple(str(tmp_path / name) for name in images.ids)
        assert images.boxes is None
        assert images.splits is None
        assert images.labels.dtype == np.int64


def test_folder_mistakes_are_explained(tmp_path):
    assert "no photo" in error_of(tmp_path)
    make_image(tmp_path / "loose.jpg")
    make_image(tmp_path / "tower" / "a.jpg")
    message = error_of(tmp_path)
    assert "loose.jpg" in message
    assert f"{tmp_path}/CLASS/PHOTO" in message
    (tmp_path / "loose.jpg").unlink()
    with pytest.raises(InputError, match="the photos have no splits"):
        read_labelled(tmp_path, split="train")


def test_folders_named_like_splits_are_not_taken_for_classes(tmp_path):
    make_image(tmp_path / "train" / "tower" / "a.jpg")
    make_image(tmp_path / "val" / "bridge" / "b.jpg")
    assert str(tmp_path / "train") in error_of(tmp_path)
    assert read_labelled(tmp_path / "train").class_names == ("tower",)


# Tables


def write_table(path: Path, columns: dict[str, list[object]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(
                ["" if cell is None else cell for cell in row]
                for row in zip(*columns.values(), strict=True)
            )
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table(tmp_path, suffix):
    elsewhere = str(tmp_path / "elsewhere" / "d.jpg")
    table = write_table(
        tmp_path / f"t{suffix}",
        {
            "note": ["w", "x", "y", "z"],
            "path": ["a.jpg", "sub dir/b, c.jpg", "../c.jpg", elsewhere],
            "label": ["tower", "bridge", "tower", "Köln"],
            "split": ["train", "train", "val", "val"],
        },
    )
    images = read_labelled(table)
    assert named(images) == [
        ("a.jpg", "tower"),
        ("sub dir/b, c.jpg", "bridge"),
        ("../c.jpg", "tower"),
        (elsewhere, "Köln"),
    ]
    assert images.class_names == ("Köln", "bridge", "tower")
    assert images.paths == (
        str(tmp_path / "a.jpg"),
        str(tmp_path / "sub dir" / "b, c.jpg"),
        str(tmp_path.parent / "c.jpg"),
        elsewhere,
    )
    assert images.splits == ("train", "train", "val", "val")
    assert images.boxes is None

    validation = read_labelled(table, split="val")
    assert named(validation) == [("../c.jpg", "tower"), (elsewhere, "Köln")]
    assert validation.class_names == ("Köln", "tower")
    assert named(images.of_split("val")) == named(validation)
    with pytest.raises(InputError, match=r"'test'.*train, val"):
        read_labelled(table, split="test")
    assert read_labelled(table, split_column="note").splits == ("w", "x", "y", "z")
    assert "columns are: note, path, label, split" in error_of(table, split_column="fold")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_boxes_in_one_column_or_four(tmp_path, suffix):
    boxes = ["1,2,30,40", "1.5 2 30 40.5", None, " 0, 0 ,5, 6 "]
    expected = ((1, 2, 30, 40), (1.5, 2, 30, 40.5), None, (0, 0, 5, 6))
    base = {"path": list("abcd"), "label": [3, 3, 12, 12]}
    images = read_labelled(write_table(tmp_path / f"one{suffix}", {**base, "box": boxes}))
    assert images.boxes == expected
    assert images.box(0) == (1, 2, 30, 40)
    assert images.class_names == ("12", "3")
    four = {
        name: [None if box is None else box[i] for box in expected]
        for i, name in enumerate(("x0", "y0", "x1", "y1"))
    }
    assert (
        read_labelled(write_table(tmp_path / f"four{suffix}", {**base, **four})).boxes == expected
    )


def test_csv_as_spreadsheets_write_it(tmp_path):
    table = tmp_path / "t.csv"
    table.write_bytes('\ufeffpath, label\r\na.jpg,"x, y"\r\n\r\nb.jpg, z \r\n'.encode())
    assert named(read_labelled(table)) == [("a.jpg", "x, y"), ("b.jpg", "z")]


BOX = "path,label,box\na.jpg,x,1 2 3 4\nb.jpg,y,"
CORNERS = "path,label,x0,y0,x1"
MISTAKES = [
    ("t.xlsx", "", "class folders"),
    ("t.csv", "", "first line"),
    ("t.csv", "path,label\n", "no rows"),
    ("t.csv", "path\na.jpg\n", "no column label"),
    ("t.csv", "file,class\na.jpg,x\n", "no column path and no column label"),
    ("t.csv", "file,class\na.jpg,x\n", "the columns are: file, class"),
    ("t.csv", "path;label\na.jpg;x\n", "commas"),
    ("t.csv", "path,label\na.jpg,x\nb, c.jpg,y\n", "line 3: 3 cells"),
    ("t.csv", 'path,label\na.jpg,"x\n', "not readable as CSV"),
    ("t.csv", "path,label\nKöln.jpg,x\n", "UTF-8"),
    ("t.csv", "path,label\na.jpg,x\n,y\n", "line 3: the cell in column path is empty"),
    ("t.csv", "path,label,split\na.jpg,x,\n", "line 2: the cell in column split is empty"),
    (
        "t.csv",
        "path,label\na.jpg,x\nb.jpg,y\0\n",
        "line 3: the cell in column label contains a NUL",
    ),
    ("t.csv", BOX + "1 2 3\n", "line 3: the box '1,2,3'"),
    ("t.csv", BOX + "1 2 3 end\n", "not four numbers"),
    ("t.csv", BOX + "9 2 3 4\n", "x0 < x1"),
    ("t.csv", BOX + "nan 2 3 4\n", "x0 < x1"),
    ("t.csv", f"{CORNERS},y1\na.jpg,x,1,,2,2\n", "not four numbers"),
    ("t.csv", f"{CORNERS}\na.jpg,x,1,1,2\n", "no column y1"),
    ("t.csv", "path,label,path\na.jpg,x,b.jpg\n", "several columns are called path"),
    ("t.csv", f"{CORNERS},y1,box\na.jpg,x,1,1,2,2,\n", "keep one"),
    ("t.parquet", "path,label", "not readable as Parquet"),
    ("t.txt", "\n \n", "empty"),
    ("t.txt", "a.jpg\tx\nb.jpg\tx\0\n", "line 2: contains a NUL"),
    ("t.txt", "b.jpg\nmy photo.jpg\nc.jpg\t\n", "no photo has a label; write path<TAB>label"),
    ("t.txt", "a.jpg tower\n\ttower\n", "write path<TAB>label"),
]


@pytest.mark.parametrize(("name", "content", "reason"), MISTAKES)
def test_mistakes_are_explained(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert reason in error_of(tmp_path / name)


def test_a_small_table_with_very_many_rows_is_refused_at_once(tmp_path):
    path = tmp_path / "t.parquet"
    zeros = pa.array(np.zeros(20_000_001, np.int8))
    cells = pa.DictionaryArray.from_arrays(zeros, ["a.jpg"])
    pq.write_table(pa.table({"path": cells, "label": cells}), path)
    assert path.stat().st_size < 1_000_000
    assert "20,000,001 rows; give tables of at most 20,000,000" in error_of(path)


def test_mistakes_in_cells_of_parquet_tables_are_located(tmp_path):
    assert "class folders" in error_of(tmp_path / "nothing.parquet")
    for columns, reason in (
        ({"label": [None, None]}, "no photo has a label; fill the column label"),
        ({"label": ["x", "y\0"]}, "row 2: the cell in column label contains a NUL"),
        ({"label": [1, 2], "box": ["1 2 3 4", "1 2 3"]}, "row 2: the box '1,2,3'"),
    ):
        columns = {"path": ["a.jpg", "b.jpg"], **columns}
        assert reason in error_of(write_table(tmp_path / "t.parquet", columns))


# Lists


def test_image_list(tmp_path):
    source = tmp_path / "list.txt"
    source.write_text(
        "a.jpg tower\n\nmy photo.jpg\tthe bridge\nsub/c.png   tower \r\nin two words.jpg bridge\n"
    )
    images = read_labelled(source)
    assert named(images) == [
        ("a.jpg", "tower"),
        ("my photo.jpg", "the bridge"),
        ("sub/c.png", "tower"),
        ("in two words.jpg", "bridge"),
    ]
    assert images.paths[1] == str(tmp_path / "my photo.jpg")
    assert read_images(source).ids == images.ids


def test_read_images_without_labels(tmp_path):
    (tmp_path / "list.txt").write_text("a.jpg\nmy photo.jpg\nall_souls_000013\n")
    assert read_images(tmp_path / "list.txt").ids == ("a.jpg", "my photo.jpg", "all_souls_000013")
    for suffix in (".csv", ".parquet"):
        table = write_table(
            tmp_path / f"t{suffix}", {"path": ["a.jpg", "b.jpg"], "box": ["1 2 3 4", None]}
        )
        images = read_images(table)
        assert images.ids == ("a.jpg", "b.jpg")
        assert images.boxes == ((1, 2, 3, 4), None)
        assert images.subset([1]).boxes == (None,)
    make_image(tmp_path / "f" / "a.jpg")
    make_image(tmp_path / "f" / "g" / "b.jpg")
    images = read_images(tmp_path / "f")
    assert images.ids == ("a.jpg", "g/b.jpg")
    assert all(os.path.isabs(path) for path in images.paths)
    (image,) = read_images(tmp_path / "f" / "a.jpg").paths
    assert image == images.paths[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no photo"):
        read_images(tmp_path / "empty")


def test_what_else_a_source_says_of_an_image_becomes_its_attributes(tmp_path):
    columns = {"path": ["a.jpg", "b.jpg"], "label": [3, None], "artist": ["Ida", " "]}
    for suffix in (".csv", ".parquet"):
        images = read_images(write_table(tmp_path / f"t{suffix}", columns))
        assert images.attributes == ({"label": "3", "artist": "Ida"}, {})
        assert images.subset([1, 0]).attributes == ({}, {"label": "3", "artist": "Ida"})
    (tmp_path / "list.txt").write_text("a.jpg\tx\nb.jpg\n")
    assert read_images(tmp_path / "list.txt").attributes == ({"label": "x"}, {})
    make_image(tmp_path / "f" / "a.jpg")
    assert read_images(tmp_path / "f").attributes is None


# Values


@given(
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    data=st.data(),
)
def test_subset_keeps_names_and_renumbers(labels, data):
    count = len(labels)
    names = tuple(map(str, range(count)))
    images = LabelledImages.from_names(
        Images(names, names, tuple((i, 0, i + 1, 1) for i in range(count))),
        [f"c{label}" for label in labels],
        ["train" if i % 3 else "val" for i in range(count)],
    )
    indices = data.draw(st.lists(st.integers(0, count - 1), min_size=1))
    subset = images.subset(indices)
    assert len(subset) == len(indices)
    assert named(subset) == [named(images)[i] for i in indices]
    assert subset.class_names == tuple(sorted({f"c{labels[i]}" for i in indices}))
    assert subset.boxes == tuple((i, 0, i + 1, 1) for i in indices)
    assert subset.splits == tuple("train" if i % 3 else "val" for i in indices)
    assert subset.class_sizes().min() >= 1
    assert subset.class_sizes().sum() == len(indices)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_hold_out_classes(sizes, fraction, seed):
    images = labelled(sizes)
    several, large = (sum(size >= least for size in sizes) for least in (2, 4))
    if several < 4 and large < 2:
        with pytest.raises(InputError, match=f"but there are {several} and {large}"):
            hold_out_classes(images, fraction, seed)
        return
    if several < 4:  # photos of each class are held out
        train, validation = hold_out_classes(images, fraction, seed)
        assert sorted(train.ids + validation.ids) == sorted(images.ids)
        assert len(validation.class_names) == large
        assert (validation.class_sizes() >= 2).all()
        assert (train.class_sizes() >= 2).sum() >= 2
        return
    train, validation = hold_out_classes(images, fraction, seed)
    assert sorted(train.ids + validation.ids) == sorted(images.ids)
    assert sorted(train.class_names + validation.class_names) == list(images.class_names)
    assert (validation.class_sizes() >= 2).all()
    assert (train.class_sizes() >= 2).sum() >= 2
    wanted = min(max(round(fraction * len(sizes)), 2), several - 2)
    assert len(validation.class_names) == wanted
    again = hold_out_classes(images, fraction, seed)[1]
    assert again.ids == validation.ids


# Checks


def test_check_counts_and_names_unusable_files(tmp_path):
    for index in range(3):
        make_image(tmp_path / "tower" / f"{index}.png", (10 + index, 20))
    make_image(tmp_path / "bridge" / "0.png")
    for index in range(7):
        (tmp_path / "bridge" / f"broken{index}.jpg").write_text("no image")
    images, report = check_images(read_labelled(tmp_path), workers=2)
    assert images.ids == ("bridge/0.png", "tower/0.png", "tower/1.png", "tower/2.png")
    assert report.sizes.tolist() == [[8, 6], [10, 20], [11, 20], [12, 20]]
    assert len(report.broken) == 7
    assert report.single == ("bridge",)
    broken, single = report.lines()
    assert broken.startswith("skipped 7 photos that cannot be used: ")
    assert all(f"broken{index}.jpg (not a JPEG" in broken for index in range(5))
    assert "broken5" not in broken
    assert broken.endswith("and 2 more")
    assert single.startswith("1 class has only one photo")
    assert single.endswith("bridge")

    with pytest.raises(ImageError, match=r"broken0\.jpg"):
        check_images(read_labelled(tmp_path), strict=True)


def test_names_that_are_not_utf8_are_left_out(tmp_path):
    for name in ("x/1.png", "x/2.png", "y/1.png"):
        make_image(tmp_path / name)
    try:
        shutil.copy(tmp_path / "x/1.png", os.fsencode(tmp_path) + b"/y/\xe9.png")
        os.mkdir(os.fsencode(tmp_path) + b"/\xfc")
        shutil.copy(tmp_path / "x/1.png", os.fsencode(tmp_path) + b"/\xfc/1.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    images, report = check_images(read_labelled(tmp_path))
    assert sorted(named(images)) == [("x/1.png", "x"), ("x/2.png", "x"), ("y/1.png", "y")]
    assert images.class_names == ("x", "y")
    text = report.lines()[0]
    assert text.startswith("skipped 2 photos that cannot be used: ")
    assert "y/\\udce9.png (the path is not UTF-8: rename the file or its folder)" in text
    text.encode()


def test_check_of_boxes_and_missing_files(tmp_path):
    make_image(tmp_path / "a.png", (100, 50))
    columns: dict[str, list[object]] = {
        "path": ["a.png", "a.png", "gone.png"],
        "label": ["x", "x", "y"],
        "box": ["10 10 200 40", "200 0 300 40", None],
    }
    images, report = check_images(read_labelled(write_table(tmp_path / "t.csv", columns)))
    assert images.boxes == ((10, 10, 200, 40),)
    assert images.class_names == ("x",)
    assert report.sizes.tolist() == [[90, 30]]
    assert [error.reason for error in report.broken][1] == "no such file"
    assert "outside the image of 100 × 50" in report.broken[0].reason


def test_no_usable_image_is_an_error(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jpg").touch()
    with pytest.raises(InputError, match=r"none of the 1 photos can be used.*a\.jpg.*empty"):
        check_images(read_labelled(tmp_path))
