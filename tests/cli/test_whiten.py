import json

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_images
from listwise.descriptors import Whitening, extract, load_model
from listwise.models import RetrievalNet


@pytest.fixture
def listwise(listwise, tmp_path, photos):
    """Run the command line in a folder with a model and photos; gives code, stdout and stderr."""
    (tmp_path / "photos").symlink_to(photos)
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save("model")
    return listwise


def described(photos):
    return load_model("model", "cpu").describe(read_images(photos), workers=0).descriptors


def test_from_photos_it_becomes_part_of_the_model(listwise, photos, tmp_path):
    plain = described(photos)
    fixed = ("--dim", 10, "--power", 0.25, "--shrinkage", 0)
    code, out, err = listwise("whiten", "model", "photos", *fixed)
    assert (code, err) == (0, "")
    assert "96 -> 10 dimensions, learned from 48" in out
    expected = Whitening.learn([plain], dim=10).apply(plain)
    np.testing.assert_allclose(described(photos), expected, rtol=0, atol=1e-4)
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert files == ["config.json", "model.safetensors", "whitening.safetensors"]


def test_from_a_descriptor_file_and_again_and_removed(listwise, photos):
    model = load_model("model", "cpu")
    file = extract(model, read_images(photos), "plain.parquet", workers=0)
    code, out, err = listwise("whiten", "model", "plain.parquet", "--power", 0.5, "--json")
    assert code == 0
    assert "the whitening is not validated, because it has no labels" in err
    answer = json.loads(out)
    assert (answer["method"], answer["power"], answer["learned_from"]) == ("pca", 0.5, 48)
    expected = Whitening.learn(file.batches(), power=0.5, shrinkage="ledoit-wolf")
    assert answer["shrinkage"] == expected.info.shrinkage
    assert load_model("model").whitening.fingerprint() == expected.fingerprint()
    assert answer["dim"] == expected.dim
    code, *_ = listwise("whiten", "model", "plain.parquet", "--dim", 5)
    assert code == 0
    assert load_model("model").dim == 5
    code, out, _ = listwise("whiten", "model", "--remove")
    assert code == 0
    assert "no longer whitens" in out
    assert load_model("model").fingerprint == model.fingerprint


def test_an_earlier_whitening_stays_if_none_helps_and_the_message_names_it(
    listwise, photos, tmp_path
):
    for kind in range(8):  # copies of one photo: every list is perfect without a whitening
        (tmp_path / "copies" / str(kind)).mkdir(parents=True)
        content = (photos / f"class{kind}" / "0.jpg").read_bytes()
        for i in range(3):
            (tmp_path / "copies" / str(kind) / f"{i}.jpg").write_bytes(content)
    code, out, err = listwise("whiten", "model", "copies")
    assert code == 0, err
    assert "no whitening is clearly better than none: model is unchanged\n" in out
    fixed = ("--dim", 10, "--power", 0.25, "--shrinkage", 0)
    assert listwise("whiten", "model", "photos", *fixed)[0] == 0
    code, out, err = listwise("whiten", "model", "copies")
    assert code == 0, err
    assert "it keeps its earlier whitening: remove it with --remove" in " ".join(out.split())
    assert load_model("model").dim == 10


def test_supervised_uses_the_labels(listwise, photos, tmp_path):
    code, out, _ = listwise("whiten", "model", "photos", "--supervised", "--dim", 8, "--json")
    assert code == 0
    assert json.loads(out)["method"] == "supervised"
    whitened = described(photos)
    labels = np.arange(48) // 6
    same = labels[:, None] == labels
    scores = whitened @ whitened.T
    np.fill_diagonal(same, False)
    # Learned on these very photos, it must tell their classes apart.
    assert scores[same].mean() > scores[labels[:, None] != labels].mean() + 0.5
    broken = tmp_path / "labels.csv"
    names = [f"photos/class{k}/{i}.jpg,{k}" for k in range(4) for i in range(6)]
    broken.write_text("path,label\nno.jpg,0\n" + "\n".join(names) + "\n")
    code, out, _ = listwise("whiten", "model", broken, "--supervised", "--dim", 3)
    assert code == 0
    assert "skipped 1 photo that cannot be read" in out
    assert load_model("model").dim == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model",), "give the photos to learn from"),
        (("model", "--remove"), "has no whitening"),
        (("model", "photos", "--remove"), "--remove takes only MODEL and --json"),
        (("model", "photos", "--supervised", "--power", "0.5"), "leave it out with --supervised"),
        (("model", "photos", "--dim", "48", "--power", "0", "--shrinkage", "0"), "vary in 47"),
        (("model", "photos", "--dim", "97"), "no whitening of this --dim can be learned"),
        (("nothing", "photos"), "no model folder"),
        (("model", "nowhere"), "no such file or folder"),
        (("model", "other.parquet"), "made by another model"),
        (("model", "white.parquet"), "contains whitened descriptors"),
        (("model", "other.parquet", "--supervised"), "without labels and photos"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(listwise, photos, tmp_path, arguments, message):
    if arguments[1:2] and arguments[1].endswith(".parquet"):
        torch.manual_seed(1)
        RetrievalNet(TINY_NET, weights="random").save("another")
        images = read_images(photos)
        extract(load_model("another", "cpu"), images, "other.parquet", workers=0)
        plain = described(photos)
        net = load_model("model", "cpu").net
        Whitening.learn([plain]).save("model", net.fingerprint())
        extract(load_model("model", "cpu"), images, "white.parquet", workers=0)
        (tmp_path / "model" / "whitening.safetensors").unlink()
    code, _, err = listwise("whiten", *arguments)
    assert code == 2
    assert err.startswith("listwise: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "model" / "whitening.safetensors").exists()


def test_a_network_trained_on_can_be_whitened_again(listwise, photos):
    assert listwise("whiten", "model", "photos", "--dim", 6)[0] == 0
    torch.manual_seed(3)
    RetrievalNet(TINY_NET, weights="random").save("model")
    code, _, err = listwise("extract", "model", "photos", "out.parquet")
    assert code == 2
    assert "run listwise whiten model again" in err
    assert listwise("whiten", "model", "photos", "--dim", 6)[0] == 0
    assert listwise("extract", "model", "photos", "out.parquet")[0] == 0
