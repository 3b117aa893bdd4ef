"""What the commands that train print before and after."""

from rich.console import Console
from rich.table import Table

from listwise.cli.output import note, print_result, say
from listwise.training import TrainPlan, TrainResult
from listwise.training.run.view import readable_time


def show_plan(plan: TrainPlan, console: Console) -> None:
    """Print what will be trained on what, and why so."""
    for line in plan.notes:
        note(console, line)
    say(
        console,
        f"{len(plan.train)} photos of {len(plan.train.class_names)} classes to train on, "
        f"{len(plan.validation)} of {len(plan.validation.class_names)} to validate with",
    )
    if not plan.reasons:
        return
    table = Table("setting", "value", "why", title="Settings chosen for you", title_justify="left")
    settings = plan.config.model_dump()
    for name, reason in plan.reasons.items():
        value = settings
        for part in name.split("."):
            value = value[part]
        table.add_row(name, str(value), reason)
    console.print(table)


def show_result(result: TrainResult, console: Console, json: bool) -> None:
    """Print what a run came to."""
    text = (
        f"validation mAP {100 * result.first_map:.1f} -> {100 * result.best_map:.1f} "
        f"(best at update {result.best_update} of {result.updates}, "
        f"{readable_time(result.seconds)})\nthe network is in {result.model}"
    )
    print_result(console, json, result, text)
