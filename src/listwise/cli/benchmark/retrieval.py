"""`listwise benchmark evaluation | search | server | local | rerank | export`: retrieval."""

from functools import partial
from pathlib import Path
from typing import Annotated

from listwise.cli import options
from listwise.cli.benchmark.show import AsJsonLines, Methods, parse_methods, show

EVALUATION = "Example:\n  listwise benchmark evaluation --sizes 100000 --json"
SEARCH = """Examples:
  listwise benchmark search --sizes 100000 --json
  listwise benchmark search --sizes 1000000 --methods "listwise, compressed"
"""
SERVER = "Example:\n  listwise benchmark server --clients 64,512 --photos 5000"
EXPORT = "Example:\n  listwise benchmark export --backbone resnet50 --side 224"
LOCAL = "Example:\n  listwise benchmark local --photos 1000 --json"
RERANK = "Example:\n  listwise benchmark rerank runs/a/model roxford5k --queries 20"

Sizes = Annotated[
    str, options.numbers("Numbers of descriptors in the database, separated by commas.")
]
Dim = Annotated[int, options.integer("Dimensions of a descriptor.", min=1)]
Folder = Annotated[
    Path | None,
    options.path(
        "Folder for temporary files: up to 20 GB for a million descriptors.",
        exists=True,
        show_default="a temporary folder of the system",
    ),
]


def evaluation(
    sizes: Sizes = "100000,1000000",
    dim: Dim = 2048,
    folder: Folder = None,
    json: AsJsonLines = False,
) -> None:
    """Measure evaluation with distractors: counting ranks and sorting all scores."""
    from listwise.benchmarks import evaluation as benchmark

    counts = options.parse_numbers(sizes, "sizes", int)
    title = f"{benchmark.QUERIES} queries, C = {dim}, files in the page cache"
    show(title, benchmark.COLUMNS, partial(benchmark.run, counts, dim, folder), json)


def search(
    sizes: Sizes = "100000,1000000",
    dim: Dim = 2048,
    folder: Folder = None,
    methods: Methods = None,
    json: AsJsonLines = False,
) -> None:
    """Measure search in an index and in FAISS, hnswlib and LanceDB.

    By default, hnswlib and LanceDB are left out for 200,000 descriptors or more.
    """
    from listwise.benchmarks import search as benchmark

    counts, chosen = options.parse_numbers(sizes, "sizes", int), parse_methods(methods)
    title = f"The ten nearest of {benchmark.QUERIES} queries, C = {dim}"
    show(title, benchmark.COLUMNS, partial(benchmark.run, counts, dim, folder, chosen), json)


def server(
    clients: Annotated[
        str, options.numbers("Numbers of simultaneous clients, separated by commas.")
    ] = "1,8,64,512",
    photos: Annotated[int, options.integer("Number of photos in the index.", min=1)] = 200,
    seconds: Annotated[float, options.decimal("Seconds per number of clients.", min=0.1)] = 10.0,
    json: AsJsonLines = False,
) -> None:
    """Measure search by photo through a server, with clients on the same machine."""
    from listwise.benchmarks import server as benchmark

    counts = options.parse_numbers(clients, "clients", int)
    title = f"Search by photo among {photos:,} photos through the server, on the same cores"
    run = partial(benchmark.run, counts, photos, seconds=seconds)
    show(title, benchmark.COLUMNS, run, json)


def local(
    photos: Annotated[int, options.integer("Number of photos in the index.", min=20)] = 5000,
    features: Annotated[int, options.integer("Local features per photo.", min=1)] = 2000,
    words: Annotated[int, options.integer("Number of visual words.", min=2)] = 65_536,
    folder: Folder = None,
    json: AsJsonLines = False,
) -> None:
    """Measure search by local features, and the same steps in the package asmk."""
    from listwise.benchmarks import local as benchmark

    title = f"{photos:,} photos of {features} features, {words:,} words"
    show(title, benchmark.COLUMNS, partial(benchmark.run, photos, features, words, folder), json)


def rerank(
    model: options.Model,
    benchmark: Annotated[
        str, options.argument("BENCHMARK", "Name or folder of a data set with judged queries.")
    ],
    data: options.Data = None,
    max_side: options.MaxSide = None,
    queries: Annotated[
        int | None,
        options.integer("Number of queries, evenly spread.", min=1, show_default="all"),
    ] = None,
    json: AsJsonLines = False,
) -> None:
    """Measure re-ranking with stored and with newly computed local features on a benchmark."""
    from listwise.optional import requires

    with requires("local", "re-ranking"):
        from listwise.benchmarks import rerank as measured

    run = partial(measured.run, model, benchmark, data, max_side, queries)
    show(f"The first results of {benchmark}, mAP", measured.COLUMNS, run, json)


def export(
    backbone: Annotated[
        str, options.text("Name of a timm model; its weights are random.")
    ] = "resnet50",
    photos: Annotated[int, options.integer("Number of photos per round.", min=1)] = 32,
    side: Annotated[
        int, options.integer("Width and height of the photos, in pixels.", min=32)
    ] = 224,
    rounds: Annotated[int, options.integer("Number of measurements per method.", min=1)] = 5,
    json: AsJsonLines = False,
) -> None:
    """Measure a network on the CPU in PyTorch and in ONNX files, in float32 and int8."""
    from listwise.benchmarks import export as benchmark

    title = "Descriptors on the CPU, without decoding"
    show(title, benchmark.COLUMNS, partial(benchmark.run, backbone, photos, side, rounds), json)
