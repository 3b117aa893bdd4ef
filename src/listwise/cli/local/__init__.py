"""`listwise local`: local features, their codebook and index, search and evaluation."""

import typer

from listwise.cli.local import evaluate, features, index

app = typer.Typer(
    help="Search by local features: HesAff-rSIFT or DELF, ASMK*, spatial verification.",
    no_args_is_help=True,
)
app.command(epilog=features.EXTRACT)(features.extract)
app.command(epilog=features.TRAIN)(features.train)
app.command(epilog=index.CODEBOOK)(index.codebook)
app.command(epilog=index.INDEX)(index.index)
app.command(epilog=index.SEARCH)(index.search)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
