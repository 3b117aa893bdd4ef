"""`listwise benchmark`: measure speed and memory on this machine."""

import typer

from listwise.cli import options
from listwise.cli.benchmark import retrieval, training
from listwise.cli.benchmark.show import AsJsonLines, show
from listwise.cli.help import Program

app = Program(
    help="Measure time and memory on this machine and compare with other implementations.\n\n"
    "Without a command, measure the loss, a training step, decoding and extraction.",
    epilog="Examples:\n  listwise benchmark\n  listwise benchmark loss --sizes 256,1024,4096",
)
app.command(epilog=training.LOSS)(training.loss)
app.command(epilog=training.STEP)(training.step)
app.command("input", epilog=training.INPUT)(training.input_side)
app.command(epilog=training.EXTRACTION)(training.extraction)
app.command(epilog=retrieval.EVALUATION)(retrieval.evaluation)
app.command(epilog=retrieval.SEARCH)(retrieval.search)
app.command(epilog=retrieval.SERVER)(retrieval.server)
app.command(epilog=retrieval.LOCAL)(retrieval.local)
app.command(epilog=retrieval.RERANK)(retrieval.rerank)
app.command(epilog=retrieval.EXPORT)(retrieval.export)


@app.callback(invoke_without_command=True)
def summary(
    context: typer.Context, device: options.Device = "auto", json: AsJsonLines = False
) -> None:
    """Measure the loss, a training step, decoding and extraction on this machine."""
    if context.invoked_subcommand is None:
        from listwise.benchmarks import summary as benchmark

        show("From photos to a training step", benchmark.COLUMNS, benchmark.run(device), json)
