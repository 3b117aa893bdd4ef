"""Labels of unusual photos, files and folders: each is handled or reported before the work."""

import json
import os
import shutil

import pytest
from label_examples import FEW, read_table, view, write_table
from PIL import Image

from listwise.errors import InputError
from listwise.labeling import label


def test_photos_without_features_are_dropped(things, tmp_path):
    for name in ("gray", "white"):
        Image.new("RGB", (200, 150), name).save(tmp_path / f"{name}.png")
    rows = [(things / f"0-{i}.jpg", "tower") for i in range(2)]
    rows += [(tmp_path / f"{name}.png", "tower") for name in ("gray", "white")]
    table = write_table(tmp_path / "all.csv", rows)
    found = label(table, tmp_path / "labels.csv", workers=0, **FEW)
    assert [photo.label for photo in found.photos] == ["tower"] * 2 + [""] * 2
    assert [photo.reason for photo in found.photos[2:]] == ["no match"] * 2


def test_a_second_run_in_the_same_process_reads_its_own_features(things, tmp_path):
    def run(numbers):
        rows = [(things / f"{i}.jpg", "tower") for i in numbers]
        table = write_table(tmp_path / "all.csv", rows)
        return label(table, tmp_path / "labels.csv", workers=0, **FEW)

    assert run(["0-0", "1-0"]).summary()["kept"] == 0
    assert run(["0-0", "0-1"]).summary()["kept"] == 2


def test_a_path_that_is_not_utf_8_is_reported_and_left_out(things, tmp_path):
    folder = tmp_path / "photos"
    for name in ("tower", os.fsdecode(b"br\xfccke")):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            shutil.copy(things / f"0-{i}.jpg", folder / name / f"{i}.jpg")
    shutil.copy(things / "0-3.jpg", folder / "tower" / os.fsdecode(b"t\xfcr.jpg"))
    found = label(folder, tmp_path / "labels.csv", workers=0, **FEW)
    assert {row["label"] for row in read_table(found.file)} == {"tower"}
    assert len(read_table(found.file)) == 3
    dropped = [row for row in read_table(found.table) if row["status"] == "dropped"]
    assert len(dropped) == 4
    assert {"not UTF-8" in row["reason"] for row in dropped} == {True}
    assert any(row["path"].endswith("t\\udcfcr.jpg") for row in dropped)
    summary = json.loads(found.file.with_suffix(".json").read_text(encoding="utf-8"))
    assert summary["reasons"] == {"unreadable": 4}
    assert "br\\udcfccke" in found.page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["labels.csv", "labels.photos.csv", "link.csv"])
def test_the_table_of_the_photos_is_not_overwritten(things, tmp_path, name):
    rows = [(things / f"0-{i}.jpg", "tower") for i in range(3)]
    source = write_table(tmp_path / name, rows)
    before = source.read_bytes()
    if name == "link.csv":
        (tmp_path / "labels.csv").symlink_to(source)
    with pytest.raises(InputError, match="the photos are read from it; give another `out`"):
        label(source, tmp_path / "labels.csv", workers=0)
    assert source.read_bytes() == before
    assert not (tmp_path / "labels.csv.partial").exists()


def test_a_photo_that_changed_discards_the_work(things, tmp_path):
    names = [tmp_path / f"{i}.jpg" for i in range(3)]
    for i, name in enumerate(names):
        view(0, i).save(name, quality=92)
    names[2].write_bytes(b"damaged")
    table = write_table(tmp_path / "all.csv", [(name.name, "tower") for name in names])
    notes: list[str] = []

    def run():
        found = label(
            table, tmp_path / "labels.csv", workers=0, keep_work=True, on_note=notes.append, **FEW
        )
        return found.summary()["kept"]

    assert run() == 2
    assert run() == 2
    assert "resuming" in notes[-1]
    view(0, 2).save(names[2], quality=92)
    assert run() == 3
    assert "discarding" in notes[-1]


def test_many_classes_are_compared_only_with_a_model(things, tmp_path, monkeypatch):
    monkeypatch.setattr("listwise.labeling.candidates._MERGE_PAIRS", 0)
    rows = [(things / f"3-{i}.jpg", "east" if i < 2 else "west") for i in range(4)]
    table = write_table(tmp_path / "all.csv", rows)
    notes: list[str] = []
    found = label(table, tmp_path / "labels.csv", workers=0, on_note=notes.append, **FEW)
    assert found.merges == ()
    assert "classes were not compared with each other" in notes[-1]
    assert "give `model`" in notes[-1]
    with pytest.raises(InputError, match=r"2 classes are too many .* give `model`"):
        label(table, tmp_path / "merged.csv", workers=0, merge=True)
    assert not (tmp_path / "merged.csv.partial").exists()


def test_a_run_that_keeps_no_photo_tells_what_to_change(things, tmp_path):
    def last_note(names, **settings):
        notes: list[str] = []
        table = write_table(tmp_path / "all.csv", [(things / f"{i}.jpg", "a") for i in names])
        settings |= FEW
        label(table, tmp_path / "labels.csv", workers=0, on_note=notes.append, **settings)
        return notes[-1] if notes else ""

    note = last_note(["0-0", "1-0", "2-0"])
    assert note.startswith("no photo was kept (no match: 3): look through")
    assert "lower `inliers`" in note
    assert "`labels=False`" in note
    note = last_note(["0-0", "0-1"], min_photos=3)
    assert "(few photos: 2)" in note
    assert "lower `min_photos`" in note
    assert last_note(["0-0", "0-1"]) == ""


def test_a_wrong_model_leaves_no_folder(mixed, tmp_path):
    with pytest.raises(InputError):
        label(mixed, tmp_path / "labels.csv", model="resnet5O")
    assert list(tmp_path.iterdir()) == []
