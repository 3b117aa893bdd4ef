"""Labels from geometry: what is kept, dropped, split, merged; resuming; the same result always."""

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
from index_examples import texture
from label_examples import FEW, read_table, view, write_table
from PIL import Image
from sklearn.metrics import adjusted_rand_score
from tiny_net import TINY_NET

import listwise
from listwise.data import read_images, read_labelled
from listwise.descriptors import load_model
from listwise.errors import InputError
from listwise.labeling import label
from listwise.labeling.candidates import class_rounds
from listwise.labeling.rounds import Groups
from listwise.local import hessian_affine, verify
from listwise.models import RetrievalNet


@pytest.fixture(scope="module")
def labels(mixed, tmp_path_factory):
    """The result for the mixed photos, with the files of its work."""
    out = tmp_path_factory.mktemp("labels") / "labels.csv"
    return label(mixed, out, workers=0, keep_work=True, **FEW)


def short(table):
    """File name -> label of a table."""
    return {Path(row["path"]).name: row["label"] for row in read_table(table)}


def small_model(folder):
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save(folder / "model")
    return load_model(folder / "model", "cpu")


def again(labels, folder, source, **settings):
    """A second run in another folder, with the features and matches of the first."""
    folder.mkdir(exist_ok=True)
    work = folder / "labels.csv.partial"
    if not work.exists():
        shutil.copytree(labels.file.with_name("labels.csv.partial"), work)
    return label(source, folder / "labels.csv", workers=0, keep_work=True, **FEW, **settings)


def test_the_largest_group_of_each_class_is_kept(labels):
    kept = short(labels.file)
    expected = {f"0-{i}.jpg": "tower" for i in range(5)}
    expected |= {f"1-{i}.jpg": "square" for i in range(5)}
    expected |= {f"3-{i}.jpg": "east" if i < 3 else "west" for i in range(6)}
    assert kept == expected
    assert {row["split"] for row in read_table(labels.file)} == {"train", "val"}
    images = read_labelled(labels.file)
    assert images.class_names == ("east", "square", "tower", "west")
    assert set(map(os.path.exists, images.paths)) == {True}
    assert labels.classes.keys() == {"east", "square", "tower", "west"}


def test_a_table_tells_what_happened_to_every_photo(labels, mixed):
    rows = {Path(row["path"]).name: row for row in read_table(labels.table)}
    assert len(rows) == len(read_table(mixed))
    for name in ("4-0.jpg", "5-0.jpg", "4-1.jpg", "5-1.jpg"):
        assert (rows[name]["status"], rows[name]["reason"]) == ("dropped", "no match")
        assert rows[name]["label"] == ""
        assert int(rows[name]["inliers"]) < 8
    for i in range(3):
        row = rows[f"2-{i}.jpg"]
        assert (row["status"], row["reason"], row["group"]) == ("dropped", "smaller group", "2")
        assert Path(row["partner"]).name[0] == "2"
        assert int(row["inliers"]) >= 8
    assert rows["broken.jpg"]["status"] == "dropped"
    assert "broken.jpg" in rows["broken.jpg"]["reason"]
    assert len(labels.errors) == 1
    summary = json.loads(labels.file.with_suffix(".json").read_text(encoding="utf-8"))
    assert (summary["kept"], summary["dropped"]) == (16, 8)
    assert summary["reasons"] == {"no match": 4, "smaller group": 3, "unreadable": 1}
    assert summary["settings"]["inliers"] == 8


def test_classes_of_the_same_thing_are_reported_and_merged_by_choice(labels, mixed, tmp_path):
    (found,) = labels.merges
    assert {found.one, found.two} == {"east", "west"}
    assert found.inliers >= 8
    assert not found.merged
    merged = again(labels, tmp_path, mixed, merge=True)
    assert merged.merges[0].merged
    kept = short(merged.file)
    assert len({kept[f"3-{i}.jpg"] for i in range(6)}) == 1
    assert {kept[f"0-{i}.jpg"] for i in range(5)} == {"tower"}


def test_further_groups_become_classes_by_choice(labels, mixed, tmp_path):
    found = again(labels, tmp_path, mixed, all_groups=True)
    kept = short(found.file)
    assert {kept[f"2-{i}.jpg"] for i in range(3)} == {"square/2"}
    assert {kept[f"1-{i}.jpg"] for i in range(5)} == {"square"}
    assert found.summary()["split"] == 1
    found = again(labels, tmp_path, mixed, all_groups=True, min_photos=4)
    assert set(short(found.file).values()) == {"square", "tower"}
    assert {photo.reason for photo in found.photos} >= {"few photos"}


