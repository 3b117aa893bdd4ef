"""`listwise export`, `import` and `download`: models for other programs, and data sets."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column

from listwise.cli.command import command, make_app
from listwise.cli.output import Output, stoppable
from listwise.errors import InputError
from listwise.progress import stage_bars

if TYPE_CHECKING:
    from listwise.data.catalog import DataSetEntry

app = make_app("Write models for other programs, and read theirs; download data sets.")


@command(app, "descriptors.model:Model.export", without=("path",))
def export(
    output: Output, model: str, out: Path, *, int8: str | None = None, **options: Any
) -> None:
    """Write a model to an ONNX file, which Listwise and programs without PyTorch can run.

    Args:
        model: model folder, run folder, or timm name such as resnet50.
        out: ONNX file to write (.onnx); with --web, a folder.
        int8: quantize the network to int8; give about 100 photos that are like those to describe.

    Examples:
      listwise export runs/a/model model.onnx
      listwise export runs/a/model small.onnx --max-side 1024 --int8 photos
      listwise export runs/a/model page --web
      listwise evaluate model.onnx photos
      listwise serve shop --model model.onnx
    """
    from listwise.descriptors import load_model
    from listwise.descriptors.exporting import check_path

    web = options.get("web", False)
    check_path(out, web)
    started = time.perf_counter()
    with output.console.status(f"loading {model}"):
        opened = load_model(model, "cpu")
    with output.console.status(f"exporting {model}"):
        path = opened.export(out, int8=int8, **options)
    size = path.stat().st_size
    seconds = time.perf_counter() - started
    facts = {"file": path, "dim": opened.dim, "bytes": size, "seconds": round(seconds, 2)}
    facts["precision"] = "float32" if int8 is None else "int8"
    text = f"wrote {path}: {opened.dim} dimensions, {size / 1e6:.1f} MB ({seconds:.0f} s)"
    if web:
        text += f"\nrun npm install onnxruntime-web in {out}, and serve it: python -m http.server"
    output.result(facts, text, *([] if web else ["evaluate", path, "PHOTOS"]))


@command(app, "models.imported:import_to_folder", name="import")
def import_model(output: Output, file: Path, folder: Path, **options: Any) -> None:
    """Convert a released checkpoint to a model folder, without running code from it.

    Args:
        file: checkpoint: a .pt file of deep-image-retrieval or .pth of cirtorch.
        folder: model folder to write.

    Examples:
      listwise import Resnet-101-AP-GeM.pt models/ap-gem
      listwise import retrievalSfM120k-resnet101-gem-b80fb85.pth models/gem
    """
    with output.console.status(f"reading {file.name}"):
        from listwise.models.imported import import_to_folder

        model = import_to_folder(file, folder, **options)
    config, dim = model.net.config, model.net.dim
    facts = {"folder": folder, "backbone": config.backbone, "pooling": config.pooling, "dim": dim}
    output.answer({**facts, "whitening": model.whitening, "whitenings": model.whitenings})
    for text in model.notes:
        output.note(text)
    named = f"{config.backbone}, {config.pooling}, {dim} dimensions"
    output.say(f"{named}, whitening {model.whitening or 'none'}")
    output.say(f"the model is in {folder}", "bold")
    output.next_step("evaluate", folder, "PHOTOS")


@command(app)
def download(
    output: Output, name: str | None = None, *, to: Path | None = None, list: bool = False
) -> None:
    """Download a public data set, or check that a downloaded one is complete.

    Args:
        name: name of a data set; --list shows all names.
        to: folder to download into; by default data/NAME.
        list: list the data sets and exit.

    Examples:
      listwise download --list                  # list all data sets
      listwise download roxford5k               # download into data/roxford5k
      listwise download SOP --to /data/sop

    Run the same command again to resume an interrupted download.
    """
    from listwise.data.catalog import DATA_FOLDER, ENTRIES, find_entry
    from listwise.data.catalog.download import get_dataset

    if list:
        _list_datasets(tuple(ENTRIES.values()), output)
        return
    entry = find_entry(name) if name else None
    if entry is None:
        what = "give the name of a data set" if name is None else f"unknown data set {name!r}"
        raise InputError(f"{what}: choose one of {', '.join(ENTRIES)}")
    output.say(f"{entry.title}: {entry.terms}\n{entry.page}")
    with stoppable(), stage_bars(output.console, download=True) as report:
        found = get_dataset(entry, to or DATA_FOLDER / entry.name, report)
    if found.unverified:
        more = " …" if len(found.unverified) > 3 else ""
        output.say(
            f"no checksum is published for {', '.join(found.unverified[:3])}{more}; downloads.json "
            "stores the SHA-256 of the downloaded file"
        )
    dataset, problems = found.dataset, found.problems
    for problem in () if output.json else problems:
        output.note(problem)
    facts = {"name": dataset.name, "folder": dataset.folder, "problems": problems}
    done = f"{dataset.name} is in {dataset.folder}"
    output.result(facts, done, "evaluate", "MODEL", dataset.folder)


def _list_datasets(entries: "tuple[DataSetEntry, ...]", output: Output) -> None:
    fields = ("name", "title", "terms", "page", "counts", "gigabytes", "how")
    output.answer([{field: getattr(entry, field) for field in fields} for entry in entries])
    rows = []
    for entry in entries:
        counts = ", ".join(f"{count:,} {part}" for part, count in entry.counts.items())
        size = f"{entry.gigabytes:g} GB" if entry.gigabytes else f"{len(entry.files)} files"
        rows.append((entry.name, entry.title, counts, size if entry.files else "by hand"))
    title, images = (Column(name, overflow="fold") for name in ("data set", "images"))
    output.table(("name", title, images, "download"), rows)
    output.say("--list --json also prints the terms of use and the page of each data set")
