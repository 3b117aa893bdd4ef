"""The way of a batch in one table: loss, training step, input and extraction on this machine."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

# What fits a GPU, and what two cores measure in a minute or two.
GPU_SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"sizes": (4096, 8192, 16384)},
    "step": {"backbone": "resnet101", "size": 800, "batch": 4096},
    "input": {"size": 800},
    "extraction": {"photos": 512, "backbone": "resnet101"},
}
CPU_SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"sizes": (1024,), "methods": ("listwise", "dense transcription")},
    "step": {"backbone": "resnet18", "size": 96, "batch": 64, "micro_batch": 16},
    "input": {"photos": 32, "size": 800},
    "extraction": {"photos": 16, "backbone": "resnet18"},
}


@dataclass(frozen=True)
class Line:
    """One figure: which benchmark, at which setting, what was measured, and what goes with it."""

    benchmark: str
    setting: str
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
    from listwise.machine import Machine

    device = Machine.detect(device).device
    settings = settings or (GPU_SETTINGS if device.startswith("cuda") else CPU_SETTINGS)
    yield from _loss(device, **settings["loss"])
    yield from _step(device, **settings["step"])
    yield from _input(device, **settings["input"])
    yield from _extraction(device, **settings["extraction"])


def _loss(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import loss

    kind = "cuda" if device.startswith("cuda") else "cpu"
    for row in loss.run(device=kind, **settings):
        figure, beside = row.skipped or "", ""
        if row.seconds is not None and row.extra_bytes is not None:
            figure, beside = milliseconds(row.seconds), f"{row.extra_bytes / 1e6:,.0f} MB"
        yield Line("loss", f"B = {row.batch}", row.method, figure, beside)


def _step(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import step

    setting = "{backbone}, {size} px, B = {batch}".format(**settings)
    for row in step.run(device, **settings):
        figure, beside = row.skipped or "", ""
        if not row.skipped:
            figure = f"{row.step:,.1f} images/s"
            beside = f"{row.ratio:.1f} ×, {100 * row.of_limit:.0f} % of the limit"
        yield Line("step", setting, row.method, figure, beside)


def _input(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import input as input_side

    for row in input_side.run(device=device, **settings):
        what = f"{row.step}, {row.workers} at once" if row.workers > 1 else row.step
        figure = row.skipped or ""
        if row.per_second is not None:
            figure = f"{row.per_second:,.0f} photos/s"
        beside = "" if row.core_ms is None else f"{row.core_ms:.1f} ms of a core"
        yield Line("input", f"crops of {settings['size']}", what, figure, beside)


def _extraction(device: str, **settings: Any) -> Iterator[Line]:
    from listwise.benchmarks import extraction

    for row in extraction.run(device, **settings):
        what, figure = f"{row.method}, {row.precision}", f"{row.per_second:,.1f} photos/s"
        beside = f"{row.times_the_loop:.1f} ×"
        yield Line("extraction", settings["backbone"], what, figure, beside)


def milliseconds(seconds: float) -> str:
    """A time for people: 1.52 ms, 14.2 ms, 1.04 s."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
