import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from listwise.benchmarks import evaluation as benchmark
from listwise.cli.benchmark import app
from listwise.errors import InputError


def test_both_methods_find_the_same_figures(tmp_path: Path) -> None:
    file = tmp_path / "database.npy"
    benchmark.write_database(file, 9000, 32)
    assert np.load(file, mmap_mode="r").shape == (9000, 32)
    for expand in (False, True):
        counted = benchmark.listwise_method(file, expand, benchmark.Clock())
        sorted_ = benchmark.plain_method(file, expand, benchmark.Clock())
        assert counted == pytest.approx(sorted_, abs=1e-6)
        # A task that is neither solved nor hopeless, so that agreeing says something.
        assert 0.05 < counted["hard"] < counted["easy"] < 0.999


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    methods = {name: benchmark.METHODS[name] for name in ("plain", "listwise")}
    monkeypatch.setattr(benchmark, "METHODS", methods)  # each one costs a process
    return ["evaluation", "--sizes", "6000", "--dim", "16", "--folder", str(tmp_path)]


def test_the_command_prints_rows(tmp_path: Path, command: list[str]) -> None:
    found = CliRunner().invoke(app, [*command, "--json"])
    plain, counted = (json.loads(line) for line in found.stdout.splitlines())
    assert (counted["method"], plain["method"]) == ("listwise", "plain")
    assert counted["seconds"] > 0
    assert counted["faster"] == pytest.approx(plain["seconds"] / counted["seconds"])
    assert counted["apart"] < 1e-6
    assert counted["figures"] == pytest.approx(plain["figures"], abs=1e-6)
    assert list(plain["parts"]) == ["load", "scores", "sort", "walk"]
    assert list(tmp_path.iterdir()) == []  # the descriptors are gone again


def test_the_command_prints_a_table(command: list[str]) -> None:
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, command).stdout
    plain, counted = (line for line in printed.splitlines() if line.startswith("│"))
    assert counted.split("│")[5] == plain.split("│")[5]
    assert counted.split("│")[5].count("/") == 2
    assert "×" in counted
    assert "×" not in plain


def test_too_small_databases_are_refused() -> None:
    with pytest.raises(InputError, match="the benchmark itself has 5000 images"):
        next(benchmark.run([100]))
