"""`listwise local`: local features, their codebook and index, search and evaluation."""

from listwise.cli.help import Program
from listwise.cli.local import evaluate, features, index

app = Program(
    help="Search by local features (HesAff-rSIFT or DELF) with ASMK* and spatial verification.",
    no_args_is_help=True,
    epilog="""Examples:
  listwise local extract photos photos.arrow
  listwise local codebook other-photos.arrow words.safetensors
  listwise local index shop-local photos.arrow --codebook words.safetensors
  listwise local search shop-local chair.jpg
""",
)
app.command(epilog=features.EXTRACT)(features.extract)
app.command(epilog=features.TRAIN)(features.train)
app.command(epilog=index.CODEBOOK)(index.codebook)
app.command(epilog=index.INDEX)(index.index)
app.command(epilog=index.SEARCH)(index.search)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
