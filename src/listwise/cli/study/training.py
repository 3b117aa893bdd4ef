"""`listwise study NAME`: the studies that train."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say, stoppable, typed_command
from listwise.cli.settings import given_settings, with_setting_flags
from listwise.cli.study import flags
from listwise.cli.study.flags import TOY, draw_toy, say_where
from listwise.errors import InputError
from listwise.settings import merge, read_settings
from listwise.studies.definitions import SCHEDULE, Study


def study_command(study: Study) -> Callable[..., None]:
    """The command of a study, with a flag for every setting that it does not set itself."""
    own = (*SCHEDULE, *(name.replace(".", "_") for name in study.varies))

    @with_setting_flags
    def command(
        photos: flags.Photos,
        out: Annotated[Path, options.path("Folder to write runs and tables to.")],
        variants: Annotated[
            str | None, options.text(study.words, show_default=study.words_default)
        ] = None,
        images: flags.Images = None,
        seeds: flags.Seeds = None,
        rates: flags.Rates = None,
        validations: flags.Validations = None,
        benchmark: flags.AlsoBenchmark = None,
        dim: options.Dim = None,
        max_side: options.MaxSide = None,
        data: options.Data = None,
        config: flags.Config = None,
        preset: flags.Preset = "auto",
        json: options.AsJson = False,
        **settings: Any,
    ) -> None:
        if preset not in ("auto", "paper", "small"):
            raise InputError(f"`preset` must be auto, paper or small, not {preset!r}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("a study runs in one process: start it without torchrun")
        if benchmark is None and (dim is not None or max_side is not None):
            raise InputError("`dim` and `max_side` need a `benchmark`")
        given = given_settings(dict.fromkeys(own) | settings)
        planned: dict[str, Any] = {
            "given": merge(read_settings(config) if config else {}, given),
            "preset": preset,
            "variants": [word.strip() for word in variants.split(",")] if variants else None,
            "images": images,
            "seeds": seeds,
            "rates": options.parse_numbers(rates, "rates") if rates else (),
            "validations": validations,
        }
        searched = {"dim": dim, "max_side": max_side}
        with stoppable():
            _run(study, photos, out, planned, benchmark, data, searched, json)

    signature = inspect.signature(command)
    kept = [parameter for key, parameter in signature.parameters.items() if key not in own]
    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return command


def _run(
    study: Study,
    photos: str,
    out: Path,
    planned: dict[str, Any],
    benchmark: str | None,
    data: Path | None,
    searched: dict[str, Any],
    json: bool,
) -> None:
    from listwise.cli.output import show_plan
    from listwise.cli.study.view import LiveStudyView
    from listwise.data.catalog import find_dataset
    from listwise.data.toy import TOY_LABELS
    from listwise.studies.outputs import table, write_outputs
    from listwise.studies.plan import plan_study
    from listwise.studies.runs import StudyBenchmark, run_study

    console = open_console(json)
    toy = draw_toy(console, photos, out)
    if toy and benchmark == TOY:
        benchmark = str(toy)
    with console.status("checking the photos"):
        made = plan_study(study, toy / TOY_LABELS if toy else photos, out, **planned)
        evaluated = None
        if benchmark is not None:
            judged = find_dataset(benchmark, data).benchmark()
            workers = made.plan.config.workers
            evaluated = StudyBenchmark(judged, made.plan.train, **searched, workers=workers)
    show_plan(made.plan, console)
    compared = ", ".join(variant.name for variant in made.variants)
    most = round(made.images * max(variant.effort for variant in made.variants))
    seen = f"{made.images:,}" if most == made.images else f"{made.images:,} to {most:,}"
    say(console, f"{made.count} runs of {seen} training images: {compared}", "bold")
    view = LiveStudyView(console, lambda findings: write_outputs(made, findings, typed_command()))
    findings = run_study(made, view, evaluated)
    if json:
        for run in findings.outcomes:
            print_json({"study": study.name, **run.row()})
    else:
        typer.echo(table(made, findings))
    say_where(console, out)
