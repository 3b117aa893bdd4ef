import json

import pytest
from tiny_net import TINY_NET

from listwise.benchmarks import step
from listwise.benchmarks.search import COLUMNS, SearchMeasurement
from listwise.cli.benchmark.show import show

LOSS = "loss --sizes 32 --dim 4 --methods listwise --device cpu"
STEP = f"step --backbone {TINY_NET} --size 64 --batch 32 --micro-batch 8 --device cpu"
EXTRACTION = (
    f"extraction --photos 2 --backbone {TINY_NET} --width 64 --height 48 --shapes 0 --device cpu"
)


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (LOSS, {"listwise"}),
        (STEP, {step.PLAIN, step.FOLDED_FLOAT32}),
        (EXTRACTION, {"one at a time", "listwise extract"}),
    ],
)
def test_rows_for_programs(listwise, monkeypatch, command, names):
    # Half precision is slow on a CPU; the tests of this benchmark measure it.
    monkeypatch.setattr(step, "CPU_METHODS", (step.PLAIN, step.FOLDED_FLOAT32))
    code, out, _ = listwise("benchmark", *command.split(), "--json")
    assert code == 0
    assert names <= {json.loads(line)["method"] for line in out.splitlines()}


def test_a_table_for_people(listwise):
    code, out, _ = listwise("benchmark", "input", "--photos", 2, "--size", 32, "--device", "cpu")
    assert code == 0
    assert "Crops of 32 × 32" in out
    assert "torch" in out


def test_a_method_that_there_is_not(listwise):
    code, _, err = listwise(
        "benchmark", "loss", "--sizes", 32, "--methods", "no", "--device", "cpu"
    )
    assert code == 2
    assert err.startswith("listwise: unknown 'no' in --methods: choose from listwise; dense")


@pytest.mark.parametrize("name", ["loss", "evaluation", "search"])
def test_a_mistake_is_one_line(listwise, name):
    code, _, err = listwise("benchmark", name, "--sizes", "few")
    assert code == 2
    assert err == "listwise: --sizes must be whole numbers separated by commas, not 'few'\n"


def test_a_table_that_is_wider_than_the_terminal_keeps_its_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    row = SearchMeasurement(1000, "listwise, compressed", 0.5, 1, 2, 3, 4, 5, 6, "a long remark")
    show("Search", COLUMNS, [row], json=False)
    out = capsys.readouterr().out
    for text in ("1,000", "listwise, compressed", "0.500", "recall@10", "a long remark"):
        assert text in out
