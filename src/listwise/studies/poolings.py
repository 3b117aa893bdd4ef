"""Off-the-shelf poolings (the "(O)" rows of Table 2): one network, five ways to pool it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from listwise.data import Decoding, Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import Whitening
from listwise.errors import InputError
from listwise.files import write_text
from listwise.machine import Machine
from listwise.models import POOLINGS, RetrievalNet
from listwise.models.embed import embed_parts
from listwise.models.pooling import make_pooling
from listwise.results.described import BenchmarkDescriptors, Descriptors
from listwise.studies.outcome import column_name
from listwise.studies.outputs import PLOT_FILE, RESULTS_FILE, TABLE_FILE
from listwise.studies.plots import Panel, Point, draw
from listwise.studies.tables import Spread, write_csv

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

    Args:
        benchmark: with judged queries.
        whiten_on: photos to learn the whitening on, not the benchmark's.
        backbone: the name of a timm model.
        weights: as for `RetrievalNet`.
        poolings: names of poolings.
        dim: dimensions that the whitening keeps; all that vary by default.
        max_side: long side that larger photos are reduced to.
        device: cpu, cuda ...; auto takes a GPU if there is one.
        on_progress: called with the number of photos just done.
        on_unreadable: called with the errors of photos in `whiten_on` that were left out.
    """
    if benchmark.labelled:
        raise InputError(f"{benchmark.name} is a labelled set: this takes a judged benchmark")
    describe = _describer(backbone, weights, poolings, max_side, device, on_progress, on_unreadable)
    parts = zip(
        poolings,
        describe(benchmark.queries, True),
        describe(benchmark.database, True),
        describe(whiten_on, False),
        strict=True,
    )
    return [
        row
        for pooling, queries, database, others in parts
        for row in _rows(
            pooling,
            BenchmarkDescriptors(benchmark, queries, database),
            Whitening.learn([others], dim),
        )
    ]


def _describer(
    backbone: str,
    weights: str | Path,
    poolings: Sequence[str],
    max_side: int | None,
    device: str,
    on_progress: Callable[[int], object],
    on_unreadable: Callable[[tuple[str, ...]], object],
) -> Callable[[Images, bool], list[Descriptors]]:
    """From photos, all of which must be readable or not, to the descriptors of each pooling."""
    machine = Machine.detect(device)
    net = RetrievalNet(backbone, weights=weights).to(machine.device).eval()
    layers = [make_pooling(name).to(machine.device) for name in poolings]

    def pool(photos: Tensor) -> Tensor:
        features = net.features(photos).float()
        rows = [torch.nn.functional.normalize(layer(features), dim=1) for layer in layers]
        return torch.cat(rows, dim=1)

    def describe(images: Images, must: bool) -> list[Descriptors]:
        (found,) = embed_parts(
            net,
            images.files(),
            [len(images)],
            Decoding(max_side),
            describe=pool,
            workers=machine.workers(),
            on_progress=on_progress,
        )
        if found.errors and (must or not found.kept):
            raise InputError(
                f"{len(found.errors)} photos cannot be read; the first: {found.errors[0]}"
            )
        if found.errors:
            on_unreadable(tuple(found.errors))
        return np.split(found.descriptors.numpy(), len(poolings), axis=1)

    return describe


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
    """Write `results.csv`, `table.md` and `plot.svg`.

    Args:
        out: a folder, made if it is not there.
        rows: from `compare_poolings`.
        about: what network on what benchmark.
        command: that made it, for the table.
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
            f"{protocol} mAP, %",
            [
                Point(
                    f"{row.pooling}, {row.variant}",
                    Spread((row.mean_average_precision[protocol],)),
                )
                for row in rows
            ],
        )
        for protocol in rows[0].mean_average_precision
    ]
    write_text(out / PLOT_FILE, draw(f"Poolings: {about}", panels))
