"""What the package imports is what it declares: in the core, or in an extra of that part."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from import_statements import import_statements

from listwise.optional import DISTRIBUTIONS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "listwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages whose modules have another name, or come with what is declared.
NAMES = {"PIL": "pillow", "starlette": "fastapi", "triton": "torch", **DISTRIBUTIONS}
NAMES["pydantic_core"] = "pydantic"
# The extras whose packages a part of the source may import; the others do with the core.
EXTRAS = {
    "benchmarks": ("all", "compare"),
    "cli": ("serve",),
    "columns": ("index",),
    "data": ("train",),
    "descriptors": ("export", "index"),
    "local": ("local",),
    "losses": ("compare",),
    "models": ("export", "imagenet"),
    "search": ("index", "milvus"),
    "serving": ("serve",),
    "settings": ("train",),
    "studies": ("train", "compare"),
    "training": ("train",),
}
# Optional: one data set needs scipy, and torchcodec replaces a decoder where it is installed.
ASKED_FOR = {"scipy", "torchcodec"}


def imported(source):
    """Top-level names of every import, also of those inside functions."""
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(lines):
    """The packages that requirements name, those of extras of this package among them."""
    found = set()
    for line in lines:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", line).groups()
        if name == "listwise":
            for extra in extras.split(","):
                found |= declared(PROJECT["optional-dependencies"][extra])
        else:
            found.add(normal(name))
    return found


def test_every_import_is_declared():
    standard = set(sys.stdlib_module_names) | {"listwise"} | ASKED_FOR
    undeclared = set()
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        extras = [f"listwise[{extra}]" for extra in EXTRAS.get(part, ())]
        known = declared(PROJECT["dependencies"] + extras)
        undeclared |= {
            f"{path.relative_to(ROOT)}: {name}"
            for name in imported(path.read_text(encoding="utf-8"))
            if name not in standard and normal(NAMES.get(name, name)) not in known
        }
    assert not undeclared


def test_imports_are_seen_wherever_they_are():
    source = "import a.b\nfrom . import c\ndef f():\n    from d.e import (\n        g,\n    )\n"
    source += '    """An example:\n\n        import h\n    """\n    import i\n'
    assert list(imported(source)) == ["a", "d", "i"]
