"""Packages beyond the core are optional: without one the rest works, and what needs it says so."""

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

from listwise.descriptors import DescriptorWriter, Model
from listwise.descriptors.storage import DescriptorHeader
from listwise.models import RetrievalNet
from listwise.optional import DISTRIBUTIONS

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
MODULES = {package: module for module, package in DISTRIBUTIONS.items()}
# What each extra alone, on top of the core, is enough for.
ENOUGH = {
    "train": [uses.config_file, uses.parquet_table, uses.crops, uses.training, uses.trained],
    "index": [uses.descriptor_file, uses.extract, uses.folder_index],
    "local": [uses.local_features, uses.codebook],
    "serve": [uses.folder_index, uses.local_features, uses.server],
    "milvus": [uses.milvus_file],
    "imagenet": [uses.packaged_weights],
}


def modules_of(extra: str) -> set[str]:
    """The modules that an extra brings, its own extras' among them."""
    found: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        name, others = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", line).groups()
        if name == "listwise":
            found.update(*map(modules_of, others.split(",")))
        else:
            found.add(MODULES.get(name, name))
    return found


# Those for users; `dev` and `docs` are for people who change the code.
EXTRAS = {
    extra: modules_of(extra)
    for extra in PROJECT["optional-dependencies"]
    if extra not in ("dev", "docs")
}
OPTIONAL = set.union(*EXTRAS.values())
USES = {use.__name__: needed for use, needed in uses.NEEDS.items()}
SLOW = "milvus_file"
CORE = [use.__name__ for use in uses.CORE]


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory) -> Path:
    """Small examples of what people have: photos, tables, a model, a descriptor file."""
    root = tmp_path_factory.mktemp("uses")
    (root / "photos").symlink_to(photos)
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


def environment(folder: Path, hidden: set[str]) -> dict[str, str]:
    """An environment for processes in which these modules cannot be imported."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import uses_hide\nuses_hide.hide({sorted(hidden)})\n")
    source = (HERE / "uses.py").read_text()
    start, end = source.index("class WithoutModules"), source.index("def loss(")
    (site / "uses_hide.py").write_text("import sys\n" + source[start:end])
    path = [str(site), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def errors(folder: Path, cases, **options) -> list[dict[str, str | None]]:
    command = [sys.executable, str(HERE / "uses.py"), str(folder)]
    cases = [(sorted(hidden), names) for hidden, names in cases]
    done = subprocess.run([*command, json.dumps(cases)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_names_what_to_install(error: str | None, hidden: set[str]) -> None:
    """One line: what for, which package, and the command that installs one that is hidden."""
    form = r"MissingDependencyError: \w.+ needs (\S+): pip install 'listwise\[(\w+)\]'"
    line = re.fullmatch(form, str(error))
    assert line, error
    package, extra = line.groups()
    assert MODULES.get(package, package) in hidden & EXTRAS[extra], error


def test_the_core_alone(folder):
    hidden = set(OPTIONAL)
    environ = environment(folder, hidden)
    (found,) = errors(folder, [(hidden, CORE + list(USES))], env=environ)
    assert {name: found[name] for name in CORE} == dict.fromkeys(CORE)
    for name in USES:
        assert_names_what_to_install(found[name], hidden)


def test_each_package_in_turn(folder):
    modules = sorted(set.union(*USES.values()))
    # Milvus takes long to start: that it works is left to the next test.
    cases = [
        ({module}, ["step", *(use for use in USES if use != SLOW or module in USES[SLOW])])
        for module in modules
    ]
    results = errors(folder, cases)
    for module, found in zip(modules, results, strict=True):
        wanting = {name for name, needed in USES.items() if module in needed}
        assert {name for name, error in found.items() if error} == wanting, (module, found)
        for name in wanting:
            assert_names_what_to_install(found[name], {module})


def test_each_extra_is_enough_for_its_part(folder):
    cases = [
        (OPTIONAL - EXTRAS[extra], [use.__name__ for use in enough])
        for extra, enough in ENOUGH.items()
    ]
    for extra, found in zip(ENOUGH, errors(folder, cases), strict=True):
        assert not any(found.values()), (extra, found)


def test_no_extra_is_empty_and_all_means_all():
    assert all(EXTRAS.values())
    assert EXTRAS["all"] == OPTIONAL - (EXTRAS["compare"] - EXTRAS["all"])
    assert {module for needed in USES.values() for module in needed} <= OPTIONAL


COMMANDS = {
    "train photos": 2,
    "extract model photos out.parquet": 2,
    "index build shop photos --model model": 2,
    "serve shop": 2,
    "local extract photos out.arrow": 2,
    "demo --folder toy": 2,
    "evaluate model photos": 0,
    "--help": 0,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_with_the_core_alone(command, folder):
    (folder / "shop").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "listwise", *command.split()],
        cwd=folder,
        env=environment(folder, OPTIONAL),
        capture_output=True,
        text=True,
    )
    assert done.returncode == COMMANDS[command], done.stderr
    if done.returncode:
        assert re.fullmatch(
            r"listwise: \w.+ needs \S+: pip install 'listwise\[\w+\]'\n", done.stderr
        )
