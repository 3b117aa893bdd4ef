"""Models in ONNX files: the same descriptors as in PyTorch, and everything else that models do."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from timm.layers import Conv2dSame
from torch import nn

import listwise
from listwise.calibration import Calibration
from listwise.descriptors import Model, Whitening
from listwise.descriptors.exporting import compare
from listwise.descriptors.onnx_file import checksum
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.backbone import create_backbone

pytestmark = pytest.mark.slow

# A model of `tiny_model`, exported as tests of other packages use it.
KEPT = Path(__file__).with_name("version-1.onnx")


def tiny_model() -> Model:
    """A network of two convolutions with a whitening to 6 dimensions; always the same weights."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1)
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for value in (backbone[1].running_mean, backbone[1].bias.data):
            value.normal_()
    random = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    return Model(RetrievalNet(backbone).eval(), Whitening.learn([random], dim=6))


def pixels(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(2)
    return [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


PHOTOS = pixels((64, 48), (40, 97), (64, 48))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Model, Path]:
    """A model with everything that a model may have, and its file."""
    model = tiny_model()
    known = {"source": "photos", "photos": 9, "pairs": 20, "positives": 5}
    fitted = Calibration(slope=9.0, intercept=-5.0, **known)
    model = Model(model.net, model.whitening, calibration=fitted)
    return model, model.export(tmp_path_factory.mktemp("onnx") / "model.onnx", max_side=60)


def test_gives_the_descriptors_of_pytorch(exported):
    model, path = exported
    loaded = listwise.load(path)
    assert (loaded.dim, loaded.folder, loaded.device.type) == (6, path, "cpu")
    for settings in ({}, {"scales": (1.0, 0.6)}, {"max_side": 0}):
        expected = model.encode(PHOTOS, **{"max_side": 60} | settings)
        np.testing.assert_allclose(loaded.encode(PHOTOS, **settings), expected, atol=1e-5)
    assert loaded.fingerprint == model.fingerprint
    assert loaded.calibration == model.calibration
    assert loaded.tuned.max_side == 60


def test_other_programs_get_whitened_descriptors_of_any_shape(exported):
    model, path = exported
    session = onnxruntime.InferenceSession(path)
    assert [each.shape for each in session.get_outputs()] == [["batch", 6], ["batch", 16]]
    for shape in ((1, 3, 33, 50), (3, 3, 70, 40)):
        images = torch.rand(shape, generator=torch.Generator().manual_seed(3))
        found, _ = session.run(None, {"images": images.numpy()})
        expected = model.whitening.apply(model.net(images).detach())
        np.testing.assert_allclose(found, expected, atol=1e-5)
    info = json.loads(session.get_modelmeta().custom_metadata_map["listwise"])
    assert (info["dim"], info["tuned"]["max_side"]) == (6, 60)
    assert info["network"]["mean"] == list(model.net.config.mean)


def test_the_kept_file_has_the_descriptors_of_its_model():
    model = tiny_model()
    loaded = listwise.load(KEPT)
    np.testing.assert_allclose(loaded.encode(PHOTOS), model.encode(PHOTOS), atol=1e-5)
    assert loaded.fingerprint == model.fingerprint


def tensorflow_padding() -> nn.Module:
    """Layers of an EfficientNet-Lite: their padding depends on the size of the photo."""
    return nn.Sequential(
        *(Conv2dSame(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU6()),
        *(Conv2dSame(8, 8, 5, 2, groups=8), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 1)),
    )


FAMILIES = {
    "ResNet": lambda: create_backbone("test_resnet"),
    "TensorFlow's padding": tensorflow_padding,
    "EfficientNet": lambda: create_backbone("test_efficientnet", pad_type="same"),
    "ConvNeXt": lambda: create_backbone("test_convnext", depths=(1, 1, 1, 1)),
    "ViT": lambda: create_backbone("test_vit", depth=1, embed_dim=32, num_heads=2),
}


USUAL = ("TensorFlow's padding",)


@pytest.mark.parametrize(
    "family",
    [
        *USUAL,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES if name not in USUAL),
    ],
)
def test_each_family_of_networks(family, tmp_path):
    torch.manual_seed(0)
    model = Model(RetrievalNet(FAMILIES[family]()).eval())
    model.export(tmp_path / "model.onnx")
    photos = pixels((160, 224), (97, 131), (250, 90))
    found = listwise.load(tmp_path / "model.onnx").encode(photos)
    np.testing.assert_allclose(found, model.encode(photos), atol=1e-4)


def test_int8_is_another_model_with_similar_descriptors(exported, tmp_path):
    model, path = exported
    small = model.export(tmp_path / "small.onnx", max_side=60, int8=PHOTOS)
    kinds = [node.op_type for node in onnx.load(small).graph.node]
    assert kinds.count("DequantizeLinear") > 4
    assert "Relu" not in kinds  # the range of the quantized numbers has no values below zero
    loaded = listwise.load(small)
    expected = listwise.load(path).encode(PHOTOS)
    assert 0.99 < (loaded.encode(PHOTOS) * expected).sum(axis=1).min() < 0.9999999
    assert loaded.fingerprint != model.fingerprint
    assert loaded.calibration is None
    assert loaded.tuned.max_side == 60
    with pytest.raises(InputError, match="`int8` has no photo that can be read"):
        model.export(tmp_path / "none.onnx", int8=[])