def test_a_split_may_be_cleaned_alone(things, tmp_path):
    rows = [(things / f"{name}.jpg", "tower", "train") for name in ("0-0", "0-1", "4-0")]
    rows += [(things / f"{name}.jpg", "square", "val") for name in ("1-0", "5-0")]
    table = write_table(tmp_path / "photos.csv", rows, ("path", "label", "split"))
    found = label(table, tmp_path / "labels.csv", workers=0, split="train", **FEW)
    kept = [(Path(row["path"]).name, row["label"], row["split"]) for row in read_table(found.file)]
    assert sorted(kept) == [
        ("0-0.jpg", "tower", "train"),
        ("0-1.jpg", "tower", "train"),
        ("1-0.jpg", "square", "val"),
        ("5-0.jpg", "square", "val"),
    ]
    assert not (tmp_path / "labels.csv.partial").exists()
    assert len(found) == 3


def test_a_folder_without_labels_is_grouped(things, labels, tmp_path):
    model = small_model(tmp_path)
    some = shutil.copytree(things, tmp_path / "some", ignore=shutil.ignore_patterns("*-[2-5].jpg"))
    found = listwise.label(
        some, tmp_path / "labels.csv", labels=False, model=model, partners=11, workers=0, **FEW
    )
    names = [Path(path).name for path in found.images.paths]
    now = [photo.label for photo in found.photos]
    assert adjusted_rand_score([name[0] for name in names], now) == 1
    assert len(found.classes) == 6
    assert all(f"{photo.label}.jpg" in names for photo in found.photos)
    assert found.merges == ()
    assert not found.labelled


def test_the_result_does_not_depend_on_the_number_of_workers(labels, mixed, tmp_path):
    found = label(mixed, tmp_path / "labels.csv", workers=2, keep_work=True, **FEW)
    for name in ("labels.csv", "labels.photos.csv", "labels.json"):
        assert (tmp_path / name).read_bytes() == labels.file.with_name(name).read_bytes()
    assert found.compared == labels.compared


def compared(matches: Path) -> bool:
    if not matches.exists():
        return False
    with closing(sqlite3.connect(matches)) as database, suppress(sqlite3.OperationalError):
        return bool(database.execute("SELECT 1 FROM pairs").fetchall())
    return False


def test_a_killed_run_resumes_with_the_same_result(labels, mixed, tmp_path):
    work = tmp_path / "labels.csv.partial"
    matches = work / "matches.sqlite"
    arguments = ("label", mixed, "--out", tmp_path / "labels.csv", "--workers", "1")
    arguments += ("--features", FEW["features"])
    process = programs.listwise(*arguments)
    end = time.monotonic() + 120
    while process.poll() is None and not compared(matches):
        assert time.monotonic() < end
        time.sleep(0.005)
    process.kill()
    process.wait(60)
    assert work.is_dir(), "the run ended before it was killed"
    # As after a power loss: the last entry is incomplete.
    matches.write_bytes(matches.read_bytes()[:-3])
    process = programs.listwise(*arguments, "--json")
    out, errors = process.communicate(300)
    assert process.returncode == 0, errors
    assert "resuming" in errors
    assert json.loads(out)["kept"] == 16
    for name in ("labels.csv", "labels.photos.csv"):
        assert (tmp_path / name).read_bytes() == labels.file.with_name(name).read_bytes()
    assert not work.exists()


def test_other_photos_discard_the_work_and_other_thresholds_use_it(labels, mixed, tmp_path):
    notes: list[str] = []
    found = again(labels, tmp_path, mixed, partners=2, on_note=notes.append)
    assert "resuming" in notes[0]
    alone = label(mixed, tmp_path / "alone.csv", workers=0, partners=2, **FEW)
    assert found.photos == alone.photos  # pairs that this run did not ask for do not count
    assert found.compared == alone.compared < labels.compared
    rows = [(row["path"], row["label"]) for row in read_table(mixed)[:5]]
    fewer = write_table(tmp_path / "fewer.csv", rows)
    again(labels, tmp_path, fewer, on_note=notes.append)
    assert "discarding" in notes[-1]
    assert len(short(tmp_path / "labels.csv")) == 5


