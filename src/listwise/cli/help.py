"""The text of `--help`: plain, with whole words and sentences at every width."""

import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

NARROWEST, WIDEST = 60, 100
LEFT = 28  # width of the left column; what is longer has a line of its own
GLUE = "\0"  # a space at which no line is broken
Row = tuple[str, str]


class HelpCommand(TyperCommand):
    """A command with the help of this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the command."""
        formatter.write(help_text(self, ctx))


class HelpGroup(TyperGroup):
    """A group of commands with the help of this module."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group."""
        formatter.write(help_text(self, ctx))


class Program(typer.Typer):
    """A `typer.Typer` whose commands have the help of this module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=HelpGroup,
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Add a command."""
        return super().command(name, cls=HelpCommand, **settings)


def help_text(command: Any, context: Any) -> str:
    """Return the help of a command: usage, purpose, arguments, options, commands, examples."""
    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST) - 1
    parameters = [p for p in command.get_params(context) if not getattr(p, "hidden", False)]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    sections: dict[str, list[Row]] = {}
    for parameter in arguments:
        sections.setdefault("Arguments", []).append((_value(parameter), _sentence(parameter)))
    for parameter in parameters:
        if parameter.param_type_name == "option":
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault(panel, []).append((_flags(parameter), _sentence(parameter)))
    for name, each in getattr(command, "commands", {}).items():
        sections.setdefault("Commands", []).append((name, each.help.split("\n\n")[0]))
    usage = [context.command_path, "[OPTIONS]", *map(_usage, arguments)]
    if "Commands" in sections:
        usage += ["COMMAND", "[ARGS]..."]
    lines = [f"{_bold('Usage:')} {' '.join(usage)}", ""]
    lines += [*_wrap(" ".join((command.help or "").split()), width, "  "), ""]
    for title, rows in sections.items():
        lines += [_bold(f"{title}:"), *_table(rows, width), ""]
    lines += _epilog(command.epilog or "", width)
    return "\n".join(lines)


def _table(rows: list[Row], width: int) -> Iterator[str]:
    """Two columns: names on the left, sentences on the right."""
    left = min(LEFT, max(len(name) for name, _ in rows)) + 4
    for name, text in rows:
        first, *others = _wrap(text, width, " " * left)
        if len(name) + 4 > left:
            yield f"  {_bold(name)}"
            yield first
        else:
            yield f"  {_bold(name)}{first[len(name) + 2 :]}"
        yield from others


def _epilog(text: str, width: int) -> Iterator[str]:
    """Indented lines are commands and stay as they are; others are joined to paragraphs."""
    for block in text.strip().split("\n\n"):
        title, *commands = block.split("\n")
        if any(line.startswith("  ") for line in commands):
            yield _bold(title)
            yield from commands
        else:
            yield from _wrap(" ".join(block.split()), width, "")
        yield ""


def _wrap(text: str, width: int, indent: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(GLUE, " ") for line in lines] or [indent]


def _bold(text: str) -> str:
    return typer.style(text, bold=True)


def _value(parameter: Any) -> str:
    """What the help writes for the value of an option or argument."""
    return str(parameter.metavar or parameter.name.upper())


def _usage(argument: Any) -> str:
    name = _value(argument) if argument.required else f"[{_value(argument)}]"
    return name if argument.nargs == 1 else f"{name}..."


def _flags(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        return f"{names} / {', '.join(option.secondary_opts)}"
    return names if option.is_flag else f"{names} {_value(option)}"


def _sentence(parameter: Any) -> str:
    """The help of an option or argument, with its default and its environment variable."""
    notes, default = [], parameter.default
    if isinstance(parameter.show_default, str):
        notes.append(f"default: {parameter.show_default}")
    elif isinstance(default, bool):
        notes += [f"default: {'on' if default else 'off'}"] if parameter.secondary_opts else []
    elif isinstance(default, str | int | float | Path):
        notes.append(f"default: {f'{default:g}' if isinstance(default, float) else default}")
    if parameter.envvar and getattr(parameter, "show_envvar", False):
        notes.append(f"environment variable: {parameter.envvar}")
    if parameter.required and parameter.param_type_name == "option":
        notes.append("required")
    # Short notes stay on one line.
    joined = (f"[{note}]" if len(note) > LEFT else f"[{note}]".replace(" ", GLUE) for note in notes)
    return " ".join([parameter.help or "", *joined])
