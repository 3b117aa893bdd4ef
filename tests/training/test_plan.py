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
    # Without a val split, classes of train are held out.
    plan = prepare(write_table(table, photos, lambda k: "test" if k > 4 else "train"), {})
    assert sorted(plan.train.class_names + plan.validation.class_names) == [
        *("c0", "c1", "c2", "c3", "c4")
    ]
    assert len(plan.validation.class_names) == 2


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (lambda number: number % 6 == 0, "class 'c0' is in both splits"),
        (lambda number: number >= 6, "at least two classes with two or more photos, found 1"),
        (lambda number: number == 0, "validation needs at least one class"),
    ],
)
def test_splits_that_cannot_be_trained_on_are_refused(photos, tmp_path, held_out, message):
    """Of 8 classes of 6 photos; in the last case the held-out photo has a class of its own."""
    images = read_labelled(photos)
    single = "one class" in message
    rows = ["path,label,split"]
    for i, (path, label) in enumerate(zip(images.paths, images.labels, strict=True)):
        split = "val" if held_out(i) else "train"
        rows.append(f"{path},{'x' if single and held_out(i) else f'c{label}'},{split}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    with pytest.raises(InputError, match=message):
        prepare(tmp_path / "t.csv", {})


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"adapter": True, "projection": 8}, "leave `projection` out"),
        ({"adapter": True, "lora": 2}, "leave `lora` out"),
        ({"adapter": True, "loss": "triplet"}, "does not work with the mined tuples"),
        ({"teacher": "m", "memory": 9}, "`teacher` does not work with"),
        ({"loss": "triplet", "memory": 5}, "`memory`: the loss triplet is trained on mined tuples"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(photos, given, message):
    with pytest.raises(InputError, match=message) as caught:
        prepare(photos, given)
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
        first, second = (groups[k] for k in np.unique(labels[trainer.parts.batches.draw(update)]))
        assert first == second or 1 in (groups.count(first), groups.count(second))
