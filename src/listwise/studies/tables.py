"""Tables of figures: CSV for programs, Markdown for people."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from listwise.files import write_text


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation of some values; the deviation of a single one is None."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float | None:
        """Their sample deviation (n − 1)."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def percent(self, sign: str = "") -> str:
        """For people, in percent: 45.2 ± 0.3."""
        mean = f"{100 * self.mean:{sign}.1f}"
        return mean if self.deviation is None else f"{mean} ± {100 * self.deviation:.1f}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the names that any of them has; a missing value is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers, on the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
