"""`listwise extract`: write the descriptors of photos to a file."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from listwise.cli import options
from listwise.cli.output import note, open_console, print_result, stoppable, warn_of_unreadable
from listwise.progress import progress_bar

EXAMPLES = """Examples:
  listwise extract runs/a/model photos photos.parquet
  listwise extract runs/a/model queries.csv queries.parquet
  listwise extract resnet50 photos out.parquet --scales 1,0.7071 --max-side 1024
  torchrun --nproc-per-node 8 -m listwise extract resnet50 photos out.parquet

Run the same command again to resume after an interruption. Under torchrun each process describes
its share of the photos and writes its own file: out-00001-of-00008.parquet and so on.
"""


def extract(
    model: options.Model,
    source: options.Source,
    out: Annotated[Path, options.argument("OUT", "Descriptor file to write (.parquet).")],
    max_side: options.MaxSide = None,
    scales: options.Scales = None,
    power: options.Power = None,
    precision: options.Precision = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    strict: options.Strict = False,
    json: options.AsJson = False,
) -> None:
    """Compute the descriptors of photos and write them to a file."""
    from listwise.data.catalog import photos_of
    from listwise.data.gpu_photos import start_gpu

    factors = options.parse_numbers(scales, "scales") if scales else None
    start_gpu(device)
    images = photos_of(source)

    from listwise.descriptors import Shard, load_model
    from listwise.descriptors import extract as extract_photos

    console = open_console(json)
    shard = Shard.from_torchrun()
    images = shard.images(images)
    with console.status(f"loading {model}"):
        opened = load_model(model, shard.device(device))
    started = time.perf_counter()
    with stoppable(), progress_bar(console, "computing descriptors", len(images)) as advance:
        file = extract_photos(
            opened,
            images,
            shard.file(out),
            on_progress=advance,
            on_note=partial(note, console),
            max_side=max_side,
            scales=factors,
            power=power,
            precision=cast(Any, precision),
            strict=strict,
            workers=workers,
        )
    seconds = time.perf_counter() - started
    facts = {
        "file": file.path,
        "descriptors": len(file),
        "dim": file.dim,
        "model": file.model,
        "whitened": file.header.whitened,
        "settings": file.settings,
        "unreadable": file.header.unreadable,
        "seconds": round(seconds, 2),
    }
    if not json:
        warn_of_unreadable(console, file.header.unreadable)
    kind = "whitened descriptors" if file.header.whitened else "descriptors"
    done = f"wrote {len(file)} {kind} of {file.dim} dimensions to {file.path} ({seconds:.0f} s)"
    print_result(console, json, facts, done)