def test_photos_without_labels_are_noticed_and_bad_labels_are_errors(things, tmp_path):
    notes: list[str] = []
    (tmp_path / "few").mkdir()
    for name in ("0-0.jpg", "0-1.jpg", "1-0.jpg"):
        shutil.copy(things / name, tmp_path / "few")
    found = label(
        tmp_path / "few",
        tmp_path / "a.csv",
        model=small_model(tmp_path),
        workers=0,
        on_note=notes.append,
        **FEW,
    )
    assert not found.labelled
    assert "have no labels" in notes[0]
    assert found.settings.partners == 10
    rows = [(things / "0-0.jpg", "a"), (things / "0-1.jpg", "")]
    with pytest.raises(InputError, match="1 photo cannot be matched"):  # the other has no label
        label(write_table(tmp_path / "table.csv", rows), tmp_path / "b.csv")
    for name in ("train", "val"):
        (tmp_path / "folders" / name).mkdir(parents=True)
        shutil.copy(things / "0-0.jpg", tmp_path / "folders" / name)
    with pytest.raises(InputError, match="named like splits"):
        label(tmp_path / "folders", tmp_path / "b.csv")
    (tmp_path / "folders" / "val").rename(tmp_path / "folders" / "bridge")
    label(tmp_path / "folders", tmp_path / "b.csv", workers=0, on_note=notes.append, **FEW)
    assert "2 folders" in notes[-2]
    assert "are used as labels" in notes[-2]
    assert "no photo was kept" in notes[-1]


def test_a_model_chooses_partners_within_classes(mixed, labels, tmp_path):
    work = labels.file.with_name("labels.csv.partial")
    work = shutil.copytree(work, tmp_path / "labels.csv.partial")
    (work / "matches.sqlite").unlink()  # they would connect the photos without any partner
    found = again(labels, tmp_path, mixed, model=small_model(tmp_path))
    assert short(found.file) == short(labels.file)
    assert {merge[:2] for merge in found.merges} == {merge[:2] for merge in labels.merges}


def test_a_copy_in_another_class_is_no_reason_to_merge(things, tmp_path):
    rows = [(things / f"{thing}-{i}.jpg", str(thing)) for thing in (0, 1) for i in range(2)]
    rows.append((things / "0-0.jpg", "1"))
    table = write_table(tmp_path / "photos.csv", rows)
    found = label(table, tmp_path / "labels.csv", workers=0, merge=True, **FEW)
    assert found.merges == ()
    assert found.copies == ((0, 4),)
    assert found.photos[4].reason == "no match"
    assert "in different classes" in found.page.read_text(encoding="utf-8")


def test_copies_are_found(tmp_path):
    for number in range(3):
        view(0, number).save(tmp_path / f"{number}.jpg", quality=92)
    shutil.copy(tmp_path / "0.jpg", tmp_path / "copy.jpg")
    with Image.open(tmp_path / "1.jpg") as photo:
        photo.resize((120, 88)).save(tmp_path / "small.jpg", quality=60)
    rows = [(f"{name}.jpg", "thing") for name in (0, 1, 2, "copy", "small")]
    table = write_table(tmp_path / "photos.csv", rows)
    found = label(table, tmp_path / "labels.csv", workers=0, **FEW)
    names = [sorted(found.images.ids[i] for i in numbers) for numbers in found.copies]
    assert sorted(names) == [["0.jpg", "copy.jpg"], ["1.jpg", "small.jpg"]]
    assert found.images.ids[found.photos[4].copy_of] == "1.jpg"


