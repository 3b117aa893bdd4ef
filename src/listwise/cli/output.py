"""Output of the commands: messages for people, JSON for programs, and what Ctrl-C prints."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from listwise.cli import app
from listwise.cli.settings import flag_of

if TYPE_CHECKING:
    from listwise.training import TrainPlan

RESUME = "run the same command again to resume"


def open_console(json: bool = False) -> Console:
    """Return the console for messages and progress bars: stderr if stdout is for JSON."""
    return Console(stderr=json, highlight=False)


def say(console: Console, text: str, style: str = "none") -> None:
    """Print a line without markup: names of files may contain brackets."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Print a note; `partial(note, console)` is an `on_note` callback."""
    say(console, f"note: {with_flags(text)}", "yellow")


def with_flags(message: str) -> str:
    """Replace each argument in backticks by the flag or argument of the running command.

    `max_side` becomes --max-side, `weights="random"` becomes --weights random, `labels=False`
    becomes --no-labels, and `out` becomes OUT if it is an argument. Other names stay.
    """
    if "`" not in message:
        return message
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    typed: dict[str, str] = {}
    for parameter in command.params:
        flag = max(parameter.opts, key=len)
        shown = flag if flag.startswith("-") else parameter.metavar or parameter.name.upper()
        typed[parameter.name] = typed[flag.lstrip("-").replace("-", "_")] = shown
        for value, flags in ("True", parameter.opts), ("False", parameter.secondary_opts):
            if getattr(parameter, "is_flag", False) and flags:
                typed[f"{parameter.name}={value}"] = max(flags, key=len)

    def write(found: re.Match[str]) -> str:
        if found[1] in typed:
            return typed[found[1]]
        name, _, value = found[1].partition("=")
        shown = typed.get(name.replace(".", "_"))
        return found[0] if shown is None else f"{shown} {value.strip(chr(34))}".rstrip()

    return re.sub(r"`([a-z_.]+(=[^`]*)?)`", write, message)


def typed_command() -> str:
    """Return the running command as typed in a shell."""
    return shlex.join(["listwise", *sys.argv[1:]])


def warn_of_unreadable(console: Console, errors: Sequence[str]) -> None:
    """Print which photos were left out, at most five of them."""
    if errors:
        count = "1 photo" if len(errors) == 1 else f"{len(errors)} photos"
        more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        say(
            console, f"skipped {count} that cannot be read: {'; '.join(errors[:5])}{more}", "yellow"
        )


def print_json(result: Any) -> None:
    """Print a result as one line of JSON; infinite numbers and NaN become null.

    Accepts dataclasses, pydantic models, NumPy values, paths, and mappings and sequences of them.
    """
    import json

    from pydantic_core import to_jsonable_python

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    values = to_jsonable_python(result, by_alias=False, fallback=plain)
    # Again, since the fields of a model keep infinite numbers and NaN.
    typer.echo(json.dumps(to_jsonable_python(values, inf_nan_mode="null")))


def print_result(console: Console, json: bool, facts: Any, text: str) -> None:
    """Print the facts as JSON for a program, or the text for a person."""
    if json:
        print_json(facts)
    else:
        say(console, text, "bold")


def show_plan(plan: "TrainPlan", console: Console) -> None:
    """Print the training and validation photos, and the chosen settings with their reasons."""
    from rich.table import Table

    for line in plan.notes:
        note(console, line)
    count, validation = len(plan.train), plan.validation
    trained = f"training on {count} photos of {len(plan.train.class_names)} classes"
    held = f"validating on {len(validation)} photos of {len(validation.class_names)} classes"
    say(console, f"{trained}, {held}")
    if not plan.reasons:
        return
    table = Table("setting", "value", "reason", title="Chosen settings", title_justify="left")
    table.columns[0].no_wrap = True
    settings = plan.config.model_dump()
    for name, reason in plan.reasons.items():
        value = settings
        for part in name.split("."):
            value = value[part]
        shown = {"True": "on", "False": "off"}.get(str(value), str(value))
        table.add_row(flag_of(name), shown, reason)
    console.print(table)


@contextmanager
def stoppable(resume: str = RESUME) -> Iterator[None]:
    """End with one line and exit code 130 at Ctrl-C; `resume` tells how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        hint = f"; {resume}" if resume else ""
        print(f"listwise: stopped{hint}", file=sys.stderr)
        raise typer.Exit(130) from None
