"""`listwise`: the commands put together, and errors turned into one line."""

import sys
from typing import Annotated

import typer

from listwise import __version__
from listwise.cli import benchmark
from listwise.cli.train import EXAMPLES, train
from listwise.errors import InputError

app = typer.Typer(
    name="listwise",
    help="Image retrieval trained on the metric it is judged by.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=EXAMPLES)(train)
app.add_typer(benchmark.app, name="benchmark")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"listwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        app()
    except InputError as error:
        print(f"listwise: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("listwise: stopped", file=sys.stderr)
        sys.exit(130)
