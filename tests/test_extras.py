"""Packages beyond the core are optional: without one the rest works, and what needs it says so."""

import itertools
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
from hidden_modules import HIDDEN

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


def errors(folder: Path, core, others) -> list[dict[str, str | None]]:
    """The errors of uses without any optional package, and of those with all but some."""
    site = folder / "site"
    site.mkdir()
    start = "import os\nfrom hidden_modules import HIDDEN, hide\n"
    start += "hide(os.environ.get(HIDDEN, '').split())\n"
    (site / "sitecustomize.py").write_text(start)
    path = os.pathsep.join([str(site), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment[HIDDEN] = " ".join(OPTIONAL)
    cases = json.dumps([core, [(sorted(modules), names) for modules, names in others]])
    command = [sys.executable, str(HERE / "uses.py"), str(folder), cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
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


MODULES_NEEDED = sorted(set.union(*USES.values()))


@pytest.fixture(scope="module")
def found(folder):
    """What fails with the core alone, without each package, and with no package but those it needs.

    One process imports torch for all cases. It has nothing but the core until the first ones ended.
    """
    (folder / "shop").mkdir()
    core = [CORE + list(USES), *([command] for command in COMMANDS)]
    without_one = [
        ({module}, [name for name, needed in USES.items() if module in needed])
        for module in MODULES_NEEDED
    ]
    with_its_own = [(OPTIONAL - needed, [name]) for name, needed in USES.items()]
    results = iter(errors(folder, core, without_one + with_its_own))
    return [
        list(itertools.islice(results, len(part))) for part in (core, without_one, with_its_own)
    ]


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


def test_no_use_needs_more_than_its_packages(found):
    """With all other packages hidden: what works then works without each one of them too."""
    for name, failed in zip(USES, found[2], strict=True):
        assert failed == {name: None}


@pytest.mark.parametrize("extra", ENOUGH)
def test_each_extra_is_enough_for_its_part(extra):
    for use in ENOUGH[extra]:
        assert uses.NEEDS[use] <= EXTRAS[extra], use.__name__


def test_no_extra_is_empty_and_all_means_all():
    assert all(EXTRAS.values())
    assert EXTRAS["all"] == OPTIONAL - (EXTRAS["compare"] - EXTRAS["all"])
    assert {module for needed in USES.values() for module in needed} <= OPTIONAL
