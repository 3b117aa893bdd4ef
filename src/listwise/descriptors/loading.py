"""Load models: a model folder, an ONNX file, a timm backbone by name, or a released file."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from listwise.data.gpu_photos import prepare_gpu
from listwise.descriptors.hub import PREFIX, download
from listwise.descriptors.model import Model
from listwise.descriptors.onnx_file import SUFFIX, read_onnx
from listwise.descriptors.tuned import TunedSettings
from listwise.descriptors.whitening import WHITENING_FILE, Whitening, WhiteningInfo
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.backbone import check_backbone
from listwise.models.calibration import Calibration
from listwise.models.imported import WHITEN_POWER, ImportedModel, import_model
from listwise.models.storage import CONFIG_FILE
from listwise.models.weights import MissingWeightsError


def load_model(
    source: str | Path,
    device: str = "auto",
    *,
    weights: str | Path = "auto",
    backbone: nn.Module | None = None,
    pooling: str | nn.Module | None = None,
) -> Model:
    """Load a model: its network in evaluation mode, its whitening and its tuned settings.

    A model folder contains a fingerprint, and is refused if its files have changed since they were
    saved.

    Args:
        source: a model folder, a run folder of `listwise train`, an ONNX file of `Model.export`,
            which onnxruntime runs on the CPU, `hub:owner/name` (or `hub:owner/name@revision`) for
            a model on the Hugging Face Hub, or the name of a timm backbone, which is loaded with
            its released weights and GeM pooling by default.
        device: "cpu", "cuda", "cuda:1" ...; "auto" uses a GPU if PyTorch finds one.
        weights: weights for a timm backbone: a file, or one of the names that `RetrievalNet` takes.
        backbone: your own backbone module, if the network in the folder was built with one.
        pooling: the name of a pooling for a timm backbone, such as "cls"; or your own pooling
            module, if the network in the folder was built with one.

    Returns:
        The model; `model.encode(photos)` returns float32 [n, model.dim] with unit rows.

    Raises:
        InputError: the folder does not exist, is incomplete, damaged, or of a newer version; or an
            argument does not apply to the source, such as `weights` to a model folder.

    Examples:
        >>> model = listwise.load("resnet50")               # doctest: +SKIP
        >>> model.encode(["a.jpg", "b.jpg"]).shape          # doctest: +SKIP
        (2, 2048)
    """
    if str(source).startswith(PREFIX):
        source = download(str(source))
    folder = Path(source).expanduser()
    if folder.suffix == SUFFIX and not folder.is_dir():
        _refuse_unused(folder, weights=weights != "auto", backbone=backbone, pooling=pooling)
        return _exported(folder, device)
    if not folder.exists() and folder.name == str(source):
        if backbone is not None:
            raise InputError("`backbone` is for a model folder: leave it out for a timm backbone")
        return _off_the_shelf(str(source), weights, pooling or "gem", device)
    folder = find_model_folder(folder)
    _refuse_unused(folder, weights=weights != "auto")
    if isinstance(pooling, str):
        raise InputError(f"{folder} has its own pooling: leave `pooling` out")
    net = load_network(folder, device, backbone=backbone, pooling=pooling)
    has_whitening = (folder / WHITENING_FILE).exists()
    whitening = Whitening.load(folder, net.fingerprint()) if has_whitening else None
    model = Model(net, whitening, folder.absolute(), tuned=TunedSettings.load(folder, net))
    calibration = Calibration.load(folder, model.fingerprint)
    if calibration is None:
        return model  # which remembers its fingerprint
    return replace(model, calibration=calibration)


def _refuse_unused(source: Path, **given: object) -> None:
    """Refuse arguments that the files of a model determine."""
    for name, value in given.items():
        if value:
            raise InputError(f"{source} has its own {name}: leave `{name}` out")


def _exported(file: Path, device: str) -> Model:
    if device not in ("auto", "cpu"):
        raise InputError(f"{file} runs on the CPU: leave out `device`, or use the model's folder")
    net, whitening, info = read_onnx(file)
    model = Model(net, whitening, file.absolute(), tuned=info.tuned)
    known = info.calibration
    return replace(model, calibration=known if known and known.model == model.fingerprint else None)


def find_model_folder(folder: str | Path) -> Path:
    """Return the model folder: `folder` itself, or the one inside it if it is a run folder."""
    folder = Path(folder).expanduser()
    run = not (folder / CONFIG_FILE).exists() and (folder / "model" / CONFIG_FILE).exists()
    return folder / "model" if run else folder


def _off_the_shelf(name: str, weights: str | Path, pooling: str | nn.Module, device: str) -> Model:
    try:
        check_backbone(name)
    except InputError as error:
        raise InputError(f"no model folder {name}, and {error}") from None
    machine = Machine.detect(device)
    prepare_gpu(machine.device)
    try:
        net = RetrievalNet(name, pooling, weights=weights).eval()
    except MissingWeightsError as error:
        raise InputError(f"{error.reason}; {error.advice_for_model}") from error
    # The name alone identifies the model only with the default weights and pooling.
    default = weights == "auto" and pooling == "gem"
    return Model(_on_device(net, machine), name=name if default else "")


def load_network(
    folder: str | Path,
    device: str = "auto",
    *,
    backbone: nn.Module | None = None,
    pooling: nn.Module | None = None,
) -> RetrievalNet:
    """Load the network of a model folder without its whitening, onto a device."""
    machine = Machine.detect(device)
    if (Path(folder) / CONFIG_FILE).exists():
        prepare_gpu(machine.device)
    net = RetrievalNet.load(folder, backbone=backbone, pooling=pooling)
    return _on_device(net, machine)


def _on_device(net: RetrievalNet, machine: Machine) -> RetrievalNet:
    net.to(machine.device)
    if machine.device.startswith("cuda"):
        net.to(memory_format=torch.channels_last)
    return net


def import_to_folder(
    file: str | Path,
    folder: str | Path,
    whitening: str | None = None,
    whiten_power: float = WHITEN_POWER,
) -> ImportedModel:
    """Convert a released checkpoint into a model folder; no code in the file is run.

    Args:
        file: the checkpoint.
        folder: the model folder to write, which must be new or empty.
        whitening: see `import_model`.
        whiten_power: see `import_model`.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: give a new folder")
    model = import_model(file, whitening, whiten_power)
    folder.mkdir(parents=True, exist_ok=True)
    # The network's config is written last: its presence marks a complete folder.
    if model.whitening_mean is not None and model.whitening_projection is not None:
        info = WhiteningInfo(method="imported", power=model.whitening_power)
        learned = Whitening(model.whitening_mean, model.whitening_projection, info)
        learned.save(folder, model.net.fingerprint())
    model.net.save(folder)
    return model
