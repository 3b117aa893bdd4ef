"""What commands print: messages for a person, JSON for a program, and how they stop."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from listwise.cli import app

RESUME = "run the same command again to resume"


def open_console(json: bool = False) -> Console:
    """The console for messages and progress bars: stderr if stdout carries JSON."""
    return Console(stderr=json, highlight=False)


def say(console: Console, text: str, style: str = "none") -> None:
    """Print a line as it is: names of files are not markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Print something that the user should know; `partial(note, console)` is an `on_note`."""
    say(console, f"note: {with_flags(text)}", "yellow")


def with_flags(message: str) -> str:
    """The message with each argument in backticks written as the running command takes it.

    `max_side` becomes --max-side, `weights="random"` becomes --weights random, `triplet.pool`
    becomes --triplet-pool, and `out`, where it has no flag, OUT. The rest stays as it is.
    """
    if "`" not in message:
        return message
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    typed = {}
    for parameter in command.params:
        flag = max(parameter.opts, key=len)
        shown = flag if flag.startswith("-") else parameter.metavar or parameter.name.upper()
        typed[parameter.name] = typed[flag.lstrip("-").replace("-", "_")] = shown

    def write(found: re.Match[str]) -> str:
        name, _, value = found[1].partition("=")
        shown = typed.get(name.replace(".", "_"))
        return found[0] if shown is None else f"{shown} {value.strip(chr(34))}".rstrip()

    return re.sub(r"`([a-z_.]+(=[^`]*)?)`", write, message)


def typed_command() -> str:
    """The command that is running, as one types it."""
    return shlex.join(["listwise", *sys.argv[1:]])


def warn_of_unreadable(console: Console, errors: Sequence[str]) -> None:
    """Name the photos that were left out, at most five of them."""
    if errors:
        count = "1 photo is" if len(errors) == 1 else f"{len(errors)} photos are"
        more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        say(console, f"{count} unreadable and left out: {'; '.join(errors[:5])}{more}", "yellow")


def print_json(result: Any) -> None:
    """Print a result as one line of JSON; what is not finite becomes null.

    Takes dataclasses, pydantic models, NumPy values, paths, and mappings and sequences of them.
    """
    import json

    from pydantic_core import to_jsonable_python

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    values = to_jsonable_python(result, by_alias=False, fallback=plain)
    # Again, since what is not finite stays as it is in the fields of a model.
    typer.echo(json.dumps(to_jsonable_python(values, inf_nan_mode="null")))


def print_result(console: Console, json: bool, facts: Any, text: str) -> None:
    """Print the facts as JSON for a program, or the text for a person."""
    if json:
        print_json(facts)
    else:
        say(console, text, "bold")


@contextmanager
def stoppable(resume: str = RESUME) -> Iterator[None]:
    """End with one line and exit code 130 at Ctrl-C; `resume` is empty if nothing was kept."""
    try:
        yield
    except KeyboardInterrupt:
        hint = f"; {resume}" if resume else ""
        print(f"listwise: stopped{hint}", file=sys.stderr)
        raise typer.Exit(130) from None
