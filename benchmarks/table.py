"""Print measurements: a table for people, JSON lines for programs."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A column of a table whose rows are dataclasses; the cell of a field that is None is empty.

    Attributes:
        field: name of the field in a row.
        title: heading of the column.
        write: format of a value, such as "{:.1f} ×", or a function that turns it into text.
        scale: factor of the values, such as 1e-9 for gigabytes.
    """

    field: str
    title: str
    write: str | Callable[[Any], str] = "{}"
    scale: float = 1.0

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers, which are aligned to the right."""
        return self.write != "{}"

    def text(self, row: object) -> str:
        """Return the text of this column in a row."""
        value = getattr(row, self.field)
        if value is None:
            return ""
        if not isinstance(self.write, str):
            return self.write(value)
        return self.write.format(value * self.scale if self.scale != 1 else value)


def columns_of(row: object) -> list[Column]:
    """Return a column for each field of a row that is `Annotated` with a title and a format."""
    hints = get_type_hints(type(row), include_extras=True).items()
    return [
        Column(name, *hint.__metadata__) for name, hint in hints if hasattr(hint, "__metadata__")
    ]


def cells(row: object, columns: Sequence[Column]) -> list[str]:
    """Return the cells of a row; for a skipped row the reason replaces the first number."""
    texts = [column.text(row) for column in columns]
    reason = getattr(row, "skipped", None)
    if reason:
        numbers = (i for i, column in enumerate(columns) if column.is_number and not texts[i])
        texts[next(numbers, len(texts) - 1)] = reason
    return texts


def readable_seconds(seconds: float) -> str:
    """Format seconds for reading: 1.52 ms, 14.2 ms, 1.04 s."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def show(title: str, rows: Iterable[Any] | Callable[..., Iterable[Any]], as_json: bool) -> None:
    """Print rows as they are measured in JSON, or all of them as a table above the machine.

    `rows` may be a function with an argument `on_start`, which shows what is being measured.
    """
    from benchmarks.measure import describe_machine  # loads torch

    console = Console(stderr=as_json, highlight=False)
    found = []
    with console.status("measuring") as status:
        for row in rows(on_start=status.update) if callable(rows) else rows:
            found.append(row)
            if as_json:
                print(json.dumps(dataclasses.asdict(row), default=float), flush=True)
            status.update(f"measured {' '.join(cells(row, columns_of(row))[:2])}")
    if as_json or not found:
        return
    table, columns = Table(title=title), columns_of(found[0])
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.is_number else "left", no_wrap=True
        )
    for row in found:
        table.add_row(*cells(row, columns))
    # In a narrow terminal or a file, long lines are better than columns without their values.
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(table)
    console.print(describe_machine())
