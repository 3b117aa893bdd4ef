import json

import pytest
import torch

from listwise.descriptors import load_model
from listwise.models import RetrievalNet


@pytest.fixture
def listwise(listwise, tmp_path, photos):
    """Run the command line in a folder with a model and photos; gives code, stdout and stderr."""
    (tmp_path / "photos").symlink_to(photos)
    torch.manual_seed(1)
    RetrievalNet("test_resnet.r160_in1k", weights="random").save("model")
    return listwise


def test_the_table_shows_what_was_kept_and_what_it_costs(listwise):
    code, out, err = listwise("tune", "model", "photos", "--device", "cpu", "--workers", 0)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["setting", "value", "mAP", "gain", "cost"]
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "start",
        "scales",
        "GeM power",
        "whitening",
        "αQE",
    ]
    settings = load_model("model", "cpu").tuned
    assert "kept" in lines[2]
    assert lines[2].split()[1] == ",".join(f"{scale:g}" for scale in settings.scales)
    assert "(48 photos of 8 classes), time of the network" in lines[6]
    assert "ms per photo" in lines[6]
    assert lines[7] == "the settings are stored in model"
    code, out, _ = listwise("extract", "model", "photos", "out.parquet", "--json")
    assert code == 0
    assert json.loads(out)["settings"]["scales"] == list(settings.scales)


def test_json_has_the_settings(listwise):
    code, out, _ = listwise("tune", "model", "photos", "--max-cost", 1, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["validation_map"] >= answer["start_map"]
    assert answer["changed"] == any(step["taken"] for step in answer["steps"])
    assert (answer["settings"] is not None) == answer["changed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", "nowhere"), "no such file or folder"),
        (("nothing", "photos"), "no model folder"),
        (("model", "photos/class1"), "label"),
    ],
)
def test_mistakes_are_one_line(listwise, arguments, message):
    code, _, err = listwise("tune", *arguments)
    assert code == 2
    assert err.startswith("listwise: ")
    assert err.count("\n") == 1
    assert message in err
