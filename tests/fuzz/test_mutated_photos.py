"""Damaged photos in every format: each is read or reported, and nothing else happens.

500 by default, 100,000 with LISTWISE_SOAK=1 (`make soak`).
"""

import json
import os
import resource
import sys

import numpy as np
import programs
import pytest
from mutations import write_mutated

from listwise.descriptors import DescriptorFile

COUNT = 100_000 if os.environ.get("LISTWISE_SOAK") else 500
# A file may need the memory of up to 128 million pixels before it is refused.
MEMORY = 3 * 2**30


@pytest.fixture(scope="module")
def mutated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "photos"
    assert len(list(write_mutated(folder, COUNT))) == COUNT
    return folder


def measured(*arguments):
    """Run a command, then write to stderr the most memory that it or its workers took."""
    try:
        programs.run_listwise(*arguments)
    finally:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = max(resource.getrusage(kind).ru_maxrss for kind in kinds)
        print(peak * 1024, file=sys.stderr)


def run(folder, *arguments):
    """The JSON that a command prints, and the most memory that it or its workers took."""
    process = programs.Program(measured, *map(str, arguments), "--json", cwd=folder)
    out, err = process.communicate(24 * 3600)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return json.loads(out), int(err.splitlines()[-1])


def test_index_and_extract_report_each_damaged_photo(mutated, model_folder, tmp_path):
    built, memory = run(tmp_path, "index", "build", "shop", mutated, "--model", model_folder)
    assert memory < MEMORY
    extracted, memory = run(tmp_path, "extract", model_folder, mutated, "out.parquet")
    assert memory < MEMORY
    file = DescriptorFile.open(tmp_path / "out.parquet")
    rows = file.read()
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    # Both read the same photos; the index keeps one entry for equal files.
    unreadable = {error.partition(":")[0] for error in extracted["unreadable"]}
    assert len(file) + len(extracted["unreadable"]) == COUNT
    assert len(unreadable) == len(extracted["unreadable"])
    assert len(built["errors"]) == len(extracted["unreadable"])
    assert 0 < len(file) < COUNT
