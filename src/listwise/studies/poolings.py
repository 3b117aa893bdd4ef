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
from listwise.machine import Machine
from listwise.models import POOLINGS, RetrievalNet
from listwise.models.pooling import make_pooling
from listwise.pages import percent
from listwise.results.describe import describe_benchmark
from listwise.studies.outputs import markdown, write_files
from listwise.studies.plan import column_name
from listwise.studies.plots import Panel, Point, Spread

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
        backbone: name of a timm model.
        weights: weights of the backbone: auto, pretrained, imagenet-package, random, or a weights
            file.
        poolings: names of the poolings.
        dim: number of dimensions to keep after whitening; by default all.
        max_side: reduce photos whose longer side has more pixels than this; 0 keeps the original
            size. By default 1024 on a GPU and 512 on a CPU.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
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
        queries, database, learned = (
            # Scaled back to unit vectors.
            np.split(vectors, len(poolings), axis=1)[place] * np.float32(len(poolings) ** 0.5)
            for vectors in (described.queries, described.database, others.descriptors)
        )
        plain = replace(described, queries=queries, database=database)
        white = plain.whiten(Whitening.learn([learned], dim))
        results = (plain.evaluate(), white.evaluate(), white.evaluate(expand=True))
        rows += [
            PoolingRow(pooling, variant, {name: result.mAP for name, result in found.items()})
            for variant, found in zip(VARIANTS, results, strict=True)
        ]
    return rows


class _SeveralPoolings(nn.Module):
    """Concatenates the unit descriptors of several poolings: [B, C, h, w] -> [B, C * poolings]."""

    def __init__(self, poolings: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_pooling(name) for name in poolings)

    def forward(self, features: Tensor) -> Tensor:
        rows = [nn.functional.normalize(layer(features.float())) for layer in self.layers]
        return torch.cat(rows, dim=1)


def poolings_table(rows: Sequence[PoolingRow]) -> str:
    """Format a Markdown table of mAP in percent."""
    cells = []
    for row in rows:
        shown = {name: percent(value) for name, value in row.mean_average_precision.items()}
        cells.append({"pooling": row.pooling, "": row.variant} | shown)
    return markdown(cells)


def write_poolings(out: Path, rows: Sequence[PoolingRow], about: str, command: str = "") -> None:
    """Write `results.csv`, `table.md` and `plot.svg` into a folder; creates it if necessary.

    `about` names the network and the benchmark; `command` is shown in the table.
    """
    values = [
        {"pooling": row.pooling, "variant": row.variant}
        | {column_name(name): value for name, value in row.mean_average_precision.items()}
        for row in rows
    ]
    panels = []
    for name in rows[0].mean_average_precision:
        points = [
            Point(f"{row.pooling}, {row.variant}", Spread((row.mean_average_precision[name],)))
            for row in rows
        ]
        panels.append(Panel(f"{name} mAP, %", points))
    text = [f"{about}; mAP in percent.\n", poolings_table(rows)]
    write_files(out, f"Poolings: {about}", text, values, panels, command)
