"""`listwise benchmark loss | step | input | extraction`: benchmarks of training."""

from pathlib import Path
from typing import Annotated

from listwise.cli import options
from listwise.cli.benchmark.show import AsJsonLines, Methods, parse_methods, show

LOSS = "Example:\n  listwise benchmark loss --sizes 256,1024,4096 --json"
STEP = "Example:\n  listwise benchmark step --backbone resnet50 --size 224 --batch 1024"
INPUT = "Example:\n  listwise benchmark input --photos 64 --size 224"
EXTRACTION = "Example:\n  listwise benchmark extraction --photos 64 --backbone resnet50"

Backbone = Annotated[str, options.text("Name of a timm model.")]
Photos = Annotated[int, options.integer("Number of JPEG photos to create.", min=1)]
CropSize = Annotated[int, options.integer("Side of the square crops, in pixels.", min=32)]


def loss(
    sizes: Annotated[
        str, options.numbers("Batch sizes, separated by commas.")
    ] = "256,512,1024,2048,4096,8192,16384",
    dim: Annotated[int, options.integer("Dimensions of a descriptor.", min=1)] = 2048,
    methods: Methods = None,
    device: options.Device = "auto",
    json: AsJsonLines = False,
) -> None:
    """Measure forward and backward of the AP loss and of other losses."""
    from listwise.benchmarks import loss as benchmark
    from listwise.machine import Machine

    batches = options.parse_numbers(sizes, "sizes", int)
    chosen = parse_methods(methods)
    place, title = Machine.detect(device).device, f"Forward + backward, C = {dim}, M = 20"
    show(title, benchmark.COLUMNS, benchmark.run(batches, dim, chosen, place), json)


def step(
    backbone: Backbone = "resnet101",
    size: CropSize = 800,
    batch: Annotated[int, options.integer("Images per step.", min=32)] = 4096,
    micro_batch: Annotated[
        int, options.integer("Images whose activations are in memory together.", min=1)
    ] = 128,
    device: options.Device = "auto",
    json: AsJsonLines = False,
) -> None:
    """Measure a training step: image by image, in micro-batches, folded, compiled."""
    from listwise.benchmarks import step as benchmark

    title = f"Step of {batch} images, {backbone}, {size} × {size}"
    rows = benchmark.run(device, backbone, size, batch, micro_batch)
    show(title, benchmark.COLUMNS, rows, json)


def input_side(
    photos: Photos = 256,
    size: CropSize = 800,
    folder: Annotated[
        Path | None, options.path("Folder of photos to use instead of created ones.", exists=True)
    ] = None,
    device: options.Device = "auto",
    json: AsJsonLines = False,
) -> None:
    """Measure how many crops per second one core, all cores and a GPU produce."""
    from listwise.benchmarks import input as benchmark
    from listwise.machine import Machine

    place = Machine.detect(device).device
    rows = benchmark.run(photos, size, folder=folder, device=place)
    show(f"Crops of {size} × {size}", benchmark.COLUMNS, rows, json)


def extraction(
    photos: Photos = 512,
    backbone: Backbone = "resnet101",
    width: Annotated[int, options.integer("Width of the photos, in pixels.", min=32)] = 1024,
    height: Annotated[int, options.integer("Height of the photos, in pixels.", min=32)] = 768,
    shapes: Annotated[
        int,
        options.integer(
            "Number of shapes of further photos, which resnet50 describes: 20 photos of 256 to 500 "
            "pixels for each shape; 0 is off.",
            min=0,
        ),
    ] = 300,
    device: options.Device = "auto",
    json: AsJsonLines = False,
) -> None:
    """Measure extraction from JPEG files, of one shape and of many shapes."""
    from itertools import chain

    from listwise.benchmarks import extraction as benchmark

    rows = benchmark.run(device, photos, backbone, width, height)
    many = benchmark.run_shapes(device, shapes) if shapes else ()
    show("Extraction from JPEG files", benchmark.COLUMNS, chain(rows, many), json)
