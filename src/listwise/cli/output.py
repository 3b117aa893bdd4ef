"""Output of the commands: messages for people, JSON for programs, and what Ctrl-C prints."""

import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from listwise.errors import InputError
from listwise.progress import count_of, total_bar

if TYPE_CHECKING:
    from listwise.data import LabelledImages
    from listwise.training import TrainPlan

RESUME = "run the same command again to resume"
ONE_LINE = 100_000  # columns of the output if it is not a terminal
PICTURES = (".png", ".jpg", ".jpeg", ".webp")

# What one types for each argument of the running command.
SPELLINGS: dict[str, str] = {}


def as_typed(message: str, spellings: Mapping[str, str] = SPELLINGS) -> str:
    """Replace each argument in backticks by the flag or argument of the running command.

    `max_side` becomes --max-side, `weights="random"` becomes --weights random, `labels=False`
    becomes --no-labels, and `out` becomes OUT if it is an argument. Other names stay.
    """

    def write(found: re.Match[str]) -> str:
        name, _, value = found[1].partition("=")
        typed = spellings.get(name.replace(".", "_"))
        if typed is None:
            return found[0]
        if value == "False":
            return f"--no-{typed.removeprefix('--')}"
        return f"{typed} {value.removeprefix('True').strip(chr(34))}".rstrip()

    return re.sub(r"`([a-z_.]+(=[^`]*)?)`", write, message)


class Output:
    """Where a command prints: on stdout, or on stderr if stdout is for JSON."""

    def __init__(self, json: bool = False) -> None:
        self.json = json
        # Without markup: names of files may contain brackets.
        self.console = Console(stderr=json, highlight=False, markup=False)

    def say(self, text: str, style: str = "none") -> None:
        """Print a line."""
        self.console.print(text, style=style, soft_wrap=True)

    def table(
        self, columns: Sequence[str | Column], rows: Iterable[Sequence[str]], title: str = ""
    ) -> None:
        """Print a table without lines; each row is one line if the output is not a terminal.

        A narrow terminal shortens the columns that are `Column(no_wrap=True)`, and wraps those that
        are `Column(overflow="fold")`. All others, such as ids and paths, are always shown whole.
        """
        table = Table(*columns, title=title or None, title_justify="left", box=None)
        table.padding = (0, 2, 0, 0)
        short = [column.no_wrap for column in table.columns]
        for row in rows:
            table.add_row(*(Text(each, no_wrap=cut) for each, cut in zip(row, short, strict=True)))
        for column in table.columns:
            if column.overflow != "fold" and not column.no_wrap:
                column.min_width = max(map(cell_len, map(str, (column.header, *column.cells))))
            column.no_wrap = False  # which would protect a column from being narrowed
        if self.console.is_terminal:
            self.console.print(table, crop=False)
            return
        lines = StringIO()
        Console(file=lines, width=ONE_LINE, markup=False).print(table)
        for line in lines.getvalue().splitlines():
            self.say(line.rstrip())

    def note(self, text: str) -> None:
        """Print a note; this is a function for `on_note`."""
        self.say(f"note: {as_typed(text)}", "yellow")

    def unreadable(self, errors: Sequence[str]) -> None:
        """Print which photos were left out, at most five of them; JSON has them all."""
        if errors and not self.json:
            skipped = f"skipped {count_of(len(errors), 'photo')} that cannot be read"
            self.say(f"{skipped}: {first_five(errors)}", "yellow")

    def print_json(self, result: Any) -> None:
        """Print a result as one line of JSON; infinite numbers and NaN become null.

        Accepts dataclasses, pydantic models, NumPy values, paths, and mappings and sequences of
        them.
        """
        import json

        from pydantic_core import to_jsonable_python

        def plain(value: Any) -> Any:
            return value.tolist() if hasattr(value, "tolist") else str(value)

        values = to_jsonable_python(result, by_alias=False, fallback=plain)
        # Again, since the fields of a model keep infinite numbers and NaN.
        typer.echo(json.dumps(to_jsonable_python(values, inf_nan_mode="null")))

    def answer(self, facts: Any) -> None:
        """For a program, print the facts as JSON and end the command."""
        if self.json:
            self.print_json(facts)
            raise typer.Exit

    def result(self, facts: Any, text: str, *then: object) -> None:
        """Print the facts as JSON for a program, or the text and the next step for a person."""
        self.answer(facts)
        self.say(text, "bold")
        self.next_step(*then)

    def next_step(self, *words: object) -> None:
        """Print the command that usually comes next; words in capitals are to be replaced."""
        if words:
            self.say(f"next: listwise {shlex.join(map(str, words))}")

    def show_plan(self, plan: "TrainPlan") -> None:
        """Print the training and validation photos, and the chosen settings with their reasons."""
        for line in plan.notes:
            self.note(line)
        trained, held = (_photos_of_classes(images) for images in (plan.train, plan.validation))
        self.say(f"training on {trained}, validating on {held}")
        settings, rows = plan.config.model_dump(), []
        for name, reason in plan.reasons.items():
            value = settings
            for part in name.split("."):
                value = value[part]
            shown = {"True": "on", "False": "off"}.get(str(value), str(value))
            rows.append(("--" + name.replace(".", "-").replace("_", "-"), shown, reason))
        if rows:
            columns = ("setting", "value", Column("reason", overflow="fold"))
            self.table(columns, rows, "Chosen settings")

    def report(self, file: Path | None, write: Callable[..., object]) -> None:
        """Write a report that shows the running command, if a file for it was given."""
        if file is not None:
            with total_bar(self.console, "writing the report") as update:
                write(file, command=typed_command(), on_progress=update)
            self.say(f"wrote the report to {file}; open it in a browser", "bold")


