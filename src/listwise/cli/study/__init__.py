"""`listwise study`: the paper's comparisons, and others, on your own photos."""

from listwise.cli.help import Program
from listwise.cli.study import peers, poolings
from listwise.cli.study.training import study_command
from listwise.studies.definitions import STUDIES

app = Program(
    help="Compare losses and settings on your photos, as in the paper.",
    no_args_is_help=True,
    epilog="Example:\n  listwise study losses toy --preset small --out losses",
)
for name, study in STUDIES.items():
    examples = (
        f"listwise study {name} photos.csv --out {name} --benchmark roxford5k",
        f"listwise study {name} toy --preset small --out {name}",
    )
    epilog = "\n  ".join(["Examples:", *examples])
    app.command(name, help=study.about, epilog=epilog)(study_command(study))
app.command(epilog=poolings.EXAMPLES)(poolings.poolings)
app.command(epilog=peers.EXAMPLES)(peers.peers)
