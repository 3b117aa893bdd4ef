"""Labels of unusual photos, files and folders: each is handled or reported before the work."""

from label_examples import write_table
from PIL import Image

from listwise.labeling import label


def test_photos_without_features_are_dropped(things, tmp_path):
    for name in ("gray", "white"):
        Image.new("RGB", (200, 150), name).save(tmp_path / f"{name}.png")
    rows = [(things / f"0-{i}.jpg", "tower") for i in range(3)]
    rows += [(tmp_path / f"{name}.png", "tower") for name in ("gray", "white")]
    table = write_table(tmp_path / "all.csv", rows)
    found = label(table, tmp_path / "labels.csv", workers=0)
    assert [photo.label for photo in found.photos] == ["tower"] * 3 + [""] * 2
    assert [photo.reason for photo in found.photos[3:]] == ["no match"] * 2


def test_a_second_run_in_the_same_process_reads_its_own_features(things, tmp_path):
    def run(numbers):
        rows = [(things / f"{i}.jpg", "tower") for i in numbers]
        return label(write_table(tmp_path / "all.csv", rows), tmp_path / "labels.csv", workers=0)

    assert run(["0-0", "1-0", "2-0"]).summary()["kept"] == 0
    assert run(["0-0", "0-1", "0-2"]).summary()["kept"] == 3
