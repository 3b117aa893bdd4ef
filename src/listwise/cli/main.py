"""`listwise`: the commands put together, and errors turned into one line."""

import os
import sys
import threading
import warnings
from typing import Annotated, Any

import typer

from listwise import __version__
from listwise.cli import (
    app,
    benchmark,
    demo,
    download,
    evaluate,
    export,
    extract,
    import_model,
    index,
    label,
    local,
    search,
    serve,
    study,
    train,
    tune,
    whiten,
)
from listwise.cli.output import with_flags
from listwise.errors import InputError
from listwise.machine import set_torch_environment

# click's, or that of the copy of click which newer versions of typer carry.
UsageError: Any = typer.BadParameter.__bases__[0]

app.command(epilog=demo.EXAMPLES)(demo.demo)
app.command(epilog=label.EXAMPLES)(label.label)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=extract.EXAMPLES)(extract.extract)
app.command(epilog=whiten.EXAMPLES)(whiten.whiten)
app.command(epilog=tune.EXAMPLES)(tune.tune)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.add_typer(index.app, name="index")
app.command(epilog=search.EXAMPLES)(search.search)
app.add_typer(local.app, name="local")
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command(epilog=export.EXAMPLES)(export.export)
app.command("import", epilog=import_model.EXAMPLES)(import_model.import_model)
app.command(epilog=download.EXAMPLES)(download.download)
app.add_typer(study.app, name="study")
app.add_typer(benchmark.app, name="benchmark")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"listwise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; errors of the user are one line on stderr and exit code 2."""
    if not sys.warnoptions:
        # Warnings of libraries are meant for their callers, not for users of a command.
        warnings.simplefilter("ignore")
    set_torch_environment()
    threading.excepthook = _report_thread
    try:
        code = app(prog_name="listwise", standalone_mode=False)
        if sys.stdout is not None:  # it is None if it was closed before the start
            sys.stdout.flush()
        sys.exit(code)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "listwise"
        _leave(f"{error.format_message().rstrip('.')}; see {command} --help")
    except InputError as error:
        _leave(with_flags(str(error)))
    except typer.Abort:
        print("listwise: stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output has closed it: the interpreter must not write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _leave(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except MemoryError as error:
        _leave(f"not enough memory: {error}".removesuffix(": "))
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        _leave(with_flags(str(error)))


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Print the errors of threads, except those that the main thread reports in one line."""
    if not issubclass(failed.exc_type, OSError):  # TensorBoard's writer raises these again
        threading.__excepthook__(failed)


def _leave(reason: str) -> None:
    print(f"listwise: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(2)
