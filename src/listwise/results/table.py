"""Metrics as a plain text table for terminals, notebooks and logs."""

import math
from collections.abc import Mapping

from listwise.evaluation import Results

Figures = Mapping[str, Mapping[str, float]]
"""Protocol -> metric -> value from 0 to 1; NaN for a missing value."""


def figures_of(results: Results) -> dict[str, dict[str, float]]:
    """Return the metrics of results: protocol -> metric -> value from 0 to 1."""
    return {protocol: dict(found.figures) for protocol, found in results.items()}


def percent(value: float) -> str:
    """Format a value in percent with one decimal; a dash for NaN."""
    return "–" if value != value else f"{100 * value:.1f}"


def change(before: float, after: float) -> str:
    """Format the difference of two values after rounding them as the table shows them."""
    if math.isnan(before) or math.isnan(after):
        return "–"
    difference = round(round(100 * after, 1) - round(100 * before, 1), 1)
    return f"{difference:+.1f}".replace("-", "−") if difference else "0.0"


def format_table(title: str, rows: Mapping[str, Figures]) -> str:
    """Format a table in percent with one line per row and protocol, and aligned columns."""
    metrics = dict.fromkeys(
        metric for row in rows.values() for found in row.values() for metric in found
    )
    lines = [["", "", *metrics]]
    for name, row in rows.items():
        for place, (protocol, found) in enumerate(row.items()):
            values = (percent(found.get(metric, float("nan"))) for metric in metrics)
            lines.append(["" if place else name, protocol, *values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, texts[0], "-" * max(map(len, texts)), *texts[1:]])
