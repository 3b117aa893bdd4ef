import argparse
import os
import pickle
import struct
import sys
import types
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from sklearn.decomposition import PCA
from tiny_net import trained
from torch import Tensor

from listwise.data.pickles import read_checkpoint
from listwise.errors import InputError
from listwise.models import RetrievalNet, import_checkpoint
from listwise.models.imported import import_model

pytestmark = pytest.mark.slow  # builds many networks

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@cache
def resnet_state(arch: str) -> Mapping[str, Tensor]:
    """torchvision's ResNet with batch norms that do something, without its classifier."""
    torch.manual_seed(0)
    net = trained(getattr(torchvision.models, arch)(weights=None))
    return {key: value for key, value in net.state_dict().items() if not key.startswith("fc.")}


def plain_map(arch: str) -> Tensor:
    """The feature map of torchvision's own network, in float64."""
    net = getattr(torchvision.models, arch)(weights=None)
    net.load_state_dict(resnet_state(arch), strict=False)
    mean, std = (torch.tensor(each).double().view(3, 1, 1) for each in (MEAN, STD))
    with torch.no_grad():
        layers = torch.nn.Sequential(*list(net.double().eval().children())[:-2])
        return layers((photos().double() / 255 - mean) / std)


def plain_gem(features: Tensor, p: float) -> Tensor:
    return features.clamp(min=1e-6).pow(p).mean(dim=(2, 3)).pow(1 / p)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def photos() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (2, 3, 70, 97), dtype=torch.uint8, generator=generator)


def random_pca(dim: int, seed: int = 0, whiten: bool = True) -> PCA:
    rows = np.random.default_rng(seed).normal(size=(4 * dim, dim)) * np.linspace(0.2, 3, dim)
    return PCA(whiten=whiten, svd_solver="full").fit(rows.astype(np.float32) + 1)


def linear(inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(outputs, inputs, generator=generator) / 10
    return weight, torch.randn(outputs, generator=generator)


def naver_content(arch: str = "resnet18", /, **options: Any) -> dict[str, Any]:
    state = dict(resnet_state(arch))
    weight, bias = linear(2048 if arch == "resnet50" else 512, 24)
    state |= {"fc.weight": weight, "fc.bias": bias, "adpool.p": torch.tensor([2.7])}
    return {
        "current_iter": 296,
        "model_options": {"arch": f"{arch}_rmac", "out_dim": 24, "pooling": "gem"} | options,
        "state_dict": {f"module.{key}": value for key, value in state.items()},
        "pca": {"Landmarks_clean": random_pca(24), "Landmarks_full": random_pca(24, seed=1)},
    }


def cirtorch_content(arch: str = "resnet18", whitening: bool = False, **meta: Any) -> dict:
    names = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}
    state = {}
    for key, value in resnet_state(arch).items():
        part, _, rest = key.partition(".")
        state[f"features.{names[part]}.{rest}"] = value
    state["pool.p"] = torch.tensor([2.9])
    dim = 2048 if arch == "resnet50" else 512
    if whitening:
        state["whiten.weight"], state["whiten.bias"] = linear(dim, dim)
    return {
        "epoch": 30,
        "meta": {
            "architecture": arch,
            "local_whitening": False,
            "pooling": "gem",
            "regional": False,
            "whitening": whitening,
            "mean": list(MEAN),
            "std": list(STD),
            "outputdim": dim,
        }
        | meta,
        "state_dict": state,
    }


def save(content: Any, path: Path, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def descriptors(net: RetrievalNet) -> Tensor:
    with torch.no_grad():
        return net(photos()).double()


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("arch", "zipped"), [("resnet18", True), ("resnet18", False), ("resnet50", False)]
)
def test_naver_equals_a_plain_forward(arch: str, zipped: bool, tmp_path: Path) -> None:
    content = naver_content(arch)
    net = import_checkpoint(save(content, tmp_path / "Resnet-AP-GeM.pt", zipped))
    assert not net.training
    state = {key[7:]: value for key, value in content["state_dict"].items()}
    pooled = plain_gem(plain_map(arch), 2.7)
    wanted = pooled @ state["fc.weight"].double().T + state["fc.bias"].double()
    close(descriptors(net), unit(wanted))


