import csv
import shutil

import numpy as np
import pytest

from listwise.data import ImageError, read_labelled
from listwise.errors import InputError
from listwise.settings import TrainConfig
from listwise.training import Trainer
from listwise.training.plan import prepare


def write_table(path, photos, split_of, box=None):
    images = read_labelled(photos)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split", "box"])
        for name, label in zip(images.paths, images.labels, strict=True):
            writer.writerow([name, f"c{label}", split_of(int(label)), box or ""])
    return path


def test_classes_are_held_out_by_seed(photos):
    plan = prepare(photos, {"val_fraction": 0.4})
    assert len(plan.validation.class_names) == 3
    assert len(plan.train) + len(plan.validation) == 48
    assert not set(plan.train.class_names) & set(plan.validation.class_names)
    assert prepare(photos, {"val_fraction": 0.4}).fingerprint() == plan.fingerprint()
    others = [prepare(photos, {"val_fraction": 0.4, "seed": seed}) for seed in range(1, 4)]
    assert len({plan.fingerprint(), *(other.fingerprint() for other in others)}) > 1


def test_a_split_column_decides(photos, tmp_path):
    table = write_table(tmp_path / "t.csv", photos, lambda k: "val" if k > 4 else "train")
    plan = prepare(table, {})
    assert plan.validation.class_names == ("c5", "c6", "c7")
    assert plan.train.class_names == ("c0", "c1", "c2", "c3", "c4")


def test_a_class_in_both_splits_is_refused(photos, tmp_path):
    turn = iter(range(48))
    table = write_table(
        tmp_path / "t.csv", photos, lambda k: "val" if next(turn) % 6 == 0 else "train"
    )
    with pytest.raises(InputError, match="class 'c0' is in both splits"):
        prepare(table, {})


def test_without_a_val_split_classes_of_train_are_held_out(photos, tmp_path):
    table = write_table(tmp_path / "t.csv", photos, lambda k: "test" if k > 4 else "train")
    plan = prepare(table, {})
    used = set(plan.train.class_names) | set(plan.validation.class_names)
    assert used == {"c0", "c1", "c2", "c3", "c4"}
    assert len(plan.validation.class_names) == 2


def test_a_missing_train_split_is_named(photos, tmp_path):
    table = write_table(tmp_path / "t.csv", photos, lambda k: "test" if k > 4 else "learn")
    with pytest.raises(InputError, match="'train'; the splits are: learn, test"):
        prepare(table, {})


def test_validation_of_single_photos_is_refused(photos, tmp_path):
    images = read_labelled(photos)
    lines = [f"{p},c{k},train" for p, k in zip(images.paths, images.labels, strict=True)]
    lines += [f"{images.paths[0]},x,val", f"{images.paths[1]},y,val"]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *lines]))
    with pytest.raises(InputError, match="validation needs at least one class"):
        prepare(tmp_path / "t.csv", {})


def test_one_class_to_train_on_is_refused(photos, tmp_path):
    table = write_table(tmp_path / "t.csv", photos, lambda k: "val" if k else "train")
    with pytest.raises(InputError, match="at least two classes with two or more photos, found 1"):
        prepare(table, {})


def test_the_paper_preset_is_the_paper_but_for_what_there_is_not(photos):
    plan = prepare(photos, {"device": "cpu"}, preset="paper")
    expected = TrainConfig().model_dump() | {
        "batch_size": len(plan.train),
        "device": "cpu",
        "workers": plan.config.workers,
    }
    assert plan.config.model_dump() == expected
    assert plan.reasons == {}
    (note,) = plan.notes
    assert "4096" in note
    assert str(len(plan.train)) in note


def test_given_settings_stand_with_either_preset(photos):
    given = {"batch_size": 10, "crops": {"flip": 0.5}, "workers": 0, "device": "cpu"}
    for preset in ("auto", "paper"):
        plan = prepare(photos, given, preset)
        assert plan.config.batch_size == 10
        assert plan.config.crops.flip == 0.5
        assert plan.config.workers == 0
        assert not plan.notes


def test_numbers_written_as_text_are_numbers(photos):
    given = {"device": "cpu", "batch_size": "16", "crops": {"size": "64"}}
    numbers = {"device": "cpu", "batch_size": 16, "crops": {"size": 64}}
    plan = prepare(photos, given)
    assert plan.config == prepare(photos, numbers).config
    assert plan.config.val_max_side == 128


def test_broken_photos_are_left_out_and_named(photos, tmp_path):
    root = shutil.copytree(photos, tmp_path / "photos")
    (root / "class1" / "9.jpg").write_bytes(b"this is no photo")
    plan = prepare(root, {})
    assert len(plan.train) + len(plan.validation) == 48
    (note,) = plan.notes
    assert note.startswith("skipped 1 photo that cannot be used: ")
    assert str(root / "class1" / "9.jpg") in note
    with pytest.raises(ImageError, match=r"9\.jpg"):
        prepare(root, {"strict": True})


def test_the_fingerprint_knows_names_labels_and_boxes(photos, tmp_path):
    def of(name, **change):
        return prepare(write_table(tmp_path / name, photos, **change), {}).fingerprint()

    plain = of("a.csv", split_of=lambda k: "val" if k > 4 else "train")
    assert of("b.csv", split_of=lambda k: "val" if k > 4 else "train") == plain
    assert of("c.csv", split_of=lambda k: "val" if k > 5 else "train") != plain
    boxed = of("d.csv", split_of=lambda k: "val" if k > 4 else "train", box="0 0 40 40")
    assert boxed != plain


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps"])
def test_a_device_that_is_not_there_is_one_line(photos, device):
    with pytest.raises(InputError, match="device") as caught:
        prepare(photos, {"device": device})
    assert "\n" not in str(caught.value)


def test_no_more_images_and_classes_are_asked_for_than_there_are(photos):
    def bounded(**given):
        plan = prepare(photos, {"val_fraction": 0.4, **given})
        return plan.config, plan.notes

    config, notes = bounded(batch_size=64)
    assert config.batch_size == 30
    assert "every batch has all 30 of them" in notes[0]
    config, notes = bounded(loss="contrastive")
    assert config.contrastive.negatives == 4
    assert "every query has 4" in notes[0]
    config, notes = bounded(loss="triplet", batch_size=64)
    assert config.images_per_update == 192
    assert notes == []


def test_nested_folders_are_levels_of_the_hierarchical_loss(photos, tmp_path):
    nested = tmp_path / "nested"
    for kind in range(8):
        shutil.copytree(photos / f"class{kind}", nested / f"{'abcd'[kind // 2]}/{kind}")
    assert prepare(nested, {"updates": 1, "val_fraction": 0.5}).train.class_names[0] in "abcd"
    given = {"loss": "hierarchical-ap", "updates": 1, "backbone": "test_resnet"}
    plan = prepare(nested, given | {"weights": "random", "batch_size": 4, "val_fraction": 0.25})
    names = plan.train.class_names + plan.validation.class_names
    assert sorted(names) == [f"{'abcd'[kind // 2]}/{kind}" for kind in range(8)]
    trainer = Trainer(plan, tmp_path / "run")
    labels = plan.train.labels
    groups = [name[0] for name in plan.train.class_names]
    for update in range(8):  # two classes: both of one group, unless the other one is held out
        first, second = (groups[k] for k in np.unique(labels[trainer._draw_batch(labels, update)]))
        assert first == second or 1 in (groups.count(first), groups.count(second))
