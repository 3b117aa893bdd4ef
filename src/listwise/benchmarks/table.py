"""Tables of measurements: how the fields of a row are written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Column:
    """A column of a table, whose rows are dataclasses; nothing is shown of a field that is None.

    `write` is the format of a value, such as "{:.1f} ×", or what turns a value into text; values
    are multiplied by `scale` first, such as 1e-9 for gigabytes.
    """

    title: str
    field: str
    write: str | Callable[[Any], str] = "{}"
    scale: float = 1.0

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers, which are aligned at the right."""
        return self.write != "{}"

    def text(self, row: object) -> str:
        """The cell of a row."""
        value = getattr(row, self.field)
        if value is None:
            return ""
        if not isinstance(self.write, str):
            return self.write(value)
        return self.write.format(value * self.scale if self.scale != 1 else value)


def columns_of(row: type) -> tuple[Column, ...]:
    """The columns of the fields of a dataclass that are `Annotated` with a column's arguments."""
    hints = get_type_hints(row, include_extras=True).items()
    annotated = {name: hint.__metadata__ for name, hint in hints if hasattr(hint, "__metadata__")}
    return tuple(Column(title, name, *how) for name, (title, *how) in annotated.items())


def cells(row: object, columns: Sequence[Column]) -> list[str]:
    """A row's cells; the reason why it was `skipped` is in place of its first number."""
    texts = [column.text(row) for column in columns]
    reason = getattr(row, "skipped", None)
    if reason:
        numbers = (i for i, column in enumerate(columns) if column.is_number and not texts[i])
        texts[next(numbers, len(texts) - 1)] = reason
    return texts


def readable_seconds(seconds: float) -> str:
    """A time for people: 1.52 ms, 14.2 ms, 1.04 s."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
