"""`listwise study`: the paper's comparisons, and others, on your own photos."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import typer

from listwise.cli.command import command, make_app, take
from listwise.cli.output import Output, stoppable, typed_command
from listwise.cli.train import CHOSEN, MAIN
from listwise.errors import InputError
from listwise.progress import count_of, progress_bar, total_bar
from listwise.settings import TrainConfig, merge, read_settings
from listwise.studies.definitions import SCHEDULE, STUDIES, Study

app = make_app(
    "Compare losses and settings on your photos, as in the paper.",
    "Example:\n  listwise study losses toy --preset small --out losses",
)
TOY = "toy"
PLANNED = ("preset", "images", "seeds", "rates", "validations")


def _add_study(study: Study) -> None:
    """Add the command of a study, with an option for every setting that it does not set itself."""

    def compare(
        output: Output,
        photos: str,
        *,
        out: Path,
        variants: str | None = None,
        config: Path | None = None,
        benchmark: str | None = None,
        dim: int | None = None,
        max_side: int | None = None,
        data: Path | None = None,
        **options: Any,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("a study runs in one process: start it without torchrun")
        if benchmark is None and (dim is not None or max_side is not None):
            raise InputError("`dim` and `max_side` need a `benchmark`")
        planned = take(options, *PLANNED)
        planned["given"] = merge(read_settings(config) if config else {}, options)
        if variants:
            planned["variants"] = [word.strip() for word in variants.split(",")]
        from listwise.data.catalog import find_dataset
        from listwise.demo import TOY_LABELS
        from listwise.studies.outputs import table, write_outputs
        from listwise.studies.plan import plan_study
        from listwise.studies.runs import StudyBenchmark, StudyView, run_study

        with stoppable():
            toy = _draw_toy(output, photos, out)
            if toy and benchmark == TOY:
                benchmark = str(toy)
            with output.console.status("checking the photos"):
                made = plan_study(study, toy / TOY_LABELS if toy else photos, out, **planned)
                evaluated = None
                if benchmark is not None:
                    judged = find_dataset(benchmark, data).benchmark()
                    workers = made.plan.config.workers
                    evaluated = StudyBenchmark(judged, made.plan.train, dim, max_side, workers)
            output.show_plan(made.plan)
            compared = ", ".join(variant.name for variant in made.variants)
            most = round(made.images * max(variant.effort for variant in made.variants))
            seen = f"{made.images:,}" if most == made.images else f"{made.images:,} to {most:,}"
            output.say(
                f"{count_of(made.count, 'run')} of {seen} training images: {compared}", "bold"
            )
            write = partial(write_outputs, made, command=typed_command())
            findings = run_study(made, StudyView(output.console), evaluated, write)
        if output.json:
            for run in findings.outcomes:
                output.print_json({"study": study.name, **run.row()})
        else:
            typer.echo(table(made, findings))
        output.say(f"wrote results.csv, table.md and plot.svg to {out}", "bold")

    compare.__doc__ = f"""{study.about}

Args:
    photos: labelled photos: a folder of class folders, a .csv or .parquet table, the name of a data
        set, or toy, which draws toy landmarks into `out`.
    out: folder to write runs and tables to.
    variants: {study.words}
    data: folder that contains the data sets; by default data.
    config: YAML file with settings for all runs.
    benchmark: also evaluate the best network of each run on this data set, given by name or folder,
        without and with whitening learned from the training photos.
    dim: number of dimensions to keep after whitening; by default all.
    max_side: reduce photos of `benchmark` whose longer side has more pixels than this.

Examples:
  listwise study {study.name} photos --out {study.name} --benchmark roxford5k
  listwise study {study.name} toy --preset small --out {study.name}
"""
    own = ("study", "given", *SCHEDULE, *study.varies)
    add = command(
        app,
        "studies.plan:plan_study",
        TrainConfig,
        name=study.name,
        heading="Settings",
        main=MAIN,
        without=own,
        defaults={**CHOSEN, "variants": study.words_default},
    )
    add(compare)


for each in STUDIES.values():
    _add_study(each)


def _draw_toy(output: Output, source: str, out: Path | None) -> Path | None:
    """Draw the toy landmarks into `out` if `source` is toy and no file or folder has that name."""
    if source != TOY or Path(TOY).exists():
        return None
    if out is None:
        raise InputError("give a folder with `out`, into which the toy landmarks are drawn")
    from listwise.demo import make_toy_landmarks

    with total_bar(output.console, "drawing toy landmarks") as update:
        return make_toy_landmarks(out / "toy-landmarks", progress=update)


@command(app, "studies.poolings:compare_poolings", without=("poolings",))
def poolings(
    output: Output,
    benchmark: str,
    *,
    whiten_on: str,
    out: Path | None = None,
    data: Path | None = None,
    **options: Any,
) -> None:
    """Compare MAC, SPoC, CroW, R-MAC and GeM without training, whitened and with αQE.

    Args:
        benchmark: name or folder of a benchmark, or toy to draw toy landmarks into `out`.
        whiten_on: photos to learn the whitening from: a folder, table, list or data set.
        out: folder to write a table and a plot to.

    Examples:
      listwise study poolings roxford5k --whiten-on landmarks.csv --out poolings
      listwise study poolings toy --whiten-on toy --out poolings
    """
    from listwise.data.catalog import find_dataset, photos_of
    from listwise.demo import TOY_LABELS

    toy = _draw_toy(output, benchmark, out)
    if toy and whiten_on == TOY:
        whiten_on = str(toy / TOY_LABELS)
    judged = find_dataset(toy or benchmark, data).benchmark()
    others = photos_of(whiten_on, data)

    from listwise.studies.poolings import compare_poolings, poolings_table, write_poolings

    photos = judged.photo_count + len(others)
    with progress_bar(output.console, "computing descriptors", photos) as advance:
        rows = compare_poolings(
            judged, others, on_progress=advance, on_unreadable=output.unreadable, **options
        )
    if output.json:
        for row in rows:
            output.print_json(row)
    else:
        typer.echo(poolings_table(rows), nl=False)
    if out is not None:
        backbone = options.get("backbone", "resnet101")
        write_poolings(out, rows, f"{backbone} off the shelf on {judged.name}", typed_command())
        output.say(f"wrote results.csv, table.md and plot.svg to {out}", "bold")
