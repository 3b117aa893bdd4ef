"""`listwise local evaluate`: local features on a judged benchmark."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say, stoppable, typed_command
from listwise.progress import progress_bar, total_bar

EXAMPLES = """Examples:
  listwise local evaluate roxford5k --codebook words.safetensors
  listwise local evaluate roxford5k --codebook words.safetensors --model model
  listwise local evaluate roxford5k --codebook words.safetensors --no-verify

Features, descriptors and the index are stored in --folder, and later runs reuse them. The
descriptors of --model are in its subfolder model-FINGERPRINT, which --descriptors accepts on any
machine.
"""

Folder = Annotated[
    Path | None,
    options.path(
        "Folder for features, descriptors and index.", show_default="local-BENCHMARK-FEATURES"
    ),
]


def evaluate(
    benchmark: Annotated[str, options.argument("BENCHMARK", "Name or folder of a benchmark.")],
    codebook: Annotated[Path, options.path("Codebook learned from other photos.")],
    folder: Folder = None,
    delf: options.Delf = None,
    count: options.Count = None,
    model: Annotated[
        list[Path] | None,
        options.path(
            "Also evaluate this model, without and with verification; repeat for several."
        ),
    ] = None,
    descriptors: Annotated[
        list[Path] | None,
        options.path(
            "Also evaluate the model whose descriptors are stored in this folder; repeat for "
            "several."
        ),
    ] = None,
    verify: Annotated[
        bool,
        options.flag("--verify/--no-verify", "Also re-rank the first 100 photos by verification."),
    ] = True,
    report: options.Report = None,
    data: options.Data = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Evaluate local features on a benchmark: ASMK*, without and with verification."""
    from listwise.results.table import format_table
    from listwise.studies.local import evaluate_local, figures_of_row, write_local_report

    console = open_console(json)
    with stoppable():
        judged, rows = evaluate_local(
            benchmark,
            codebook,
            folder,
            data=data,
            delf=delf,
            count=count,
            models=model or (),
            descriptors=descriptors or (),
            verify=verify,
            device=device,
            workers=workers,
            progress=partial(progress_bar, console),
            on_note=partial(note, console),
        )
    figures = {row.name: figures_of_row(judged, row) for row in rows}
    if json:
        print_json({"benchmark": judged.name, "figures": figures})
    else:
        typer.echo(format_table(judged.name, figures))
    if report is not None:
        with total_bar(console, "writing the report") as update:
            write_local_report(report, judged, rows, command=typed_command(), on_progress=update)
        say(console, f"wrote the report to {report}", "bold")
