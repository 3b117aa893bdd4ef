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
    "models",
    "training",
    "descriptors",
    "local",
    "search",
    "results",
    "labeling",
    "feedback",
    "studies",
    "serving",
    "benchmarks",
    "api",
    "cli",
    "__main__",
]
# Small modules that everything may import, and that import one another in this order.
COMMON = [
    "errors",
    "kernel_trial",
    "optional",
    "imports",
    "machine",
    "files",
    "checksums",
    "columns",
    "blocks",
    "plugins",
    "settings",
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


def test_every_package_has_its_place_in_the_order() -> None:
    packages = {
        path.stem
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert packages - {"__init__"} <= {*ORDER, *COMMON}


def test_packages_import_only_those_above_them() -> None:
    rank = {name: number for number, name in enumerate([*COMMON, *ORDER])}
    wrong = [
        f"{importer} imports {imported}"
        for importer, imported in imports()
        if place(imported) and rank[place(imported)] > rank[place(importer)]
    ]
    assert not wrong, "\n".join(wrong)


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
# The compiler takes seconds to import. torchvision, timm and losses need it only in compiled code.
COMPILER = """
import listwise.models
assert "timm" in sys.modules
assert "torch._dynamo" not in sys.modules
assert "sympy" not in sys.modules

import torch
from listwise.losses import QuantizedAPLoss, quantized_ap
from listwise.losses.histogram import reference_histograms
from listwise.models import RetrievalNet
from listwise.models.folding import FoldedCopy
from listwise.models.max_pool import FastMaxPool
from listwise.training.adam import Adam
net = RetrievalNet("test_resnet", weights="random")
assert FoldedCopy(net, torch.rand(1, 3, 32, 32), None).folds
weight = torch.nn.Parameter(torch.rand(1, 64, 4, 4))
optimizer = Adam([weight], lr=0.1)
FastMaxPool()(weight).sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
assert weight.grad is None
labels = torch.tensor([0, 0, 1, 1])
def losses():
    points = torch.nn.functional.normalize(torch.rand(4, 8), dim=1).requires_grad_()
    QuantizedAPLoss()(points, labels).backward()
    quantized_ap(points @ points.T, labels == labels[:, None]).sum().backward()
    reference_histograms(points, labels, points.detach(), labels, 20).sum().backward()
losses()
assert "torch._dynamo" not in sys.modules
assert "sympy" not in sys.modules

import torchvision
from timm.models.naflexvit import NaFlexRopeIterator
assert "call" not in NaFlexRopeIterator.__next__.__name__
images = torch.rand(1, 3, 8, 8)
boxes = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]])
assert torchvision.ops.roi_align(images, boxes, 2).shape == (1, 3, 2, 2)
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert torch.equal(compiled(images), images + 1)
assert torch._dynamo.utils.is_compile_supported("cpu") in (True, False)
assert torch.compiler.disable(lambda: 3)() == 3
losses()
optimizer.step()
optimizer.zero_grad()
"""
# LanceDB imports the client of a web service; it is loaded when it is used.
LANCE_CLIENT = """
import listwise.search.folder.table, lancedb
assert "lance_namespace_urllib3_client.models" in sys.modules
assert "lance_namespace_urllib3_client.api" not in sys.modules
import lance_namespace_urllib3_client as client
assert client.models is sys.modules["lance_namespace_urllib3_client.models"]
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:  # all threads find the name while one of them loads it
    found = list(pool.map(lambda _: client.ApiClient.__module__, range(8)))
assert set(found) == {"lance_namespace_urllib3_client.api_client"}
assert client.TableApi is client.api.TableApi
import os  # a worker that decodes photos is a fork
if not (worker := os.fork()):
    os._exit(0)
os.waitpid(worker, 0)
"""


@pytest.mark.parametrize(
    ("packages", "further"),
    [
        (
            {
                "listwise": {"torch", "numpy", "PIL", "timm"},
                "listwise.evaluation": {"torch", "timm", "PIL", "pydantic"},
            },
            "",
        ),
        # timm itself loads yaml, through huggingface_hub.
        pytest.param(
            {
                "listwise.losses": {"timm", "torchvision", "yaml", "pydantic", "PIL", "cv2"},
                "listwise.descriptors": {"cv2", "faiss", "lancedb", "pyarrow"},
                "listwise.search": {
                    *("fastapi", "pymilvus", "tensorboard", "cv2", "faiss", "lancedb")
                },
            },
            COMPILER + LANCE_CLIENT,  # in the same process, because torch takes seconds to import
            marks=pytest.mark.slow,
        ),
    ],
    ids=["without torch", "with torch"],
)
def test_importing_a_package_loads_only_what_it_needs(
    packages: dict[str, set[str]], further: str
) -> None:
    source = LOADED.format(modules=list(packages)) + further
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fork" not in done.stderr
    below = {"listwise." + name for name in ("training", "studies", "serving", "cli", "benchmarks")}
    for (module, forbidden), line in zip(packages.items(), done.stdout.splitlines(), strict=True):
        loaded = line.split()
        assert module in loaded
        assert not forbidden & set(loaded)
        assert not [name for name in loaded if ".".join(name.split(".")[:2]) in below]
        if module == "listwise.losses":
            assert {name for name in loaded if name.count(".") == 1} <= {
                "listwise.errors",
                "listwise.imports",
                "listwise.losses",
                "listwise.optional",
            }


def test_an_index_that_does_not_exist_is_refused_before_slow_imports() -> None:
    source = """
import sys
from listwise.cli.main import main
sys.argv = ["listwise", "index", "info", "nowhere"]
try:
    main()
except SystemExit as end:
    print(end.code, {"torch", "numpy", "fastapi", "faiss", "lancedb"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stderr.startswith("listwise: no index at nowhere: create one with"), done
    assert done.stdout.strip() == "2 set()"
