"""`listwise`: commands that are loaded when they are used, and errors as one line."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from listwise import __version__
from listwise.cli.command import make_app
from listwise.cli.output import Output, as_typed
from listwise.errors import InputError, ListwiseWarning, nearest_names
from listwise.machine import set_torch_environment

# The module of each command; after a dot, its name there if the module has several.
COMMANDS = {
    "demo": "demo.demo",
    "label": "train.label",
    "train": "train.train",
    "extract": "model.extract",
    "whiten": "model.whiten",
    "tune": "model.tune",
    "calibrate": "model.calibrate",
    "evaluate": "model.evaluate",
    "index": "index",
    "search": "search.search",
    "local": "local",
    "serve": "search.serve",
    "export": "transfer.export",
    "import": "transfer.import",
    "download": "transfer.download",
    "study": "study",
}


class Program(TyperGroup):
    """The commands of `COMMANDS`; each module is imported when its command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command or a group of commands; None if there is none with this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(".")
        group: Any = typer.main.get_command(import_module(f"listwise.cli.{module}").app)
        return group.commands[name] if name else group


app = make_app(
    "Train image retrieval on average precision, index photos, and search them.",
    """Examples:
  listwise demo             # train on toy photos and search them, in minutes
  listwise train photos     # a folder of class folders
  listwise index build shop photos --model runs/photos/model
  listwise search shop chair.jpg

See listwise COMMAND --help for the options and examples of a command.
""",
    Program,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"listwise {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; errors of the user are one line on stderr and exit code 2."""
    set_torch_environment()
    # They log tracebacks of errors that they also raise. Importing pymilvus sets its levels again.
    for name in ("connection_manager", "grpc_handler"):
        logging.getLogger(f"pymilvus.client.{name}").addFilter(lambda record: False)
    logging.getLogger("pymilvus.decorators").addFilter(lambda record: False)
    for name in ("milvus_lite", "grpc"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # "once" would forget what it has shown whenever another library changes the filters.
            warnings.simplefilter("always", ListwiseWarning)
            warnings.showwarning = partial(_show_warning, cache(Output(json=True).note))
            code = app(prog_name="listwise", standalone_mode=False)
        if sys.stdout is not None:  # it is None if it was closed before the start
            sys.stdout.flush()
        sys.exit(code)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "listwise"
        reason = error.format_message().rstrip(".")
        if context and (unknown := getattr(error, "option_name", "")):
            reason = _unknown_option(unknown, context)
        _leave(f"{reason}; see {command} --help")
    except InputError as error:
        _leave(as_typed(str(error)))
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
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which may not be imported
            raise
        _leave(as_typed(str(error)))


_show_python_warning = warnings.showwarning


def _show_warning(
    note: Callable[[str], None], message: Warning | str, category: type[Warning], *where: Any
) -> None:
    """Print a warning of Listwise as a note; others are meant for programmers."""
    if issubclass(category, ListwiseWarning):
        note(str(message))
    elif sys.warnoptions:
        _show_python_warning(message, category, *where)


def _unknown_option(typed: str, context: typer.Context) -> str:
    """The message for an option that a command does not have, with the nearest ones."""
    flags = [max(each.opts, key=len) for each in context.command.params]
    known = {flag.lstrip("-").replace("-", "_"): flag for flag in flags if flag[0] == "-"}
    near = nearest_names(typed.lstrip("-").replace("-", "_"), known)
    hint = f" (did you mean {' or '.join(known[name] for name in near)}?)" if near else ""
    return f"No such option: {typed}{hint}"


def _leave(reason: str) -> None:
    print(f"listwise: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(2)
