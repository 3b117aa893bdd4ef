from tiny_net import TINY_NET

from listwise.benchmarks import step, summary

TINY = {
    "loss": {"sizes": (32,), "dim": 4, "methods": ("listwise",)},
    "step": {"backbone": TINY_NET, "size": 64, "batch": 32, "micro_batch": 8},
    "input": {"photos": 2, "size": 32, "workers": (1,)},
    "extraction": {"photos": 2, "backbone": TINY_NET, "width": 64, "height": 48, "workers": 0},
}


def test_one_table_of_all(monkeypatch):
    # The others are measured in the tests of this benchmark.
    monkeypatch.setattr(step, "CPU_METHODS", (step.PLAIN,))
    lines = list(summary.run("cpu", TINY))
    assert {line.benchmark for line in lines} == {"loss", "step", "input", "extraction"}
    assert [line.benchmark for line in lines] == sorted(
        (line.benchmark for line in lines), key=list(TINY).index
    )
    for line in lines:
        assert line.what
        assert line.setting
        assert line.figure or line.beside
    (loss,) = (line for line in lines if line.benchmark == "loss")
    assert (loss.setting, loss.what) == ("B = 32", "listwise")
    assert loss.figure.endswith("s")
    assert loss.beside.endswith("MB")
    rates = [line.figure for line in lines if line.benchmark in ("step", "extraction")]
    assert all(rate.endswith(("/s", "only")) for rate in rates)
