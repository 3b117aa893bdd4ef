"""Packages beyond the core are optional: without one the rest works, and what needs it says so.

What the package imports is what it declares.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uses
from import_statements import import_statements

from listwise.descriptors import DescriptorWriter, Model
from listwise.descriptors.storage import DescriptorHeader
from listwise.models import RetrievalNet
from listwise.optional import DISTRIBUTIONS

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCE = ROOT / "src" / "listwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {package: module for module, package in DISTRIBUTIONS.items()}
# What each extra alone, on top of the core, is enough for.
ENOUGH = {
    "train": ["config_file", "parquet_table", "crops", "trained"],
    "index": ["descriptor_file", "extract", "folder_index"],
    "local": ["local_features", "labels", "codebook"],
    "serve": ["folder_index", "local_features", "server"],
    "milvus": ["milvus_file"],
    "export": ["onnx_file"],
    "imagenet": ["packaged_weights"],
}


# Packages whose modules have another name, or come with what is declared.
NAMES = {"PIL": "pillow", "starlette": "fastapi", "triton": "torch", **DISTRIBUTIONS}
NAMES |= {"pydantic_core": "pydantic", "markupsafe": "jinja2"}
# The extras whose packages a part of the source may import; the others do with the core.
USED_BY = {
    "benchmarks": ("all", "compare"),
    "cli": ("serve",),
    "data": ("train", "heic"),
    "demo": ("train",),
    "descriptors": ("export", "index"),
    "local": ("local",),
    "losses": ("compare",),
    "models": ("export", "imagenet"),
    "search": ("index", "milvus", "watch"),
    "serving": ("serve",),
    "settings": ("train",),
    "studies": ("train", "compare"),
    "training": ("train",),
}
# Optional: one data set needs scipy, and torchcodec replaces a decoder where it is installed.
ASKED_FOR = {"scipy", "torchcodec"}


def module_of(package):
    return MODULES.get(package, package.replace("-", "_"))


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


# Those for users; `dev` and `docs` are for people who change the code.
EXTRAS = {
    extra: {module_of(package) for package in declared([f"listwise[{extra}]"])}
    for extra in PROJECT["optional-dependencies"]
    if extra not in ("dev", "docs")
}
OPTIONAL = set.union(*EXTRAS.values())
USES = {use.__name__: needed for use, needed in uses.NEEDS.items()}
CORE = [use.__name__ for use in uses.CORE]


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory) -> Path:
    """Small examples of what people have: photos, tables, a model, a descriptor file."""
    root = tmp_path_factory.mktemp("uses")
    (root / "photos").symlink_to(photos)
    for kind in range(3):
        (root / "few" / f"class{kind}").mkdir(parents=True)
        for number in range(2):
            name = Path(f"class{kind}", f"{number}.jpg")
            (root / "few" / name).symlink_to(photos / name)
    (root / "config.yaml").write_text("updates: 3\n")
    paths = sorted(photos.rglob("*.jpg"))
    labels = [path.parent.name for path in paths]
    table = pa.table({"path": [str(path) for path in paths], "label": labels})
    pq.write_table(table, root / "labels.parquet")
    Model(RetrievalNet("test_resnet", weights="random")).save(root / "model")
    header = DescriptorHeader(model="demo")
    with DescriptorWriter(root / "descriptors.parquet", 4, header) as writer:
        writer.write(["a.jpg"], [(64, 48)], np.ones((1, 4), np.float32) / 2)
    return root


def errors(folder: Path, cases) -> list[dict[str, str | None]]:
    """The errors of uses without some modules: for each case, its modules and its uses."""
    listed = json.dumps([(sorted(modules), names) for modules, names in cases])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "uses.py"), str(folder), listed]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_names_what_to_install(error: str | None, hidden: set[str]) -> None:
    """One line: what for, which package, and the command that installs one that is hidden."""
    form = r"MissingDependencyError: \w.+ needs (\S+): pip install 'listwise\[(\w+)\]'"
    line = re.fullmatch(form, str(error))
    assert line, error
    package, extra = line.groups()
    assert module_of(package) in hidden & EXTRAS[extra], error


COMMANDS = {
    "listwise train photos": 2,
    "listwise extract model photos out.parquet": 2,
    "listwise index build shop photos --model model": 2,
    "listwise serve shop": 2,
    "listwise export model model.onnx": 2,
    "listwise local extract photos out.arrow": 2,
    "listwise demo --folder toy": 2,
    "listwise evaluate model photos": 0,
    "listwise --help": 0,
}


MODULES_NEEDED = sorted(set.union(*USES.values()))


@pytest.fixture(scope="module")
def found(folder):
    """What fails with the core alone, without each package, and with each extra alone.

    One process imports torch for all cases. It has nothing but the core until the first ones ended.
    """
    (folder / "shop").mkdir()
    core = [(OPTIONAL, names) for names in (CORE + list(USES), *([each] for each in COMMANDS))]
    without_one = [
        ({module}, [name for name, needed in USES.items() if module in needed])
        for module in MODULES_NEEDED
    ]
    with_an_extra = [(OPTIONAL - EXTRAS[extra], names) for extra, names in ENOUGH.items()]
    results = errors(folder, core + without_one + with_an_extra)
    return results[: len(core)], results[len(core) : -len(ENOUGH)], results[-len(ENOUGH) :]


def test_the_core_alone(found):
    """In a process that has never imported anything else."""
    alone, *commands = found[0]
    assert {name: alone[name] for name in CORE} == dict.fromkeys(CORE)
    for name in USES:
        assert_names_what_to_install(alone[name], OPTIONAL)
    line = r"listwise: \w.+ needs \S+: pip install 'listwise\[\w+\]'\n"
    for (command, expected), result in zip(COMMANDS.items(), commands, strict=True):
        code, said = result[command]
        assert code == expected, (command, said)
        assert re.fullmatch(line if code else "", said), (command, said)


def test_each_package_in_turn(found):
    """Without one package, what needs it names it; `test_the_core_alone` has what needs none."""
    for module, failed in zip(MODULES_NEEDED, found[1], strict=True):
        assert failed, module
        for error in failed.values():
            assert_names_what_to_install(error, {module})


def test_each_extra_is_enough_for_its_part(found):
    """With the packages of all other extras hidden."""
    for names, failed in zip(ENOUGH.values(), found[2], strict=True):
        assert failed == dict.fromkeys(names)


def imported(source):
    """Top-level names of every import, also of those inside functions."""
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]


def test_every_import_is_declared():
    standard = set(sys.stdlib_module_names) | {"listwise", "benchmarks"} | ASKED_FOR
    undeclared = set()
    for path in [*SOURCE.rglob("*.py"), *ROOT.glob("benchmarks/*.py")]:
        part = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT).parts[0]
        part = part.removesuffix(".py")
        extras = [f"listwise[{extra}]" for extra in USED_BY.get(part, ())]
        known = declared(PROJECT["dependencies"] + extras)
        undeclared |= {
            f"{path.relative_to(ROOT)}: {name}"
            for name in imported(path.read_text(encoding="utf-8"))
            if name not in standard and normal(NAMES.get(name, name)) not in known
        }
    assert not undeclared
