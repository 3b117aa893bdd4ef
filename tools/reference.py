"""Reference pages that are made from the program itself.

The site builder calls `define_env`, and `docs/commands.md`, `docs/settings.md` and
`docs/changelog.md` call the macros that it defines. `python tools/reference.py` writes the folder
`reference/`, for those who read the repository instead of the site.
"""

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from listwise.cli.main import app
from listwise.settings import NESTED

ROOT = Path(__file__).parents[1]
NOTE = "<!-- Written by `make reference`: change the source instead. -->"
ALL_SETTINGS = "The [settings of a training run](settings.md) are options of this command, too."


def define_env(env: Any) -> None:
    """Define the macros of the reference pages."""
    env.macro(commands_page, "commands")
    env.macro(settings_page, "settings")
    env.macro(changelog_page, "changelog")


def commands_page() -> str:
    """Every command of the command line, in Markdown."""
    root: Any = typer.main.get_command(app)
    lines = ["| Command | |", "|---|---|"]
    for name, command in subcommands(root):
        lines.append(f"| [`listwise {name}`](#listwise-{name}) | {_first_sentence(command)} |")
    return "\n".join(lines) + "\n\n" + "\n\n".join(_describe(root, "listwise", 1))


def settings_page() -> str:
    """Every setting of a training run, in Markdown, in the groups of a config file."""
    root: Any = typer.main.get_command(app)
    settings = [p for p in root.get_command(None, "train").params if is_setting(p)]
    parts = [_setting(p, p.name) for p in settings if _group(p) is None]
    for group, model in NESTED.items():
        parts += [f"## {group}", _escape((model.__doc__ or "").split("\n")[0])]
        members = [p for p in settings if _group(p) == group]
        parts += [_setting(p, p.name.removeprefix(f"{group}_")) for p in members]
    return "\n\n".join(parts)


def changelog_page() -> str:
    """CHANGELOG.md, with links from the folder of the pages instead of the root."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def files() -> dict[str, str]:
    """The files of the folder `reference/`, by name."""
    pages = {
        "commands.md": f"# Commands\n\n{commands_page()}",
        "settings.md": f"# Training settings\n\n{settings_page()}",
        "python.md": f"# Python names\n\n{names_page()}",
    }
    return {name: f"{NOTE}\n\n{_with_lists(page)}\n" for name, page in pages.items()}


def names_page() -> str:
    """Every public name of the packages with the first sentence of its docstring, in Markdown."""
    parts = []
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        package = page.stem if page.stem == "listwise" else f"listwise.{page.stem}"
        parts.append(f"## {package}")
        for documented in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = pkgutil.resolve_name(documented)
            names = getattr(found, "__all__", None)
            members = {documented: found}
            if names is not None:
                members = {f"{documented}.{name}": getattr(found, name) for name in names}
            parts += [f"`{name}`\n:   {_summary(member)}" for name, member in members.items()]
    return "\n\n".join(parts)


def _summary(member: Any) -> str:
    """The first paragraph of a docstring; what has none of its own is shown as it is."""
    own = str(getattr(member, "__module__", "")).startswith("listwise")
    text = (inspect.getdoc(member) or "") if own else f"`{member!r}`"
    return " ".join(text.split("\n\n")[0].split())


def _with_lists(page: str) -> str:
    """Turn lists of definitions, which only the site renders, into lists of points."""
    page = re.sub(r"^(`.*)\n:   ", r"- \1: ", page, flags=re.MULTILINE)
    return re.sub(r"^((?:- |    ).*)\n\n(?=- )", r"\1\n", page, flags=re.MULTILINE)


def subcommands(group: Any) -> Iterator[tuple[str, Any]]:
    """The commands of a group, with their names."""
    for name in group.list_commands(None):
        yield name, group.get_command(None, name)


def is_setting(parameter: Any) -> bool:
    """Whether an option of a command is a setting of a training run."""
    return getattr(parameter, "rich_help_panel", None) not in (None, "Options")


def _group(parameter: Any) -> str | None:
    """The group of a config file that a setting is in."""
    return next((name for name in NESTED if parameter.name.startswith(f"{name}_")), None)


def _describe(group: Any, words: str, depth: int) -> Iterator[str]:
    for name, command in subcommands(group):
        typed = f"{words} {name}"
        yield f"{'#' * (depth + 1)} {typed}"
        yield _plain(command.help)
        yield from _usage(command, typed)
        if hasattr(command, "commands"):
            yield from _describe(command, typed, depth + 1)


def _usage(command: Any, typed: str) -> Iterator[str]:
    own = [p for p in command.params if not p.hidden and not is_setting(p)]
    arguments = [p for p in own if not p.opts[0].startswith("-")]
    words = [_argument(p) if p.required else f"[{_argument(p)}]" for p in arguments]
    if not hasattr(command, "commands"):
        yield "```text\n" + " ".join([typed, *words, "[OPTIONS]"]) + "\n```"
    if own:
        yield "\n\n".join(_parameter(parameter) for parameter in own)
    if any(is_setting(p) for p in command.params):
        yield ALL_SETTINGS
    if command.epilog:
        yield from _examples(command.epilog.replace("\b\n", ""))


def _parameter(parameter: Any) -> str:
    text = _plain(parameter.help)
    if not parameter.opts[0].startswith("-"):
        return f"`{_argument(parameter)}`\n:   {text}"
    return f"{_flags(parameter)}\n:   {text}"


def _flags(parameter: Any) -> str:
    """The flags of an option, and the kind of value that it takes."""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} `{parameter.metavar}`"


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _examples(text: str) -> Iterator[str]:
    """The epilog of a command: its examples as code, everything else as paragraphs."""
    commands, paragraphs = [], []
    for part in re.sub(r"^Examples?:", "", text).split("\n\n"):
        block = textwrap.dedent(part.strip("\n")).rstrip()
        if re.match(r"(listwise|torchrun) ", block):
            commands.append(block)
        elif block:
            paragraphs.append(_escape(" ".join(block.split())))
    yield "```sh\n" + "\n".join(commands) + "\n```"
    yield from paragraphs


def _setting(parameter: Any, name: str) -> str:
    """A setting by its name in a config file, and its flags."""
    return f"`{name}`\n:   {_plain(parameter.help)}\n    <br>{_flags(parameter)}"


def _first_sentence(command: Any) -> str:
    return _plain(command.help).split("\n")[0]


def _plain(text: str | None) -> str:
    """A help text as Markdown, with the default in italics."""
    plain, _, note = (text or "").strip().partition(" [")
    return _escape(plain) + (f" *{_escape(note[:1].upper() + note[1:-1])}.*" if note else "")


def _escape(text: str) -> str:
    return re.sub(r"([*_<])", r"\\\1", text)


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / "reference" / name).write_text(text, encoding="utf-8")
