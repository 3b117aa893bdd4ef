"""`--expected-skips`: a test that is skipped for another reason fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_of_a_gpu():
    pytest.skip("needs a CUDA GPU")

def test_of_a_browser():
    pytest.skip("no browser")
"""


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--expected-skips=CUDA|browser"], 0),
        (["--expected-skips=CUDA", "--numprocesses=1"], 1),
    ],
)
def test_an_unexpected_skip_fails_the_run(tmp_path, options, status):
    (tmp_path / "test_skipped.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    plugins = ["-p", "no:cacheprovider", "-p", "xdist"]
    command = [sys.executable, "-m", "pytest", *plugins, str(tmp_path), *options]
    # Other installed plugins would take seconds to import.
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("unexpected skips" in done.stdout) == bool(status)
    assert ("test_skipped.py:8: Skipped: no browser" in done.stdout) == bool(status)