def test_boxes_are_used_and_kept(things, tmp_path):
    wide = Image.new("RGB", (900, 440))
    wide.paste(view(0, 0), (10, 20))
    wide.paste(view(1, 0), (500, 20))
    wide.save(tmp_path / "wide.jpg", quality=95)
    rows = [("wide.jpg", "a", "10,20,310,240"), (things / "0-1.jpg", "a", "")]
    rows += [("wide.jpg", "b", "500,20,800,240"), (things / "0-2.jpg", "b", "")]
    table = write_table(tmp_path / "photos.csv", rows, ("path", "label", "box"))
    found = label(table, tmp_path / "labels.csv", workers=0, **FEW)
    assert [photo.label for photo in found.photos] == ["a", "a", "", ""]
    assert read_table(found.file)[0]["box"] == "10,20,310,240"
    assert read_table(found.file)[0]["path"] == "wide.jpg"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inliers": 3}, "`inliers` must be greater than or equal to 4, not 3"),
        ({"features": 5000}, "`features` must be less than or equal to 951"),
        ({"inlierz": 9}, "unknown setting 'inlierz'"),
        ({"split": "nowhere"}, "no photo has the split 'nowhere'"),
    ],
)
def test_bad_settings_are_errors(mixed, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        label(mixed, tmp_path / "labels.csv", **arguments)


def test_bad_places_are_errors(mixed, things, tmp_path):
    with pytest.raises(InputError, match=r"must end with \.csv"):
        label(mixed, tmp_path / "labels")
    with pytest.raises(InputError, match="does not exist"):
        label(mixed, tmp_path / "nowhere" / "labels.csv")
    with pytest.raises(InputError, match="no such file"):
        label(tmp_path / "none.csv", tmp_path / "labels.csv")
    with pytest.raises(InputError, match="have no labels"):
        label(read_images(things), tmp_path / "labels.csv", labels=True)
    bad = write_table(tmp_path / "bad.csv", [("no.jpg", "a"), ("no2.jpg", "a")])
    with pytest.raises(InputError, match="none of the 2 photos can be read"):
        label(bad, tmp_path / "labels.csv", workers=0)


def test_every_photo_gets_its_partners_and_no_pair_comes_twice():
    labels = np.repeat([0, 1, 2], [5, 40, 1])
    rounds = list(class_rounds(labels, np.arange(46), 10, seed=3))
    pairs = np.concatenate(rounds)
    assert len(rounds) == 5
    assert (labels[pairs[:, 0]] == labels[pairs[:, 1]]).all()
    assert len({tuple(sorted(pair)) for pair in pairs.tolist()}) == len(pairs)
    partners = np.bincount(pairs.ravel(), minlength=46)
    assert (partners[:5] == 4).all()  # all pairs of a small class
    assert (partners[5:45] == 10).all()
    other = np.concatenate(list(class_rounds(labels, np.arange(46), 10, seed=4)))
    assert not np.array_equal(pairs, other)


def test_a_single_weak_match_does_not_join_two_large_groups():
    links = [(0, 1), (1, 2), (3, 4), (4, 5)]
    inliers = [30] * 4

    def count(*more):
        pairs = np.array(links + [pair for pair, _ in more])
        found = Groups(8, pairs, np.array(inliers + [number for _, number in more]), strong=16)
        return len(set(found.roots().tolist())), found.doubtful.tolist()

    assert count() == (4, [])
    assert count(((2, 3), 9)) == (4, [[2, 3]])
    assert count(((2, 3), 16)) == (3, [])
    assert count(((2, 3), 9), ((0, 5), 8)) == (3, [])
    assert count(((2, 6), 8)) == (3, [])  # a single photo is added
    assert count(((6, 7), 8), ((7, 3), 8)) == (2, [])  # and so is a pair


def stamped(thing, number, size=(300, 220)):
    """A view with a watermark across it and a banner below it, as photo agencies add them."""
    mark = texture(77, (400, 300)).crop((0, 0, 70, 36))
    photo = Image.new("RGB", (size[0], size[1] + 20))
    photo.paste(view(thing, number, size), (0, 0))
    photo.paste(mark, ((size[0] - 70) // 2, size[1] // 2))
    photo.paste(texture(78, (400, 300)).crop((0, 0, 120, 20)), (0, size[1]))
    return photo


def test_watermarks_do_not_match(tmp_path):
    for name, photo in {
        "0": stamped(0, 0),
        "1": stamped(1, 0),
        "tall": stamped(2, 0, (300, 290)),
        "3": stamped(3, 0),
        "3-same": stamped(3, 1),
        "3-burst": stamped(3, 0).transform((300, 240), Image.Transform.AFFINE, (1, 0, 2, 0, 1, 1)),
    }.items():
        photo.save(tmp_path / f"{name}.png")
    rows = [(f"{name}.png", "all") for name in ("0", "1", "tall", "3", "3-same", "3-burst")]
    found = label(write_table(tmp_path / "photos.csv", rows), tmp_path / "labels.csv", workers=0)
    assert set(short(found.file)) == {"3.png", "3-same.png", "3-burst.png"}
    one, two = (hessian_affine(stamped(thing, 0), 700) for thing in (0, 1))
    assert verify(one, two).inliers >= 8  # without the rule they would match


def test_damaged_work_is_computed_again(things, tmp_path):
    rows = [(things / f"{name}.jpg", "tower") for name in ("0-0", "0-1", "4-0")]
    table = write_table(tmp_path / "photos.csv", rows)

    def run():
        return label(table, tmp_path / "labels.csv", workers=0, keep_work=True, **FEW)

    found = run()
    work = tmp_path / "labels.csv.partial"
    with closing(sqlite3.connect(work / "matches.sqlite")) as database:
        database.execute("UPDATE pairs SET inliers = 500")
        database.commit()
    assert run().photos == found.photos
    part = work / "features.sqlite"
    content = part.read_bytes()
    part.write_bytes(content.replace(b"listwise", b"listwase", 1))  # in the header
    assert run().photos == found.photos
    with closing(sqlite3.connect(part)) as database:
        (code,) = database.execute("SELECT code FROM photos WHERE row = 2").fetchone()
    place = content.index(code[:64])  # the features of the last photo
    part.write_bytes(content[:place] + b"????" + content[place + 4 :])
    (work / "matches.sqlite").unlink()
    with pytest.raises(InputError, match="is damaged"):
        run()
