"""The documentation site: every page is in the navigation, every public name in the reference."""

import importlib.util
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
from command_line import all_commands

from listwise.settings import NESTED, TrainConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src"
API = sorted((DOCS / "api").glob("*.md"))


def pages_of(navigation):
    """The pages of a part of the navigation."""
    for item in navigation:
        if isinstance(item, str):
            yield item
        else:
            for value in item.values():
                yield from [value] if isinstance(value, str) else pages_of(value)


@pytest.fixture(scope="module")
def reference():
    """The module that makes reference pages from the program."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once():
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    pages = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(pages_of(project["nav"])) == pages


def test_every_package_has_a_page():
    packages = {path.parent.name for path in (SOURCE / "listwise").glob("*/__init__.py")}
    assert packages - {"cli"} | {"client"} == {page.stem for page in API} - {"listwise"}


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_every_public_name_is_documented(page):
    """Ruff checks that each one has a docstring."""
    package = page.stem if page.stem == "listwise" else f"listwise.{page.stem}"
    documented = re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    if getattr(importlib.import_module(package), "__all__", ()):
        assert documented == [package]  # the page shows all that the package exports
    assert documented
    for name in documented:
        assert pkgutil.resolve_name(name).__doc__


def test_the_reference_lists_every_command_option_and_setting(reference):
    commands, settings = reference.commands_page(), reference.settings_page()
    for words, command in all_commands().items():
        title = f"# {' '.join(['listwise', *words])}\n"
        section = re.split(r"^##", commands.partition(title)[2], flags=re.MULTILINE)[0]
        assert section or not words
        for parameter in command.params if words else ():
            shown = settings if reference.is_setting(parameter) else section
            flag = max(parameter.opts, key=len)
            assert f"`{flag if flag[0] == '-' else parameter.metavar}`" in shown, (words, flag)
    paths = [(name,) for name in TrainConfig.model_fields if name not in NESTED]
    paths += [(group, name) for group, model in NESTED.items() for name in model.model_fields]
    for path in paths:
        assert f"`--{'-'.join(path).replace('_', '-')}`" in settings
        assert f"\n`{path[-1]}`\n" in f"\n{settings}"
    assert "`--crops-size`" not in commands  # in one place


def test_the_reference_in_the_repository_is_up_to_date(reference):
    """Run `make reference` if this fails."""
    for name, text in reference.files().items():
        assert (ROOT / "reference" / name).read_text(encoding="utf-8") == text, name