def test_a_file_cannot_be_saved_tuned_or_exported_again(exported, photos, tmp_path):
    loaded = listwise.load(exported[1])
    with pytest.raises(
        InputError, match=r"model\.onnx is an ONNX file and cannot be saved as a fol"
    ):
        loaded.save(tmp_path / "folder")
    with pytest.raises(InputError, match="cannot be exported again"):
        loaded.export(tmp_path / "again.onnx")
    with pytest.raises(InputError, match="cannot be tuned: use the model that it was ex"):
        listwise.tune(loaded, photos)
    with pytest.raises(InputError, match="leave out `precision`"):
        loaded.encode(PHOTOS, precision="bfloat16")
    with pytest.raises(InputError, match=r"runs on the CPU: leave out `device`"):
        listwise.load(exported[1], "cuda")
    for name, value in {"weights": "cls", "pooling": "cls", "backbone": nn.Identity()}.items():
        with pytest.raises(InputError, match=rf"has its own {name}: leave `{name}` out"):
            listwise.load(exported[1], **{name: value})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.pt", {}, r"model\.pt must end with \.onnx"),
        ("missing/model.onnx", {}, "cannot write .*the folder .*missing does not exist"),
        ("folder.onnx", {}, "is a folder: give a file such as"),
        ("file", {"web": True}, "is a file: give a folder"),
    ],
)
def test_arguments_that_cannot_be_used(name, options, message, tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=message):
        tiny_model().export(tmp_path / name, **options)
    assert len(list(tmp_path.iterdir())) == 2


class DependsOnValues(nn.Module):
    """A pooling that does different things for different values, which no graph can express."""

    def forward(self, features):
        return features.amax((2, 3)) if features.mean().item() > 0 else features.amin((2, 3))


@pytest.mark.parametrize("pooling", [DependsOnValues(), "rmac"], ids=["values", "rmac"])
def test_a_network_that_cannot_be_exported(pooling, tmp_path):
    model = Model(RetrievalNet(nn.Conv2d(3, 4, 3, 8), pooling).eval())
    with pytest.raises(InputError, match="cannot be exported for images of any size") as error:
        model.export(tmp_path / "model.onnx")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_computes_something_else_is_refused():
    with pytest.raises(InputError, match=r"images of 224 × 224 pixels its descriptors differ by"):
        compare(RetrievalNet(nn.Conv2d(3, 6, 3, 2)).eval(), onnx.load(KEPT))


def damaged(path: Path, kind: str) -> None:
    graph = onnx.load(KEPT)
    settings = json.loads(graph.metadata_props[0].value)
    if kind == "other":
        del graph.metadata_props[:]
    elif kind == "newer":
        settings["format_version"] = 2
    elif kind == "settings":
        settings["dim"] = "many"
    elif kind == "weights":
        weight = next(w for w in graph.graph.initializer if w.name == "whitening.mean")
        weight.raw_data = weight.raw_data[::-1]
    elif kind == "outside":
        weight = graph.graph.initializer[0]
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="../../x")
        del graph.metadata_props[:]
        text = json.dumps(settings)
        whole = {"listwise": text, "listwise.checksum": checksum(graph, text)}
        for key, value in whole.items():
            graph.metadata_props.add(key=key, value=value)
    elif kind == "opset":
        graph.opset_import[0].version = 99
    if graph.metadata_props:
        graph.metadata_props[0].value = json.dumps(settings)
    content = graph.SerializeToString()
    path.write_bytes(b"no protobuf at all" if kind == "bytes" else content)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "no file .*model.onnx: write it with listwise export"),
        ("bytes", "is not an ONNX file, or is damaged"),
        ("other", "is not an ONNX file of Listwise: write one with listwise export MODEL model.on"),
        ("newer", "has the format 2 of a newer Listwise .*pip install --upgrade listwise"),
        ("settings", "its header cannot be read: dim: "),
        ("weights", "is damaged or was edited: it does not match its checksum"),
        ("opset", "is damaged or was edited: it does not match its checksum"),
        ("outside", "is damaged or was edited: it does not match its checksum"),
    ],
)
def test_a_file_that_cannot_be_used(kind, message, tmp_path):
    path = tmp_path / "model.onnx"
    if kind != "missing":
        damaged(path, kind)
    with pytest.raises(InputError, match=message) as error:
        listwise.load(path)
    assert "\n" not in str(error.value)


def test_no_flipped_bit_changes_a_descriptor_unnoticed(tmp_path):
    content, photo = KEPT.read_bytes(), np.random.default_rng(0).integers(0, 256, (64, 64, 3))
    expected = listwise.load(KEPT).encode([photo.astype(np.uint8)])
    path, random = tmp_path / "model.onnx", np.random.default_rng(1)
    refused = 0
    for place in random.integers(0, len(content), 300):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        try:
            found = listwise.load(path).encode([photo.astype(np.uint8)])
        except InputError:
            refused += 1
        else:
            np.testing.assert_array_equal(found, expected)
    assert refused > 290
