"""Off-the-shelf poolings (the "(O)" rows of Table 2): one network, five ways to pool it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import Model, Whitening
from listwise.errors import InputError
from listwise.files import write_text
from listwise.machine import Machine
from listwise.models import POOLINGS, RetrievalNet
from listwise.models.pooling import make_pooling
from listwise.results.describe import BenchmarkDescriptors, Descriptors, describe_benchmark
from listwise.studies.outcome import column_name
from listwise.studies.outputs import PLOT_FILE, RESULTS_FILE, TABLE_FILE, write_csv
from listwise.studies.plots import Panel, Point, Spread, draw

VARIANTS = ("plain", "whitened", "whitened + αQE")


@dataclass(frozen=True)
class PoolingRow:
    """mAP of one pooling, plain, whitened or whitened and expanded, by protocol."""

    pooling: str
    variant: str
    mean_average_precision: dict[str, float]


def compare_poolings(
    benchmark: Benchmark,
    whiten_on: Images,
    backbone: str = "resnet101",
    weights: str | Path = "auto",
    *,
    poolings: Sequence[str] = tuple(POOLINGS),
    dim: int | None = None,
    max_side: int | None = None,
    device: str = "auto",
    on_progress: Callable[[int], object] = lambda count: None,
    on_unreadable: Callable[[tuple[str, ...]], object] = lambda errors: None,
) -> list[PoolingRow]:
    """Evaluate each pooling on a benchmark; the backbone sees every photo once for all of them.

    The whitening is learned on `whiten_on`, other photos than the benchmark's, and keeps `dim`
    dimensions, all that vary by default; `on_unreadable` is called with the errors of those photos
    that were left out. `weights` are those of `RetrievalNet`.
    """
    if benchmark.labelled:
        raise InputError(f"{benchmark.name} is a labelled set: this takes a judged benchmark")
    net = RetrievalNet(backbone, _SeveralPoolings(poolings), weights=weights)
    model = Model(net.to(Machine.detect(device).device).eval())
    how: Any = {"max_side": max_side, "precision": "float32"}
    described = describe_benchmark(model, benchmark, on_progress, **how)
    others = model.describe(whiten_on, on_progress=on_progress, **how)
    if not others.kept:
        raise InputError(f"no photo to learn the whitening on can be read: {others.errors[0]}")
    if others.errors:
        on_unreadable(tuple(others.errors))
    rows = []
    for place, pooling in enumerate(poolings):

        def part(vectors: Descriptors, place: int = place) -> Descriptors:
            own: Descriptors = np.split(vectors, len(poolings), axis=1)[place]
            return own * np.float32(len(poolings) ** 0.5)  # unit vectors again

        plain = replace(
            described, queries=part(described.queries), database=part(described.database)
        )
        rows += _rows(pooling, plain, Whitening.learn([part(others.descriptors)], dim))
    return rows


class _SeveralPoolings(nn.Module):
    """Unit descriptors of several poolings side by side: [B, C, h, w] -> [B, C * poolings]."""

    def __init__(self, poolings: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_pooling(name) for name in poolings)

    def forward(self, features: Tensor) -> Tensor:
        rows = [nn.functional.normalize(layer(features.float())) for layer in self.layers]
        return torch.cat(rows, dim=1)


def _rows(pooling: str, plain: BenchmarkDescriptors, whitening: Whitening) -> list[PoolingRow]:
    white = plain.whiten(whitening)
    results = (plain.evaluate(), white.evaluate(), white.evaluate(expand=True))
    return [
        PoolingRow(pooling, variant, {protocol: result.mAP for protocol, result in found.items()})
        for variant, found in zip(VARIANTS, results, strict=True)
    ]


def poolings_table(rows: Sequence[PoolingRow]) -> str:
    """A Markdown table of mAP in percent."""
    protocols = list(rows[0].mean_average_precision)
    lines = [f"| pooling | | {' | '.join(protocols)} |", f"|---|---|{'---:|' * len(protocols)}"]
    for row in rows:
        values = " | ".join(f"{100 * row.mean_average_precision[p]:.1f}" for p in protocols)
        lines.append(f"| {row.pooling} | {row.variant} | {values} |")
    return "\n".join(lines) + "\n"


def write_poolings(out: Path, rows: Sequence[PoolingRow], about: str, command: str = "") -> None:
    """Write `results.csv`, `table.md` and `plot.svg` into a folder, which is made if needed.

    `about` says which network on which benchmark, `command` what made the rows.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_csv(
        out / RESULTS_FILE,
        [
            {
                "pooling": row.pooling,
                "variant": row.variant,
                **{column_name(p): value for p, value in row.mean_average_precision.items()},
            }
            for row in rows
        ],
    )
    made_by = f"\n```sh\n{command}\n```\n" if command else ""
    text = f"# Poolings\n\n{about}; mAP in percent.\n\n{poolings_table(rows)}{made_by}"
    write_text(out / TABLE_FILE, text)
    panels = [
        Panel(
            f"{p} mAP, %",
            [
                Point(f"{row.pooling}, {row.variant}", Spread((row.mean_average_precision[p],)))
                for row in rows
            ],
        )
        for p in rows[0].mean_average_precision
    ]
    write_text(out / PLOT_FILE, draw(f"Poolings: {about}", panels))
