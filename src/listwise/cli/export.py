"""`listwise export`: write a model to an ONNX file."""

from pathlib import Path
from typing import Annotated

from listwise.cli import options
from listwise.cli.output import open_console, print_result

EXAMPLES = """Examples:
  listwise export runs/a/model model.onnx
  listwise export runs/a/model small.onnx --max-side 1024 --int8 photos
  listwise export runs/a/model page --web
  listwise evaluate model.onnx photos
  listwise serve shop --model model.onnx
"""


def export(
    model: options.Model,
    out: Annotated[
        Path, options.argument("OUT", "ONNX file to write (.onnx); with --web, a folder.")
    ],
    max_side: Annotated[
        int | None,
        options.integer(
            "Programs that use the file reduce photos whose longer side has more pixels than this; "
            "0 keeps the original size.",
            min=0,
            show_default="the tuned size, or the original size",
        ),
    ] = None,
    int8: Annotated[
        str | None,
        options.option(
            "PHOTOS",
            "Quantize the network to int8. Give about 100 photos that are like those to describe.",
        ),
    ] = None,
    opset: Annotated[
        int, options.integer("Version of ONNX's operators, from 18 to 23.", show_default="18")
    ] = 18,
    web: Annotated[
        bool,
        options.flag("--web", "Write a folder with an example page that runs in a browser."),
    ] = False,
    json: options.AsJson = False,
) -> None:
    """Write a model to an ONNX file, which Listwise and programs without PyTorch can run."""
    import time

    from listwise.descriptors import load_model
    from listwise.descriptors.exporting import check_path

    if not web:
        check_path(out)
    console = open_console(json)
    started = time.perf_counter()
    with console.status(f"loading {model}"):
        opened = load_model(model, "cpu")
    with console.status(f"exporting {model}"):
        path = opened.export(out, max_side=max_side, int8=int8, opset=opset, web=web)
    size = path.stat().st_size
    seconds = time.perf_counter() - started
    facts = {"file": path, "dim": opened.dim, "bytes": size, "seconds": round(seconds, 2)}
    facts |= {"precision": "float32" if int8 is None else "int8", "opset": opset}
    text = f"wrote {path}: {opened.dim} dimensions, {size / 1e6:.1f} MB ({seconds:.0f} s)"
    if web:
        text += f"\nrun npm install onnxruntime-web in {out}, and serve it: python -m http.server"
    print_result(console, json, facts, text)