def _photos_of_classes(images: "LabelledImages") -> str:
    classes = count_of(len(images.class_names), "class", "classes")
    return f"{count_of(len(images), 'photo')} of {classes}"


def typed_command() -> str:
    """Return the running command as typed in a shell."""
    return shlex.join(["listwise", *sys.argv[1:]])


def has_screen() -> bool:
    """Whether a program with a window can be opened."""
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


@contextmanager
def shown_in_browser(link: str) -> Iterator[None]:
    """Open a secret link in the browser of this machine, if it has a screen.

    A file that only this user can read leads to it, because other users see the commands that run.
    """
    if not has_screen():
        yield
        return
    import webbrowser  # takes 20 ms, for one command

    with TemporaryDirectory(prefix="listwise-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(f'<meta http-equiv="refresh" content="0; url={link}">')
        threading.Thread(target=webbrowser.open, args=[page.as_uri()], daemon=True).start()
        yield


def check_output(file: Path | None, *endings: str) -> None:
    """Refuse a file that cannot be written, before the work that it is for."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise InputError(f"cannot write {file}: the folder {file.parent} does not exist")
    if endings and file.suffix.lower() not in endings:
        raise InputError(f"cannot write {file}: the name must end with {endings[0]}")


def require_index(index: str) -> None:
    """Refuse an index that does not exist, before the libraries that open one are imported."""
    if "://" not in index and not Path(index).exists():
        hint = f"create one with listwise index build {index} PHOTOS"
        raise InputError(f"no index at {index}: {hint}")


def first_five(names: Sequence[str]) -> str:
    """Return at most five names, and the number of the others."""
    more = f"; and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{'; '.join(names[:5])}{more}"


@contextmanager
def stoppable(resume: str = RESUME) -> Iterator[None]:
    """End with one line and exit code 130 at Ctrl-C; `resume` tells how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        hint = f"; {resume}" if resume else ""
        print(f"listwise: stopped{hint}", file=sys.stderr)
        raise typer.Exit(130) from None
