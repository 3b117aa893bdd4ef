"""Training on few classes, on all photos, and on tables with gaps."""

import shutil
from pathlib import Path

import pytest
from training_examples import SETTINGS, Witness

import listwise
from listwise.errors import InputError, ListwiseWarning
from listwise.training import prepare


def some_classes(photos, folder, count, each=6):
    for kind in range(count):
        (folder / f"class{kind}").mkdir(parents=True)
        for path in sorted((photos / f"class{kind}").iterdir())[:each]:
            shutil.copy(path, folder / f"class{kind}")
    return folder


@pytest.mark.parametrize("count", [2, 3])
def test_two_or_three_classes_are_validated_on_other_photos(photos, tmp_path, count):
    folder = some_classes(photos, tmp_path / "few", count)
    plan = prepare(folder, SETTINGS)
    assert plan.train.class_names == plan.validation.class_names
    assert not set(plan.train.ids) & set(plan.validation.ids)
    assert len(plan.train) + len(plan.validation) == 6 * count
    (note,) = [note for note in plan.notes if "too high" in note]
    assert "other photos of the training classes, because there are fewer than 4" in note
    run = listwise.train(folder, tmp_path / "run", **SETTINGS)
    assert run.result.updates == 6


def test_classes_that_are_too_small_are_refused(photos, tmp_path):
    folder = some_classes(photos, tmp_path / "few", 3, each=3)
    with pytest.raises(InputError, match=r"2 classes of four or more, but there are 3 and 0"):
        prepare(folder, SETTINGS)


def test_no_photos_are_held_out_if_the_fraction_is_zero(photos, tmp_path):
    view = Witness()
    run = listwise.train(photos, tmp_path / "run", view=view, **SETTINGS | {"val_fraction": 0})
    plan = prepare(photos, SETTINGS | {"val_fraction": 0})
    assert (len(plan.train), len(plan.validation)) == (48, 12)
    assert any("photos that are trained on" in note for note in plan.notes)
    assert run.result.updates == 6
    assert run.model.calibration is None
    assert run.model.tuned.source == f"training photos of {Path(photos).resolve()}"


def test_rows_without_a_label_are_ignored_and_counted(photos, tmp_path):
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.rglob("*.jpg"))]
    for place in (3, 10, 20):
        rows[place] = rows[place].partition(",")[0] + ", "
    table = tmp_path / "photos.csv"
    table.write_text("\n".join(["path,label", *rows]))
    with pytest.warns(ListwiseWarning, match=r"photos\.csv: ignored 3 photos without a label"):
        plan = prepare(table, SETTINGS)
    assert len(plan.train) + len(plan.validation) == 45
    listed = tmp_path / "photos.txt"
    listed.write_text("\n".join(row.replace(",", "\t") for row in rows))
    with pytest.warns(ListwiseWarning, match=r"photos\.txt: ignored 3 photos without a label"):
        assert prepare(listed, SETTINGS).fingerprint()


def test_a_missing_file_is_named_instead_of_the_classes(photos, tmp_path):
    paths = sorted(photos.rglob("*.jpg"))[:12]
    rows = [f"{path},{path.parent.name}" for path in paths[:6]]
    rows += [f"gone{number}.jpg,gone" for number in range(3)]
    table = tmp_path / "photos.csv"
    table.write_text("\n".join(["path,label", *rows]))
    with pytest.raises(InputError, match=r"^skipped 3 photos that cannot be used: .*gone0\.jpg"):
        prepare(table, SETTINGS)
