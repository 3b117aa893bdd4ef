"""`listwise export`, and the commands that take its file."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_net import TINY_NET

from listwise.descriptors import Model, load_model
from listwise.models import RetrievalNet

KEPT = Path(__file__).parents[1] / "descriptors" / "version-1.onnx"


@pytest.fixture
def model(tmp_path) -> str:
    Model(RetrievalNet(TINY_NET, weights="random")).save(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.slow
def test_writes_a_file_that_the_other_commands_read(listwise, model, photos, tmp_path):
    code, out, err = listwise("export", model, "model.onnx", "--max-side", "64", "--json")
    assert code == 0, err
    facts = json.loads(out)
    size = (tmp_path / "model.onnx").stat().st_size
    assert (facts["dim"], facts["bytes"], facts["precision"]) == (96, size, "float32")
    code, out, err = listwise("evaluate", "model.onnx", photos)
    assert code == 0, err
    assert "mAP" in out
    some = sorted(photos.rglob("*.jpg"))[:4]
    expected = load_model(model).encode(some, max_side=64)
    found = load_model(tmp_path / "model.onnx").encode(some)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_index_and_search_with_a_file(listwise, photos):
    code, _, err = listwise("index", "build", "shop", photos / "class0", "--model", KEPT)
    assert code == 0, err
    code, out, err = listwise("search", "shop", photos / "class0" / "2.jpg", "-k", "1", "--json")
    assert code == 0, err
    assert "2.jpg" in out


def test_bad_input_is_one_line(listwise, model, photos):
    Image.new("RGB", (9, 9)).save("photo.onnx", "png")
    for arguments, message in {
        ("export", model, "model.pt"): "model.pt must end with .onnx: give a file such as",
        ("export", model, "no/model.onnx"): "the folder no does not exist",
        ("export", model, "m.onnx", "--opset", 7): "--opset must be from 18 to 23, not 7",
        ("export", "nothing", "m.onnx"): "no model folder nothing",
        ("export", KEPT, "m.onnx"): "is an ONNX file and cannot be exported again",
        ("evaluate", "photo.onnx", photos): "photo.onnx is not an ONNX file, or is damaged",
        ("whiten", KEPT, photos): "no model folder",
    }.items():
        code, _, err = listwise(*arguments)
        assert code == 2, arguments
        assert message in err
        assert err.count("\n") == 1
