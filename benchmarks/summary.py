"""Benchmark loss, training step, input and extraction on this machine, in one table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks import extraction, input, loss, step
from benchmarks.table import readable_seconds
from listwise.machine import Machine

# Sizes for a GPU, and sizes that two cores measure in a minute or two.
GPU_SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"sizes": (4096, 8192, 16384)},
    "step": {"backbone": "resnet101", "size": 800, "batch": 4096},
    "input": {"size": 800},
    "extraction": {"photos": 512, "backbone": "resnet101", "shapes": 0},
}
CPU_SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"sizes": (1024,), "methods": ("listwise", "dense transcription")},
    "step": {"backbone": "resnet18", "size": 96, "batch": 64, "micro_batch": 16},
    "input": {"photos": 32, "size": 800},
    "extraction": {"photos": 16, "backbone": "resnet18", "shapes": 0},
}


@dataclass(frozen=True)
class SummaryLine:
    """One result: the benchmark, its setting, the quantity, its value, and a second value."""

    benchmark: Annotated[str, "benchmark"]
    setting: Annotated[str, "setting"]
    what: Annotated[str, ""]
    figure: Annotated[str, "result", "{:>}"]
    beside: Annotated[str, "", "{:>}"] = ""


def run(device: str = "auto") -> Iterator[SummaryLine]:
    """Run all four benchmarks, one after the other."""
    device = Machine.detect(device).device
    settings = GPU_SETTINGS if device.startswith("cuda") else CPU_SETTINGS
    for row in loss.run(device=device, **settings["loss"]):
        time = row.skipped or readable_seconds(row.seconds or 0)
        memory = "" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.0f} MB"
        yield SummaryLine("loss", f"B = {row.batch}", row.method, time, memory)
    setting = "{backbone}, {size} px, B = {batch}".format(**settings["step"])
    for each in step.run(device, **settings["step"]):
        rate = f"{each.step:,.1f} images/s"
        beside = f"{each.ratio:.1f} ×, {each.of_limit:.0%} of the limit" if each.ratio else ""
        yield SummaryLine("step", setting, each.method, rate, beside)
    for way in input.run(device=device, **settings["input"]):
        what = f"{way.step}, {way.workers} at once" if way.workers > 1 else way.step
        rate = "" if way.per_second is None else f"{way.per_second:,.0f} photos/s"
        beside = "" if way.core_ms is None else f"{way.core_ms:.1f} ms of a core"
        crops = f"crops of {settings['input']['size']}"
        yield SummaryLine("input", crops, what, way.skipped or rate, beside)
    backbone = settings["extraction"]["backbone"]
    for found in extraction.run(device, **settings["extraction"]):
        what, rate = f"{found.method}, {found.precision}", f"{found.per_second:,.1f} photos/s"
        yield SummaryLine("extraction", backbone, what, rate, f"{found.speedup:.1f} ×")
