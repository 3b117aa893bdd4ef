"""The import graph: packages import those above them, without cycles, and load little."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from import_statements import import_statements

import listwise

ROOT = Path(listwise.__file__).parent
# From the first to the last: a package imports those before it.
ORDER = [
    "losses",
    "evaluation",
    "data",
    "pages",
    "models",
    "training",
    "descriptors",
    "local",
    "search",
    "results",
    "labeling",
    "feedback",
    "studies",
    "demo",
    "serving",
    "api",
    "cli",
    "__main__",
]
# Small modules that everything may import, and that import one another in this order.
COMMON = [
    "errors",
    "kernel_trial",
    "optional",
    "machine",
    "files",
    "blocks",
    "plugins",
    "settings",
    "calibration",
    "progress",
    "client",
    "servers",
]


@functools.cache
def imports() -> list[tuple[str, str]]:
    """Every import of one module of the package by another, wherever in a file it stands."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        importer = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in import_statements(file.read_text(encoding="utf-8")):
            if isinstance(node, ast.Import):
                found += [(importer, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{importer} imports relatively"
                for alias in node.names:
                    below = f"{node.module}.{alias.name}"
                    found.append((importer, below if is_module(below) else str(node.module)))
    return [(a, b) for a, b in found if b.split(".")[0] == "listwise" and a != "listwise"]


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def place(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_packages_import_only_those_above_them() -> None:
    rank = {name: number for number, name in enumerate([*COMMON, *ORDER])}
    wrong = [
        f"{importer} imports {imported}"
        for importer, imported in imports()
        if place(imported) and rank[place(imported)] > rank[place(importer)]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_few_modules() -> None:
    """A module is one idea that somebody looks for; a part of an idea belongs into its module."""
    assert len(list(ROOT.rglob("*.py"))) <= 220


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for importer, imported in imports():
        # A package's own __init__ collects what is in it; that is no cycle.
        if not importer.startswith(imported + ".") and not imported.startswith(importer + "."):
            graph.setdefault(importer, set()).add(imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for imported in graph.get(module, ()):
            visit(imported, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())


# Packages one after the other in one process; each prints a line of what is loaded then.
LOADED = """
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    print(*[name for name in sys.modules if name.startswith("listwise") or "." not in name])
"""


@pytest.mark.parametrize(
    "packages",
    [
        {
            "listwise": {"torch", "numpy", "PIL", "timm"},
            "listwise.evaluation": {"torch", "timm", "PIL", "pydantic"},
            "listwise.data": {"torch", "timm", "cv2"},
            "listwise.search.index": {"torch", "timm", "cv2", "faiss", "pyarrow"},
        },
        # timm itself loads yaml, through huggingface_hub.
        pytest.param(
            {
                "listwise.losses": {"timm", "torchvision", "yaml", "pydantic", "PIL", "cv2"},
                "listwise.descriptors": {"cv2", "faiss", "pyarrow"},
                "listwise.search": {*("fastapi", "pymilvus", "tensorboard", "cv2", "faiss")},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["without torch", "with torch"],
)
def test_importing_a_package_loads_only_what_it_needs(packages: dict[str, set[str]]) -> None:
    source = LOADED.format(modules=list(packages))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    below = {"listwise." + name for name in ("training", "studies", "demo", "serving", "cli")}
    for (module, forbidden), line in zip(packages.items(), done.stdout.splitlines(), strict=True):
        loaded = line.split()
        assert module in loaded
        assert not forbidden & set(loaded)
        assert not [name for name in loaded if ".".join(name.split(".")[:2]) in below]
        if module == "listwise.losses":
            assert {name for name in loaded if name.count(".") == 1} <= {
                "listwise.errors",
                "listwise.losses",
                "listwise.optional",
            }
