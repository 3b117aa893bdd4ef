"""Load models: a model folder, an ONNX file, a timm backbone by name, or a released file."""

from pathlib import Path

from torch import nn

from listwise.descriptors.hub import PREFIX, download
from listwise.descriptors.model import Model, on_device
from listwise.descriptors.onnx_file import SUFFIX, read_onnx
from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.backbone import check_backbone
from listwise.models.storage import MODEL_FILE, ModelFile, model_path, read_model
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

    The file of a model contains a checksum, and is refused if it has changed since it was saved.

    Args:
        source: a model folder or its `model.safetensors`, a run folder of `listwise train`, an
            ONNX file of `Model.export`, which onnxruntime runs on the CPU, `hub:owner/name` (or
            `hub:owner/name@revision`) for a model on the Hugging Face Hub, or the name of a timm
            backbone, which is loaded with its released weights and GeM pooling by default.
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
        if device not in ("auto", "cpu"):
            raise InputError(
                f"{folder} runs on the CPU: leave out `device`, or use the model's folder"
            )
        net, white, info = read_onnx(folder)
        return Model(net, white, folder.absolute(), "", info.calibration, info.tuned)
    if not folder.exists() and folder.name == str(source):
        if backbone is not None:
            raise InputError("`backbone` is for a model folder: leave it out for a timm backbone")
        return _off_the_shelf(str(source), weights, pooling or "gem", device)
    folder = find_model_folder(folder)
    _refuse_unused(folder, weights=weights != "auto")
    if isinstance(pooling, str):
        raise InputError(f"{folder} has its own pooling: leave `pooling` out")
    return load_folder(folder, device, backbone=backbone, pooling=pooling)


def load_folder(
    folder: str | Path,
    device: str = "auto",
    *,
    backbone: nn.Module | None = None,
    pooling: nn.Module | None = None,
) -> Model:
    """Load the model of a model folder or of a run; the arguments are those of `load_model`."""
    folder, machine = find_model_folder(folder), Machine.detect(device)
    content = read_model(folder)
    net = RetrievalNet.of_file(content, model_path(folder), backbone=backbone, pooling=pooling)
    on_device(net, machine.device)
    return Model(
        net,
        stored_whitening(content),
        folder.absolute(),
        calibration=content.info.calibration,
        tuned=content.info.tuned,
    )


def stored_whitening(content: ModelFile) -> Whitening | None:
    """Return the whitening in the file of a model."""
    if content.whitening is None or content.info.whitening is None:
        return None
    return Whitening(*content.whitening, content.info.whitening)


def _refuse_unused(source: Path, **given: object) -> None:
    """Refuse arguments that the files of a model determine."""
    for name, value in given.items():
        if value:
            raise InputError(f"{source} has its own {name}: leave `{name}` out")


def find_model_folder(folder: str | Path) -> Path:
    """Return the folder of a model, its run, or of its file `model.safetensors`.

    A file with another name that ends with .safetensors is returned as it is.
    """
    folder = Path(folder).expanduser()
    if folder.name == MODEL_FILE and not folder.is_dir():
        return folder.parent
    run = not model_path(folder).exists() and (folder / "model" / MODEL_FILE).exists()
    return folder / "model" if run else folder


def _off_the_shelf(name: str, weights: str | Path, pooling: str | nn.Module, device: str) -> Model:
    try:
        check_backbone(name)
    except InputError as error:
        raise InputError(f"no model folder {name}, and {error}") from None
    machine = Machine.detect(device)
    try:
        net = RetrievalNet(name, pooling, weights=weights).eval()
    except MissingWeightsError as error:
        raise InputError(f"{error.reason}; {error.advice_for_model}") from error
    # The name alone identifies the model only with the default weights and pooling.
    default = weights == "auto" and pooling == "gem"
    on_device(net, machine.device)
    return Model(net, name=name if default else "")
