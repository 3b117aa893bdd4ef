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
    "local": [uses.local_features, uses.labels, uses.codebook],
    "serve": [uses.folder_index, uses.local_features, uses.server],
    "milvus": [uses.milvus_file],
    "export": [uses.onnx_file],
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


def test_the_core_alone(folder):
    """In a process that has never imported anything else."""
    hidden = set(OPTIONAL)
    (folder / "shop").mkdir()
    cases = [(hidden, CORE + list(USES)), *((hidden, [command]) for command in COMMANDS)]
    found, *commands = errors(folder, cases, env=environment(folder, hidden))
    assert {name: found[name] for name in CORE} == dict.fromkeys(CORE)
    for name in USES:
        assert_names_what_to_install(found[name], hidden)
    line = r"listwise: \w.+ needs \S+: pip install 'listwise\[\w+\]'\n"
    for (command, expected), result in zip(COMMANDS.items(), commands, strict=True):
        code, said = result[command]
        assert code == expected, (command, said)
        assert re.fullmatch(line if code else "", said), (command, said)


MODULES_NEEDED = sorted(set.union(*USES.values()))


@pytest.fixture(scope="module")
def found(folder):
    """What fails without each package, and what fails with no package but those it needs."""
    without_one = [
        ({module}, [name for name, needed in USES.items() if module in needed])
        for module in MODULES_NEEDED
    ]
    with_its_own = [(OPTIONAL - needed, [name]) for name, needed in USES.items()]
    results = errors(folder, without_one + with_its_own)  # one process imports torch for all
    return results[: len(without_one)], results[len(without_one) :]


def test_each_package_in_turn(found):
    """Without one package, what needs it names it; `test_the_core_alone` has what needs none."""
    for module, failed in zip(MODULES_NEEDED, found[0], strict=True):
        assert failed, module
        for error in failed.values():
            assert_names_what_to_install(error, {module})


def test_no_use_needs_more_than_its_packages(found):
    """With all other packages hidden: what works then works without each one of them too."""
    for name, failed in zip(USES, found[1], strict=True):
        assert failed == {name: None}


@pytest.mark.parametrize("extra", ENOUGH)
def test_each_extra_is_enough_for_its_part(extra):
    for use in ENOUGH[extra]:
        assert uses.NEEDS[use] <= EXTRAS[extra], use.__name__


def test_no_extra_is_empty_and_all_means_all():
    assert all(EXTRAS.values())
    assert EXTRAS["all"] == OPTIONAL - (EXTRAS["compare"] - EXTRAS["all"])
    assert {module for needed in USES.values() for module in needed} <= OPTIONAL
