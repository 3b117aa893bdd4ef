"""Measure one part on this machine: `python -m benchmarks PART`; each `run` is one part."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from inspect import getdoc, signature
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from benchmarks.table import show
from listwise.errors import InputError
from listwise.machine import set_torch_environment

PARTS = {
    "summary": "the loss, a training step, decoding and extraction, in one table",
    "loss": "forward and backward pass of the AP loss and of other losses",
    "step": "a training step: image by image, in micro-batches, folded, compiled",
    "input": "crops per second of one core, all cores and a GPU",
    "extraction": "extraction from JPEG files, of one shape and of many shapes",
    "indexing": "an index of photos of 12 megapixels: photos per second and peak memory",
    "evaluation": "evaluation with distractors: counting ranks and sorting all scores",
    "search": "search in an index and in FAISS and hnswlib",
    "server": "search by photo through a server, with clients on the same machine",
    "local": "search by local features, and the same steps in the package asmk",
    "rerank": "re-ranking with stored and with newly computed local features",
    "peers": "training: Listwise and losses of pytorch-metric-learning on your photos",
    "export": "a network on the CPU in PyTorch and in ONNX files, in float32 and int8",
}
PROGRAM = "python -m benchmarks"


def parse_value(kinds: tuple[Any, ...], text: str) -> Any:
    """Parse a value: numbers are separated by commas, and names of methods by semicolons."""
    if Sequence[int] in kinds:
        return tuple(int(part) for part in text.split(","))
    if Sequence[str] in kinds:
        return tuple(part.strip() for part in text.split(";"))
    return next(kind for kind in (int, float, str, Path) if kind in kinds)(text)


def options_of(part: str, run: Callable[..., Any]) -> ArgumentParser:
    """Return a parser with an option for each parameter of `run`, and `--json`."""
    parser = ArgumentParser(
        f"{PROGRAM} {part}", description=getdoc(run), formatter_class=RawDescriptionHelpFormatter
    )
    hints = get_type_hints(run)
    for name, parameter in signature(run).parameters.items():
        hint, default = hints[name], parameter.default
        kind = partial(parse_value, get_args(hint) if isinstance(hint, UnionType) else (hint,))
        if default is parameter.empty:
            parser.add_argument(name, type=kind)
        elif name != "on_start":
            flag, shown = "--" + name.replace("_", "-"), f"default: {default}"
            parser.add_argument(flag, type=kind, default=default, help=shown)
    parser.add_argument("--json", action="store_true", help="print each row as a JSON object")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Measure the part that the arguments name."""
    width = max(map(len, PARTS))
    parts = "\n".join(f"  {name:<{width}}  {what}" for name, what in PARTS.items())
    top = ArgumentParser(
        PROGRAM,
        usage=f"{PROGRAM} PART [OPTIONS]",
        description=f"Measure time and memory on this machine.\n\nparts:\n{parts}",
        epilog=f"{PROGRAM} PART --help shows the options of a part.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    top.add_argument("part", choices=PARTS, metavar="PART", help="what to measure")
    part = top.parse_args(arguments[:1]).part
    set_torch_environment()
    run = import_module(f"benchmarks.{part}").run
    parser = options_of(part, run)
    settings = vars(parser.parse_args(arguments[1:]))
    json = settings.pop("json")
    given = (f"{name} {value}" for name, value in settings.items() if value is not None)
    if "on_start" not in signature(run).parameters:
        rows = run(**settings)
    else:
        rows = partial(run, **settings)
    try:
        show(f"{part}: {', '.join(given)}", rows, json)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
