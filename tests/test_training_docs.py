"""What the guides on data and training say is so."""

import re
from pathlib import Path

import pytest
import yaml

from listwise.data import read_labelled
from listwise.settings import NESTED, TrainConfig, make_config

DOCS = Path(__file__).parents[1] / "docs"


def blocks(name, kind):
    found = re.findall(
        r"^```(\w*)\n(.*?)^```$", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE
    )
    return [text for language, text in found if language == kind]


@pytest.mark.parametrize("name", ["training.md", "training-losses.md", "data.md"])
def test_flags_and_settings_exist(name):
    text = (DOCS / name).read_text()
    flags = {name.replace("_", "-") for name in TrainConfig.model_fields if name not in NESTED}
    for group, model in NESTED.items():
        flags |= {f"{group}-{name}".replace("_", "-") for name in model.model_fields}
    flags |= {"no-class-weights", "run-folder", "resume", "preset", "config", "json", "help"}
    outside = {"nproc-per-node", "logdir", "shm-size"}  # of torchrun, tensorboard and docker
    # of listwise whiten and evaluate
    outside |= {"dim", "dims", "levels", "max-side", "power", "shrinkage", "split"}
    assert set(re.findall(r"--([a-z][a-z-]+)", text)) <= flags | outside
    for block in blocks(name, "yaml"):
        make_config(yaml.safe_load(block), name)


def test_the_data_guide(photos, tmp_path, monkeypatch):
    table, levels = blocks("data.md", "csv")
    (tmp_path / "labels.csv").write_text(table)
    images = read_labelled(tmp_path / "labels.csv")
    assert images.class_names == ("eiffel_tower", "louvre")
    assert images.boxes == (None, (120, 40, 560, 700), None, None)
    (tmp_path / "levels.csv").write_text(levels)
    assert read_labelled(tmp_path / "levels.csv").class_names == ("bird/sparrow", "bird/wren")
    listed = [block for block in blocks("data.md", "") if "\t" in block]
    (tmp_path / "list.txt").write_text(listed[0])
    assert read_labelled(tmp_path / "list.txt").class_names == ("eiffel_tower", "louvre")
    monkeypatch.chdir(photos.parent)
    names: dict[str, object] = {}
    for code in blocks("data.md", "python"):
        exec(code, names)


def test_the_training_guide(photos, tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    limited, read, train, own = blocks("training.md", "python")
    assert "minutes=10" in limited  # takes minutes
    quick = '"updates": 20'
    small = {"backbone": "test_resnet.r160_in1k", "weights": "random", "updates": 2, "workers": 0}
    assert quick in train
    names = {"__name__": "guide"}
    exec(train.replace(f"{{{quick}}}", repr(small | {"device": "cpu"})), names)
    assert "at update" in capsys.readouterr().out
    (tmp_path / "runs" / "photos").symlink_to(tmp_path / "runs" / "from-python")
    exec(read, {})
    assert capsys.readouterr().out.startswith("0 ")
    options = repr(small | {"device": "cpu"})[1:-1]
    assert quick in own
    exec(own.replace(quick, options), names)
    assert names["trainer"].progress.update == 2
    assert names["trainer"].plan.config.loss == "custom:guide.pairwise_loss"
