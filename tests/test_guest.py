"""Listwise is a guest in a process: it uses public interfaces, and leaves everything as it is."""

import ast
import functools
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_statements import import_statements

import listwise

ROOT = Path(listwise.__file__).parent
# Private names of other packages that Listwise uses: why, and up to which version.
_HOOKS = "finds layers with hooks, which are not folded; the tests fail if a version changes it"
ALLOWED = {
    ("models/fusion.py", "torch._inductor.custom_graph_pass"): (
        "fuses convolutions, 1.24 × as fast; not used with a PyTorch newer than "
        "`optional.NEWEST_TORCH`"
    ),
    ("models/folding.py", "_forward_pre_hooks"): _HOOKS,
    ("models/folding.py", "_forward_hooks"): _HOOKS,
    ("models/embed.py", "_version"): "shows that weights changed, so that no old copy is used",
    ("models/folding.py", "_backward_pre_hooks"): _HOOKS,
    ("models/folding.py", "_backward_hooks"): _HOOKS,
    ("training/forward.py", "torch._dynamo.exc"): (
        "the only class of the compiler's errors; imported after an error, and a test of the step "
        "fails if a version changes it"
    ),
    ("data/workers.py", "_exit"): "ends a worker process whose main process was killed",
}
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def own_names() -> set[str]:
    """Private names that Listwise itself defines: functions, classes, and attributes."""
    found = set()
    for _, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found | NAMED_TUPLE


def private_uses() -> Iterator[tuple[str, str]]:
    """Yield file and name of each private module or attribute of another package."""
    own = own_names()
    for path, tree in files():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("listwise"):
                names = [str(node.module)]
                names += [alias.name for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and node.attr not in own:
                names = [node.attr]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                *("getattr", "setattr", "hasattr", "delattr"),
            ):
                name = getattr(node.args[1], "value", "")
                names = [name] if isinstance(name, str) and name not in own else []
            for name in names:
                if any(is_private(part) for part in name.split(".")) and name not in ("_thread",):
                    yield path, name


def test_private_names_of_other_packages_are_those_of_the_list() -> None:
    assert sorted(set(private_uses()) ^ ALLOWED.keys()) == []


# Runs before and after each part; a dictionary of what the process has in common for all code.
STATE = """
import gc, importlib, json, locale, logging, os, signal, sys, threading, warnings

def state():
    import faiss, numpy, torch
    found = {
        "environment": dict(os.environ),
        "gc": [gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()],
        "warnings": [repr(each) for each in warnings.filters] + [repr(warnings.showwarning)],
        "hooks": repr([sys.excepthook, threading.excepthook, sys.unraisablehook]),
        "signals": [repr(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
        "switch interval": sys.getswitchinterval(),
        "recursion": sys.getrecursionlimit(),
        "path": [sys.path, [repr(each) for each in sys.meta_path]],
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "logging": [logging.root.level, repr(logging.root.handlers)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "faiss": [getattr(faiss.cvar, name) for name in (
            "distance_compute_blas_threshold", "distance_compute_blas_query_bs",
            "distance_compute_blas_database_bs", "distance_compute_min_k_reservoir")],
        "faiss threads": faiss.omp_get_max_threads(),
        "torch threads": torch.get_num_threads(),
        "torch": [torch.is_grad_enabled(), str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()],
        "seed": torch.initial_seed(),
    }
    return json.loads(json.dumps(found))

def changes(before):
    now = state()
    return {name: [before[name], now[name]] for name in now if before[name] != now[name]}
"""
# Systems other than Linux have no such modules and functions.
PLATFORM = """
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("pread", "pwrite", "sysconf", "fork", "sched_getaffinity", "posix_fadvise", "getuid",
             "register_at_fork", "copy_file_range", "sendfile", "statvfs", "mkfifo", "fchmod"):
    if hasattr(os, name):
        delattr(os, name)
"""
IMPORTS = """
kept = {name: id(module) for name, module in sys.modules.items()}
failed = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in sys.modules:  # others are not installed
            failed[name] = f"{type(error).__name__}: {error}"
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
replaced = [name for name, old in kept.items() if id(sys.modules.get(name)) != old]
strange = [name for name, module in sys.modules.items()
           if type(module).__module__.startswith("listwise")]
"""


def modules() -> list[str]:
    found = pkgutil.walk_packages([str(ROOT)], "listwise.")
    return [each.name for each in found if not each.name.endswith("__main__")]


@functools.cache
def foreign() -> list[str]:
    """Every module of another package that Listwise imports somewhere."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in import_statements(path.read_text(encoding="utf-8")):
            names = [alias.name for alias in node.names]
            found.update(names if isinstance(node, ast.Import) else [str(node.module)])
    return sorted(name for name in found if not name.startswith("listwise"))


def run(*parts: str, arguments: tuple[str, ...] = ()) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP")}
    source = "\n".join([STATE, "for name in json.loads(sys.argv[1]):", "    try:"])
    source += "\n        importlib.import_module(name)\n    except ImportError:\n        pass\n"
    command = [sys.executable, "-c", "\n".join([source, *parts])]
    command += [json.dumps(foreign()), json.dumps(modules()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    report = "print(json.dumps([changes(before), failed, replaced, strange]))"
    return run(PLATFORM, "before = state()", IMPORTS, report)


@pytest.mark.slow
def test_every_module_can_be_imported_on_every_system(imported) -> None:
    assert not imported[1], "\n".join(map(str, imported[1].items()))


@pytest.mark.slow
def test_an_import_changes_nothing_in_the_process(imported) -> None:
    changed, _, replaced, strange = imported
    assert not changed, json.dumps(changed, indent=1)
    assert (replaced, strange) == ([], [])


USE = """
import listwise, torch
from listwise.losses import QuantizedAPLoss
folder, photos = sys.argv[3:]
run = listwise.train(photos, folder + "/run", backbone="test_resnet", weights="random", updates=1,
                     batch_size=8, device="cpu", progress=False)
model = listwise.load(folder + "/run/model", device="cpu")
vectors = model.encode([photos + "/class0/0.jpg"])
with listwise.open_index(folder + "/index", model) as index:
    index.add(photos)
    hits = index.search(photos + "/class0/0.jpg", k=3)
assert len(hits) == 3
"""


@pytest.mark.slow
def test_the_main_functions_change_nothing_in_the_process(photos, tmp_path) -> None:
    report = "print(json.dumps(changes(before)))"
    changed = run("before = state()", USE, report, arguments=(str(tmp_path), str(photos)))
    assert not changed, json.dumps(changed, indent=1)
