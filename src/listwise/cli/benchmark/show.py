"""Print measurements: a table for people, JSON lines for programs."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from rich.measure import Measurement
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, stoppable

if TYPE_CHECKING:
    from listwise.benchmarks.table import Column

AsJsonLines = Annotated[bool, options.flag("--json", "Print each row as a JSON object.")]
Methods = Annotated[
    str | None,
    options.text(
        "Methods to measure, as the table names them, separated by semicolons.", show_default="all"
    ),
]


def parse_methods(given: str | None) -> list[str] | None:
    """Parse the names of methods separated by semicolons; None stands for all of them."""
    return None if given is None else [name.strip() for name in given.split(";")]


def show(
    title: str,
    columns: "Sequence[Column]",
    rows: Iterable[object] | Callable[..., Iterable[object]],
    json: bool,
) -> None:
    """Print rows as they are measured in JSON, or all of them as a table above the machine.

    `rows` may be a function with an argument `on_start`, which shows what is being measured.
    """
    from listwise.benchmarks.measure import describe_machine
    from listwise.benchmarks.table import cells

    console = open_console(json)
    table = Table(title=title)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.is_number else "left", no_wrap=True
        )
    with stoppable(""), console.status("measuring") as status:
        for row in rows(on_start=status.update) if callable(rows) else rows:
            if json:
                print_json(row)
            else:
                table.add_row(*cells(row, columns))
                status.update(f"measured {' '.join(cells(row, columns)[:2])}")
    if not json:
        # In a narrow terminal or a file, long lines are better than columns without their values.
        wide = console.options.update(max_width=1000)
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
        console.print(table)
        console.print(describe_machine("auto"))
