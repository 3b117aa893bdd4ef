"""The library that disturbs a process, and an index to disturb."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from index_examples import *  # noqa: F403

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def crash_point(tmp_path_factory) -> Path:
    """The library that kills a process at a chosen write."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("crash") / "crash_point.so"
    source = str(HERE / "crash_point.c")
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
    command = [compiler, *options, "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library
