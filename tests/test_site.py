"""The documentation site: every page is in the navigation, every public name in the reference."""

import ast
import functools
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import typer

from listwise.cli.main import app
from listwise.settings import NESTED, TrainConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src"
API = sorted((DOCS / "api").glob("*.md"))
PACKAGES = ["listwise", *(f"listwise.{page.stem}" for page in API if page.stem != "listwise")]


def pages_of(navigation):
    """The pages of a part of the navigation."""
    for item in navigation:
        if isinstance(item, str):
            yield item
        else:
            for value in item.values():
                yield from [value] if isinstance(value, str) else pages_of(value)


def module_file(name):
    path = SOURCE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exports(tree):
    """The names in `__all__`."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(getattr(target, "id", "") == "__all__" for target in targets):
            yield from ast.literal_eval(node.value)


@functools.cache
def parsed(module):
    """The syntax tree of a module, and where the names come from that it imports."""
    tree = ast.parse(module_file(module).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return tree, imported


def docstring(module, name):
    """The docstring of a name, followed to the module that defines it."""
    tree, imported = parsed(module)
    if name in imported:
        return docstring(*imported[name])
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
        assigned = [*getattr(node, "targets", []), getattr(node, "target", None)]
        if any(getattr(target, "id", "") == name for target in assigned):
            value = getattr(following, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    raise AssertionError(f"{module} does not define {name}")


@functools.cache
def reference():
    """The module that makes reference pages from the program."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def reference_pages():
    """The pages of all commands and of all settings."""
    return reference().commands_page(), reference().settings_page()


def parameters(group, words="listwise"):
    """Every parameter of every command, with the command as one types it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from parameters(command, f"{words} {name}")
        for parameter in command.params:
            yield f"{words} {name}", parameter


def test_every_page_is_in_the_navigation_once():
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(pages_of(project["nav"])) == pages


def test_every_package_has_a_page():
    packages = {path.parent.name for path in (SOURCE / "listwise").glob("*/__init__.py")}
    assert packages - {"cli"} == {page.stem for page in API} - {"listwise"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    tree, _ = parsed(package)
    page = (DOCS / "api" / f"{package.rpartition('.')[2]}.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: (\S+)", page, re.MULTILINE)
    if names := [name for name in exports(tree) if name != "__version__"]:
        assert documented == [package]  # the page shows all that the package exports
        assert ast.get_docstring(tree)
        documented = [f"{package}.{name}" for name in names]
    assert documented
    for name in documented:
        module, _, name = name.rpartition(".")
        assert docstring(module, name), f"{module}.{name}"


def test_the_reference_lists_every_command_and_option():
    commands, settings = reference_pages()
    count = 0
    for words, parameter in parameters(typer.main.get_command(app)):
        assert f"# {words}\n" in commands
        section = re.split(r"^##", commands.split(f"# {words}\n", 1)[1], flags=re.MULTILINE)[0]
        shown = settings if reference().is_setting(parameter) else section
        flag = max(parameter.opts, key=len)
        assert f"`{flag if flag[0] == '-' else parameter.metavar or flag.upper()}`" in shown, words
        count += 1
    assert count > 200


def test_each_example_of_a_command_is_a_line_of_its_own():
    commands, _ = reference_pages()
    shown = re.findall(r"^```sh\n(.*?)^```$", commands, re.DOTALL | re.MULTILINE)
    assert len(shown) > 30
    for line in "".join(shown).splitlines():
        command = line.partition("#")[0]
        assert command.count("listwise ") == 1 or command.startswith("  "), line
        assert len(line) < 100


def test_links_of_the_changelog_lead_to_pages_of_the_site():
    links = re.findall(r"\]\(([\w./-]+\.md)", reference().changelog_page())
    assert len(links) > 10
    assert [link for link in links if not (DOCS / link).exists()] == []


def test_the_reference_lists_every_setting():
    commands, settings = reference_pages()
    paths = [(name,) for name in TrainConfig.model_fields if name not in NESTED]
    paths += [(group, name) for group, model in NESTED.items() for name in model.model_fields]
    for path in paths:
        flag = "--" + "-".join(path).replace("_", "-")
        assert f"`{flag}`" in settings
        assert f"\n`{path[-1]}`\n" in f"\n{settings}"
    assert "`--crops-size`" not in commands  # in one place