def test_naver_options_change_the_network(tmp_path: Path) -> None:
    content = naver_content(norm_features=True)
    state = {key[7:]: value for key, value in content["state_dict"].items()}
    features = plain_map("resnet18")
    net = import_checkpoint(save(content, tmp_path / "normed.pt"))
    pooled = unit(plain_gem(features, 2.7))
    wanted = pooled @ state["fc.weight"].double().T + state["fc.bias"].double()
    close(descriptors(net), unit(wanted))

    content["model_options"]["without_fc"] = True
    close(descriptors(import_checkpoint(save(content, tmp_path / "b.pt"))), unit(pooled))

    content["model_options"]["pooling"] = "max"
    del content["state_dict"]["module.adpool.p"]
    net = import_checkpoint(save(content, tmp_path / "c.pt"))
    close(descriptors(net), unit(features.amax(dim=(2, 3))))


def test_naver_whitening_is_that_of_its_evaluation(tmp_path: Path) -> None:
    content = naver_content()
    path = save(content, tmp_path / "a.pt")
    model = import_model(path)
    assert model.whitening == "Landmarks_clean"
    assert model.whitenings == ("Landmarks_clean", "Landmarks_full")
    assert "Landmarks_full" in model.notes[0]
    x = np.random.default_rng(3).normal(size=(5, 24))
    for name, power in (("Landmarks_clean", 0.25), ("Landmarks_full", 0.5)):
        pca = content["pca"][name]
        model = import_model(path, name, power)
        assert model.info.power == power
        found = (x - model.parts[0]) @ model.parts[1].T
        wanted = (x - pca.mean_) @ pca.components_.T / pca.explained_variance_**power
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    # At 0.5 it is scikit-learn's own whitening.
    np.testing.assert_allclose(found, pca.transform(x), rtol=1e-4, atol=1e-4)


