"""`listwise study`: the paper's comparisons on your own photos."""

from listwise.cli.help import Program
from listwise.cli.study.poolings import EXAMPLES, poolings
from listwise.cli.study.training import study_command
from listwise.studies.definitions import STUDIES

app = Program(
    help="Repeat the comparisons of the paper on your photos.",
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
app.command(epilog=EXAMPLES)(poolings)
