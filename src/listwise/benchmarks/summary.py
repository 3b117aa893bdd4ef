"""The way of a batch in one table: loss, training step, input and extraction on this machine."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

# What fits a GPU, and what two cores measure in a minute or two.
GPU_SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"sizes": (4096, 8192, 16384)},
    "step": {},
    "input": {},
    "extraction": {"photos": 512},
}
CPU_SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"sizes": (1024,), "methods": ("listwise", "dense transcription")},
    "step": {"backbone": "resnet18", "size": 96, "batch": 64, "micro_batch": 16},
    "input": {"photos": 32},
    "extraction": {"photos": 16, "backbone": "resnet18"},
}


@dataclass(frozen=True)
class Line:
    """One figure: which benchmark, what was measured, how much of what, and what to compare."""

    benchmark: str
    what: str
    figure: str
    beside: str = ""

    def as_json(self) -> dict[str, object]:
        """The line as plain data."""
        return asdict(self)


def run(device: str = "auto", settings: dict[str, dict[str, Any]] | None = None) -> Iterator[Line]:
    """Measure all four, one after the other.

    Args:
        device: "cpu", "cuda", or "auto", which takes a GPU if there is one.
        settings: arguments of each benchmark; those that suit the device by default.
    """
    from listwise.training.choices import Machine

    device = Machine.this(device).device
    settings = settings or (GPU_SETTINGS if device.startswith("cuda") else CPU_SETTINGS)
    yield from _loss(device, **settings["loss"])
    yield from _step(device, **settings["step"])
    yield from _input(device, **settings["input"])
    yield from _extraction(device, **settings["extraction"])


def _loss(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import loss

    kind = "cuda" if device.startswith("cuda") else "cpu"
    for row in loss.run(device=kind, **settings):
        what = f"{row.method}, B = {row.batch}"
        if row.seconds is None or row.extra_bytes is None:
            yield Line("loss", what, row.skipped or "")
        else:
            yield Line("loss", what, milliseconds(row.seconds), f"{row.extra_bytes / 1e6:,.0f} MB")


def _step(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import step

    for row in step.run(device, **settings):
        if row.skipped:
            yield Line("step", row.method, row.skipped)
            continue
        beside = f"{row.ratio:.1f} ×, {100 * row.of_limit:.0f} % of the limit"
        yield Line("step", row.method, f"{row.step:,.1f} images/s", beside)


def _input(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import input as input_side

    for row in input_side.run(device=device, **settings):
        what = f"{row.step}, {row.workers} workers" if row.workers else row.step
        if row.per_second is not None:
            figure = f"{row.per_second:,.0f} photos/s"
        else:
            figure = row.skipped or ""
        beside = "" if row.core_ms is None else f"{row.core_ms:.1f} ms of a core"
        yield Line("input", what, figure, beside)


def _extraction(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import extraction

    for row in extraction.run(device, **settings):
        figure = f"{row.per_second:,.1f} photos/s"
        yield Line(
            "extraction", f"{row.method}, {row.precision}", figure, f"{row.times_the_loop:.1f} ×"
        )


def milliseconds(seconds: float) -> str:
    """A time for people: 1.52 ms, 14.2 ms, 1.04 s."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