@FORMATS
def test_pca_of_the_scikit_learn_that_the_authors_used(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("sklearn.decomposition.pca")
    old = type("PCA", (), {"__module__": module.__name__})
    module.PCA = old  # type: ignore[attr-defined]
    new, record = random_pca(24), old()
    record.__dict__.update(new.__dict__)
    content = naver_content() | {"pca": {"Landmarks_clean": record}}
    with monkeypatch.context() as context:
        context.setitem(sys.modules, module.__name__, module)
        path = save(content, tmp_path / "a.pt", zipped)
    model = import_model(path)
    wanted = new.components_ / new.explained_variance_[:, None] ** 0.25
    np.testing.assert_allclose(model.parts[1], wanted, rtol=1e-5)


def test_own_preprocessing_and_half_precision_are_kept(tmp_path: Path) -> None:
    content = naver_content()
    content["preprocess"] = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": 224}
    content["state_dict"] = {
        key: value.half() if value.is_floating_point() else value
        for key, value in content["state_dict"].items()
    }
    net = import_checkpoint(save(content, tmp_path / "a.pt"))
    assert net.config.mean == (0.1, 0.2, 0.3)
    assert net.config.std == (0.4, 0.5, 0.6)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net.config.provenance["weights"] == "a.pt"


@FORMATS
@pytest.mark.parametrize("whitening", [False, True])
def test_cirtorch_equals_a_plain_forward(zipped: bool, whitening: bool, tmp_path: Path) -> None:
    content = cirtorch_content(whitening=whitening)
    net = import_checkpoint(save(content, tmp_path / "a.pth", zipped))
    wanted = unit(plain_gem(plain_map("resnet18"), 2.9))
    if whitening:
        weight, bias = linear(512, 512)
        wanted = unit(wanted @ weight.double().T + bias.double())
    close(descriptors(net), wanted)


def test_cirtorch_learned_whitening(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    learned = {
        name: {
            scale: {"m": generator.normal(size=(512, 1)), "P": generator.normal(size=(512, 512))}
            for scale in ("ss", "ms")
        }
        for name in ("retrieval-SfM-30k", "retrieval-SfM-120k")
    }
    path = save(cirtorch_content(Lw=learned), tmp_path / "a.pth")
    x = generator.normal(size=(3, 512))
    for asked, parts in (
        (None, learned["retrieval-SfM-120k"]["ss"]),
        ("retrieval-SfM-30k/ms", learned["retrieval-SfM-30k"]["ms"]),
    ):
        model = import_model(path, asked)
        assert model.info.power is None
        found = (x - model.parts[0]) @ model.parts[1].T
        wanted = (parts["P"] @ (x.T - parts["m"])).T
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    assert import_model(path, "none").parts is None
    with pytest.raises(InputError, match="no whitening 'other': choose one of retrieval-SfM-30k"):
        import_model(path, "other")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: naver_content() | {"state_dict": {}}, "does not fit|missing"),
        (lambda: naver_content(arch="senet154_rmac"), "'senet154_rmac' is not supported"),
        (lambda: naver_content(center_bias=1.0), "center bias"),
        (lambda: naver_content(pooling="other"), "pooling 'other' is not supported"),
        (lambda: cirtorch_content(architecture="vgg16"), "'vgg16' is not supported"),
        (lambda: cirtorch_content(regional=True), "'regional'"),
        (lambda: cirtorch_content(pooling="rmac"), "'rmac' is not supported"),
        (lambda: cirtorch_content(mean=[1.0]), "preprocessing"),
        (lambda: cirtorch_content(Lw={"a": 3}), "learned whitening"),
        (lambda: naver_content() | {"pca": {"a": {"b": 1}}}, "not a PCA"),
        (lambda: naver_content() | {"pca": random_pca(7)}, "is for 7 dimensions"),
        (lambda: {"weights": 1}, "no state_dict"),
        (lambda: {"state_dict": {"a": torch.ones(1)}}, "neither 'model_options'"),
        (lambda: [1, 2], "no state_dict"),
    ],
)
def test_unsupported_checkpoints_are_reported_in_one_line(
    content, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        import_model(save(content(), tmp_path / "a.pt"))
    assert "\n" not in str(caught.value)
    assert "a.pt" in str(caught.value)


class Evil:
    """Runs a command when it is unpickled the usual way."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = (call, arguments)

    def __reduce__(self) -> Any:
        return self.call


@FORMATS
@pytest.mark.parametrize("call", [os.system, eval, getattr, np.load, torch.load, RetrievalNet.load])
def test_code_is_refused_and_not_run(call: Any, zipped: bool, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = Evil(call, f"touch {marker}" if call is os.system else f"open({str(marker)!r}, 'w')")
    path = save(naver_content() | {"extra": [evil]}, tmp_path / "a.pt", zipped)
    with pytest.raises(InputError, match=r"contains .*\b\w+: only tensors") as caught:
        import_checkpoint(path)
    assert not marker.exists()
    assert "\n" not in str(caught.value)


@FORMATS
def test_hostile_uses_of_such_objects_are_refused(zipped: bool, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = Evil(os.system, f"touch {marker}")
    hostile = [
        argparse.Namespace(a=evil),
        defaultdict(list, {"a": evil}),
        defaultdict(os.getcwd),
        Evil(torch.device, evil),
        Evil(list, "abc"),
        list,
        argparse.Namespace,
        np.random.RandomState,
        np.random.Generator(np.random.PCG64(0)),
    ]
    for value in hostile:
        with pytest.raises(InputError, match=r"contains|not a readable") as caught:
            read_checkpoint(save({"a": value}, tmp_path / "a.pt", zipped))
        assert "\n" not in str(caught.value)
    assert not marker.exists()


def legacy(path: Path, pickled: bytes, storages: bytes = b"") -> Path:
    head = b"".join(
        pickle.dumps(part, protocol=2)
        for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    )
    path.write_bytes(head + pickled + storages)
    return path


@pytest.mark.parametrize(
    "pickled",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n}(S'__call__'\nI1\nub.",  # state for a function
        b"csklearn.decomposition._pca\nPCA\n}(S'real'\nI1\nub.",  # state for a class
        b"ctorch\nFloatStorage\n}(S'dtype'\nI1\nub.",
        b"ccollections\nOrderedDict\n}(S'x'\nI1\nub.",
        b"ccopy_reg\n_reconstructor\n(c__builtin__\nset\nc__builtin__\nobject\nNtR.",
        b"csklearn.decomposition._pca\nPCA\n.",  # a class as a value
        b"c__builtin__\nobject\n.",
        b"(S'storage'\nI1\nS'0'\nS'cpu'\nI4\ntQ.",
        b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI99999999999\ntQ.",  # too large
        b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI-1\ntQ.",
        b"garbage",
        b"",
    ],
)
def test_malformed_pickles_are_refused(pickled: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"contains|not a readable torch checkpoint"):
        read_checkpoint(legacy(tmp_path / "a.pt", pickled, pickle.dumps([], protocol=2)))


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(3, (2,), (1,)), (0, (5,), (1,)), (0, (2,), (9,)), (-1, (2,), (1,)), (0, (10**12,), (0,))],
)
def test_a_tensor_cannot_reach_outside_its_storage(offset, size, stride, tmp_path: Path) -> None:
    def numbers(values) -> bytes:
        return b"(" + b"".join(b"L%dL\n" % value for value in values) + b"t"

    pickled = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\nNtQ"
        + b"I%d\n" % offset
        + numbers(size)
        + numbers(stride)
        + b"I00\nNtR."
    )
    storages = pickle.dumps(["0"], protocol=2) + struct.pack("<q4f", 4, 1, 2, 3, 4)
    with pytest.raises(InputError, match="not a readable torch checkpoint"):
        read_checkpoint(legacy(tmp_path / "a.pt", pickled, storages))


@FORMATS
def test_what_training_runs_save_is_read_as_data(zipped: bool, tmp_path: Path) -> None:
    base, pca = torch.arange(24.0).view(4, 6), random_pca(4)
    pca.random_state = np.random.RandomState(0)
    tensors = {
        "view": base[1:, ::2],
        "turned": base.t(),
        "same": base,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
    }
    plain = {"numbers": (1, 2.5, None, True, {3}, b"x"), "size": (4, 6), "devices": ["cuda:1"]}
    content = {
        **tensors,
        **plain,
        "size": base.shape,
        "devices": [torch.device("cuda:1")],
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "args": argparse.Namespace(lr=0.1, names=["x"], inner=argparse.Namespace(deep=True)),
        "empty args": argparse.Namespace(),
        "counts": defaultdict(list, {"a": [1, 2]}),
        "pca": pca,
    }
    found = read_checkpoint(save(content, tmp_path / "a.pt", zipped))
    assert found.keys() == content.keys()
    for key, value in tensors.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value.detach())
    assert {key: found[key] for key in plain} == plain
    assert found["args"] == {"lr": 0.1, "names": ["x"], "inner": {"deep": True}}
    assert found["empty args"] == {}
    assert (type(found["counts"]), found["counts"]) == (dict, {"a": [1, 2]})
    np.testing.assert_array_equal(found["array"], content["array"])
    np.testing.assert_array_equal(found["pca"]["components_"], pca.components_)


@FORMATS
def test_damage_is_reported_in_one_line(zipped: bool, tmp_path: Path) -> None:
    path = save({"a": torch.ones(1000)}, tmp_path / "a.pt", zipped)
    whole = path.read_bytes()
    for length in (0, 3, 50, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a readable torch checkpoint") as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        read_checkpoint(tmp_path / "none.pt")


def test_an_archive_that_swells_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(10_000_000))
    with pytest.raises(InputError, match="larger than the file"):
        read_checkpoint(path)
