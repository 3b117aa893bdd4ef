"""Tables of measurements: format the fields of a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Column:
    """A column of a table whose rows are dataclasses; the cell of a field that is None is empty.

    Attributes:
        title: heading of the column.
        field: name of the field in a row.
        write: format of a value, such as "{:.1f} ×", or a function that turns it into text.
        scale: factor of the values, such as 1e-9 for gigabytes.
    """

    title: str
    field: str
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


def columns_of(row: type) -> tuple[Column, ...]:
    """Return a column for each field of a dataclass that is `Annotated` with its arguments."""
    hints = get_type_hints(row, include_extras=True).items()
    annotated = {name: hint.__metadata__ for name, hint in hints if hasattr(hint, "__metadata__")}
    return tuple(Column(title, name, *how) for name, (title, *how) in annotated.items())


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
