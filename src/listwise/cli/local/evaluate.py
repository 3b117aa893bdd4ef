"""`listwise local evaluate`: local features on a judged benchmark."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say, stoppable, typed_command
from listwise.progress import progress_bar, total_bar

EXAMPLES = options.examples("""Examples:
  listwise local evaluate roxford5k --codebook words.safetensors
  listwise local evaluate roxford5k --codebook words.safetensors --model runs/a/model
  listwise local evaluate roxford5k --codebook words.safetensors --descriptors described

Features, descriptors and the index are kept in a folder and used by the next run. Descriptors of
--model are in model-FINGERPRINT in it, which --descriptors takes, also from another machine.
""")


def evaluate(
    benchmark: Annotated[str, typer.Argument(help="Name or folder of a judged benchmark.")],
    codebook: Annotated[Path, typer.Option(help="A codebook learned from other photos.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for features and index.", show_default="local-BENCHMARK-FEATURES"
        ),
    ] = None,
    delf: options.Delf = None,
    count: options.Count = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Also evaluate the search of this model folder, and verify its results."),
    ] = None,
    descriptors: Annotated[
        list[Path] | None,
        typer.Option(help="The same, from a folder of descriptors that --model has kept."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Verify the first 100 of each list.")
    ] = True,
    report: options.Report = None,
    data: options.Data = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Evaluate local features on a benchmark: ASMK*, and with spatial verification (SP)."""
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
        say(console, f"the report is in {report}", "bold")
