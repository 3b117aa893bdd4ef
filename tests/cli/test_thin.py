"""The command line stays thin: short files and functions, commands that stand alone, plain help."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import listwise
from listwise.cli.main import app

PACKAGE = Path(listwise.__file__).parent
CLI = PACKAGE / "cli"
# What commands share; everything else in the folder is a command, a file or a folder of files.
SHARED = {"app", "help", "options", "output", "settings"}
FILE_LINES, FUNCTION_LINES = 150, 60
# Other programs have flags too, and a whole command may be named.
OTHER_FLAGS = re.compile(r"(docker run|pip install|listwise [a-z]+)[^:;]* --[a-z]")


def parts_of_cli(path: Path) -> Iterator[str]:
    """Parts of the command line that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.split(".")[2] for name in names if name.startswith("listwise.cli."))


def commands(group: Any, words: str = "listwise") -> Iterator[tuple[str, Any]]:
    """Every command with the words that one types for it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def test_no_command_file_is_long() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in CLI.rglob("*.py")}
    assert len(lengths) > 15
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_long() -> None:
    lengths = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
                docstring = ast.get_docstring(node, clean=False) or ""
                lines = (node.end_lineno or 0) - node.lineno + 1
                lengths[name] = lines - len(docstring.splitlines())
    assert len(lengths) > 1000
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def test_no_command_imports_another() -> None:
    checked = 0
    for path in CLI.rglob("*.py"):
        part = path.relative_to(CLI).parts[0].removesuffix(".py")
        if part not in ("main", "__init__"):
            assert set(parts_of_cli(path)) <= SHARED | {part}, path
            checked += 1
    assert checked > 15


def test_every_command_shows_an_example_of_itself() -> None:
    for words, command in commands(typer.main.get_command(app)):
        assert words in (command.epilog or ""), words
        assert command.help.strip().splitlines()[0].endswith("."), words


def test_every_option_is_explained() -> None:
    for words, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            text = re.sub(r"\s*\[dim\].*", "", parameter.help or "")
            assert text.endswith((".", ")")), f"{words} {parameter.name}: {text}"


def test_errors_of_the_library_name_no_flags() -> None:
    """They name the argument in backticks, and the command line writes the flag."""
    checked = 0
    for path in PACKAGE.rglob("*.py"):
        if CLI in path.parents or "serving" in path.parts:  # a server is started by its command
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and "InputError" in ast.unparse(node):
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                message = "".join(text for text in texts if isinstance(text, str))
                flags = re.search(r"(^|[^\w-])--[a-z]", message)
                assert not flags or OTHER_FLAGS.search(message), f"{path}:{node.lineno} {message}"
                checked += 1
    assert checked > 200
