"""Compare poolings of an untrained network (the "(O)" rows of Table 2)."""

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
    """mAP of one pooling by protocol; `variant` is one of `VARIANTS`."""

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
    """Evaluate several poolings on a benchmark, with one pass of the backbone over the photos.

    Args:
        benchmark: a benchmark with judged queries.
        whiten_on: other photos, on which the whitening is learned.
        backbone: name of a backbone of timm.
        weights: weights of the backbone, as in `RetrievalNet`.
        poolings: names of the poolings.
        dim: dimensions after whitening; by default all that vary.
        max_side: long side that larger photos are reduced to; original size by default.
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        on_progress: called with the number of photos just described.
        on_unreadable: called with the errors of photos of `whiten_on` that were left out.

    Returns:
        Rows for each pooling: plain, whitened, and whitened with query expansion.
    """
    if benchmark.labelled:
        raise InputError(
            f"{benchmark.name} is a labelled set: give a benchmark with judged queries"
        )
    net = RetrievalNet(backbone, _SeveralPoolings(poolings), weights=weights)
    model = Model(net.to(Machine.detect(device).device).eval())
    how: Any = {"max_side": max_side, "precision": "float32"}
    described = describe_benchmark(model, benchmark, on_progress, **how)
    others = model.describe(whiten_on, on_progress=on_progress, **how)
    if not others.kept:
        raise InputError(
            f"none of the photos to learn the whitening from can be read: {others.errors[0]}"
        )
    if others.errors:
        on_unreadable(tuple(others.errors))
    rows = []
    for place, pooling in enumerate(poolings):

        def part(vectors: Descriptors, place: int = place) -> Descriptors:
            own: Descriptors = np.split(vectors, len(poolings), axis=1)[place]
            return own * np.float32(len(poolings) ** 0.5)  # scale back to unit vectors

        plain = replace(
            described, queries=part(described.queries), database=part(described.database)
        )
        rows += _rows(pooling, plain, Whitening.learn([part(others.descriptors)], dim))
    return rows


class _SeveralPoolings(nn.Module):
    """Concatenates the unit descriptors of several poolings: [B, C, h, w] -> [B, C * poolings]."""

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
    """Format a Markdown table of mAP in percent."""
    protocols = list(rows[0].mean_average_precision)
    lines = [f"| pooling | | {' | '.join(protocols)} |", f"|---|---|{'---:|' * len(protocols)}"]
    for row in rows:
        values = " | ".join(f"{100 * row.mean_average_precision[p]:.1f}" for p in protocols)
        lines.append(f"| {row.pooling} | {row.variant} | {values} |")
    return "\n".join(lines) + "\n"


def write_poolings(out: Path, rows: Sequence[PoolingRow], about: str, command: str = "") -> None:
    """Write `results.csv`, `table.md` and `plot.svg` into a folder; creates it if necessary.

    `about` names the network and the benchmark; `command` is shown in the table.
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
