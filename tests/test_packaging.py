"""What the package imports is what it declares."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Packages whose modules have another name; Triton and Starlette come with what is declared.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "faiss": "faiss-cpu",
    "grpc": "grpcio",
    "starlette": "fastapi",
    "triton": "torch",
    "yaml": "pyyaml",
}
# Needed for one data set; where it is missing, that is said with what to install.
ASKED_FOR = {"scipy"}


def imported(source):
    """Top-level names of every import, also of those inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # What only developers install, no user has.
    lines = [line for name, extra in extras.items() if name != "dev" for line in extra]
    return {normal(re.match(r"[\w.-]+", line).group()) for line in project["dependencies"] + lines}


def test_every_import_is_declared():
    known = set(sys.stdlib_module_names) | {"listwise"} | ASKED_FOR
    undeclared = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "src").rglob("*.py")
        for name in imported(path.read_text(encoding="utf-8"))
        if name not in known and normal(DISTRIBUTIONS.get(name, name)) not in declared()
    }
    assert not undeclared


def test_imports_are_seen_wherever_they_are():
    source = "import a.b\nfrom . import c\ndef f():\n    from d.e import g\n"
    assert list(imported(source)) == ["a", "d"]
