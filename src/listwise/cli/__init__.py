"""The command line: the program to which the commands are added."""

import typer

app = typer.Typer(
    name="listwise",
    help="Image retrieval trained on the metric it is judged by.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
