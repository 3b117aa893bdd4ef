"""`listwise study`: the paper's comparisons, on anybody's data."""

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from listwise.cli.bars import progress_bar
from listwise.cli.options import parse_numbers
from listwise.cli.output import say, warn_of_unreadable
from listwise.cli.settings import given_settings, with_setting_flags

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="The paper's comparisons, on your data.",
    epilog="Example:  listwise study losses toy --preset small --out studies/losses",
)

# What a study sets by itself: everything that is counted in updates, and the seeds.
SCHEDULE = ("updates", "warmup", "validate_every", "patience", "checkpoint_every", "seed")


class _Command(NamedTuple):
    """A study that trains: what it compares, what --variants takes, and the flags it varies."""

    does: str
    words: str
    varies: tuple[str, ...]


STUDIES = {
    "losses": _Command(
        "The AP loss, triplets and contrastive (Table 1): accuracy, work, settings, time.",
        "Losses with commas: ap, tl-64, tl-512, tl-1024, contrastive (the usual ones), tie-aware, "
        "fastap, smoothap, multi-similarity; or all.",
        ("loss", "triplet_tuples"),
    ),
    "bins": _Command(
        "The number of quantization bins M (Figure 4).",
        "Numbers with commas. [dim]default: 5,10,20,50,100[/dim]",
        ("bins",),
    ),
    "batch-size": _Command(
        "The batch size B, at an equal number of images seen (Figure 5).",
        "Numbers with commas. [dim]default: powers of two from 32 to 8192[/dim]",
        ("batch_size",),
    ),
    "classes": _Command(
        "The number of classes in a batch (Figure 6).",
        "Numbers with commas, or all for all classes. [dim]default: 8,16,32 ... all[/dim]",
        ("classes_per_batch",),
    ),
    "balance": _Command(
        "With and without class weights (Figure 7).",
        "weighted, unweighted, or both with a comma.",
        ("class_weights",),
    ),
    "ties": _Command(
        "AP as it is defined against the tie-aware form (Figure 8).",
        "ap, tie-aware, or both with a comma.",
        ("loss",),
    ),
}

# Found by trial: the toy landmarks on two cores, a study in some five minutes.
SMALL: dict[str, Any] = {
    "backbone": "tf_efficientnet_lite0",
    "weights": "imagenet-package",
    "batch_size": 192,
    "learning_rate": 3e-4,
    "val_max_side": 96,
    "crops": {"size": 64, "min_area": 0.4, "rotation": 8.0},
}
SMALL_IMAGES, SMALL_SEEDS, SMALL_VALIDATIONS = 3072, 2, 4
TOY = "toy"


def _add(name: str, study: _Command) -> None:
    """Add the command of a study that trains."""
    own = (*SCHEDULE, *study.varies)

    @with_setting_flags
    def command(
        photos: Annotated[
            str,
            typer.Argument(
                help="Labelled photos: class folders, a .csv or .parquet table, a data set, or "
                "toy, which draws toy landmarks into --out."
            ),
        ],
        out: Annotated[Path, typer.Option(help="Folder of the runs and the tables.")],
        variants: Annotated[str | None, typer.Option(help=study.words)] = None,
        images: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="Training images that each run sees. [dim]default: ten times the photos[/dim]",
            ),
        ] = None,
        seeds: Annotated[
            int | None,
            typer.Option(min=1, help="Runs of each variant. [dim]default: 3, small: 2[/dim]"),
        ] = None,
        rates: Annotated[
            str | None,
            typer.Option(
                help="Learning rates with commas: each variant keeps the one that is best in "
                "validation with the first seed."
            ),
        ] = None,
        validations: Annotated[
            int | None,
            typer.Option(
                min=1, help="Validations of each run, at most. [dim]default: 10, small: 4[/dim]"
            ),
        ] = None,
        benchmark: Annotated[
            str | None,
            typer.Option(
                help="Also search this data set, by name or folder, with the network that is "
                "best in validation: plain, and whitened on the training photos."
            ),
        ] = None,
        dim: Annotated[
            int | None, typer.Option(min=1, help="Dimensions that the whitening keeps.")
        ] = None,
        max_side: Annotated[
            int | None,
            typer.Option(min=1, help="Reduce the benchmark's photos to this long side."),
        ] = None,
        data: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
        config: Annotated[
            Path | None, typer.Option(help="YAML file with settings for all runs.")
        ] = None,
        preset: Annotated[
            str,
            typer.Option(
                metavar="auto|paper|small",
                help="Where settings come from that you do not give: chosen from the photos and "
                "the machine, the paper's, or small ones for two cores.",
            ),
        ] = "auto",
        json: Annotated[bool, typer.Option("--json", help="Print one JSON object a run.")] = False,
        **flags: Any,
    ) -> None:
        from rich.console import Console

        console = Console(stderr=json, highlight=False)
        try:
            _run(
                console,
                name,
                photos,
                out,
                variants=variants,
                images=images,
                seeds=seeds,
                rates=rates,
                validations=validations,
                benchmark=benchmark,
                dim=dim,
                max_side=max_side,
                data=data,
                config=config,
                preset=preset,
                json=json,
                given=given_settings(dict.fromkeys(own) | flags),
            )
        except KeyboardInterrupt:
            print("listwise: stopped; go on with the same command", file=sys.stderr)
            raise typer.Exit(130) from None

    signature = inspect.signature(command)
    kept = [parameter for key, parameter in signature.parameters.items() if key not in own]
    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    example = f"listwise study {name} photos.csv --out studies/{name} --benchmark roxford5k"
    toy = f"listwise study {name} toy --preset small --out studies/{name}"
    app.command(name, help=study.does, epilog=f"Examples:\n\n  {example}\n\n  {toy}")(command)


def _run(
    console: "Console",
    name: str,
    photos: str,
    out: Path,
    *,
    variants: str | None,
    images: int | None,
    seeds: int | None,
    rates: str | None,
    validations: int | None,
    benchmark: str | None,
    dim: int | None,
    max_side: int | None,
    data: Path | None,
    config: Path | None,
    preset: str,
    json: bool,
    given: dict[str, Any],
) -> None:
    import json as encoder
    import os
    import shlex

    from listwise.errors import InputError
    from listwise.settings import merge, read_settings

    if preset not in ("auto", "paper", "small"):
        raise InputError(f"--preset is auto, paper or small, not {preset!r}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("a study runs in one process: start it without torchrun")
    if benchmark is None and (dim is not None or max_side is not None):
        raise InputError("--dim and --max-side are for a --benchmark")
    tried = parse_numbers(rates, "rates") if rates else ()
    given = merge(read_settings(config) if config else {}, given)

    from listwise.cli.run import show_plan
    from listwise.data.catalog import find_dataset
    from listwise.data.toy import TOY_LABELS
    from listwise.studies.judged import Judging
    from listwise.studies.known import STUDIES
    from listwise.studies.outputs import table, write_outputs
    from listwise.studies.runs import plan_study, run_study
    from listwise.studies.view import LiveStudyView

    study = STUDIES[name]
    small = preset == "small"
    if small:
        own = {*study.varies, *(["learning_rate"] if tried else [])}
        given = merge({key: value for key, value in SMALL.items() if key not in own}, given)
        images = images or SMALL_IMAGES
    toy = _draw_toy(console, out) if _is_toy(photos) else None
    judged = None
    if benchmark is not None:
        judged = find_dataset(toy if toy and benchmark == TOY else benchmark, data).benchmark()
    with console.status("checking the photos"):
        made = plan_study(
            study,
            toy / TOY_LABELS if toy else photos,
            out,
            given,
            preset="paper" if preset == "paper" else "auto",
            words=[word.strip() for word in variants.split(",")] if variants else None,
            images=images,
            seeds=seeds or (SMALL_SEEDS if small else 3),
            rates=tried,
            validations=validations or (SMALL_VALIDATIONS if small else 10),
        )
    show_plan(made.plan, console)
    compared = ", ".join(variant.name for variant in made.variants)
    say(console, f"{made.count} runs of {made.images:,} training images: {compared}", "bold")
    judging = None
    if judged is not None:
        judging = Judging(judged, made.plan.train, dim, max_side, made.plan.config.workers)
    command = shlex.join(["listwise", *sys.argv[1:]])
    view = LiveStudyView(console, lambda findings: write_outputs(made, findings, command))
    findings = run_study(made, view, judging)
    if json:
        for run in findings.outcomes:
            typer.echo(encoder.dumps({"study": name, **run.row()}, ensure_ascii=False))
    else:
        typer.echo(table(made, findings))
    _say_where(console, out)


def _is_toy(photos: str) -> bool:
    """Whether the toy landmarks are meant; a folder of that name goes first."""
    return photos == TOY and not Path(TOY).exists()


def _draw_toy(console: "Console", out: Path) -> Path:
    """The toy landmarks in the study's folder, drawn if they are not there yet."""
    from rich.progress import Progress

    from listwise.data.toy import make_toy_landmarks

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("drawing toy landmarks", total=None)
        return make_toy_landmarks(
            out / "toy-landmarks",
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _say_where(console: "Console", out: Path) -> None:
    say(console, f"results.csv, table.md and plot.svg are in {out}", "bold")


for _name, _study in STUDIES.items():
    _add(_name, _study)


@app.command(
    epilog="Examples:\n\nlistwise study poolings roxford5k --whiten-on landmarks.csv "
    "--backbone resnet50 --weights resnet50.safetensors --out studies/poolings\n\n"
    "listwise study poolings toy --whiten-on toy --backbone tf_efficientnet_lite0 "
    "--out studies/poolings"
)
def poolings(
    benchmark: Annotated[
        str, typer.Argument(help="A judged benchmark: its name or folder; toy draws toy landmarks.")
    ],
    whiten_on: Annotated[
        str,
        typer.Option(help="Photos to learn the whitening on: a folder, table, list or data set."),
    ],
    backbone: Annotated[str, typer.Option(help="Any timm model.")] = "resnet101",
    weights: Annotated[
        str, typer.Option(help="A file, auto, pretrained, imagenet-package or random.")
    ] = "auto",
    dim: Annotated[
        int | None, typer.Option(min=1, help="Dimensions that the whitening keeps.")
    ] = None,
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Reduce photos to this long side; never by default.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write a table and a plot into, too.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Off-the-shelf MAC, SPoC, CroW, R-MAC and GeM: plain, whitened, whitened + αQE."""
    import json as encoder
    import shlex
    from dataclasses import asdict

    from rich.console import Console

    from listwise.data.catalog import find_dataset, photos_of
    from listwise.data.toy import TOY_LABELS
    from listwise.errors import InputError

    console = Console(stderr=json, highlight=False)
    if _is_toy(benchmark):
        if out is None:
            raise InputError("the toy landmarks are drawn into the folder --out: give one")
        toy = _draw_toy(console, out)
        benchmark = str(toy)
        whiten_on = str(toy / TOY_LABELS) if whiten_on == TOY else whiten_on
    judged = find_dataset(benchmark, data).benchmark()
    if judged.labelled:
        raise InputError(f"{benchmark} is a labelled set: this study takes a judged benchmark")
    others = photos_of(whiten_on, data)

    from listwise.studies.poolings import compare_poolings, poolings_table, write_poolings

    photos = len(judged.queries) + len(judged.database) + len(others)
    with progress_bar(console, "describing", photos) as advance:
        rows = compare_poolings(
            judged,
            others,
            backbone,
            weights,
            dim=dim,
            max_side=max_side,
            device=device,
            on_progress=advance,
            on_unreadable=lambda errors: warn_of_unreadable(console, errors),
        )
    if json:
        for row in rows:
            typer.echo(encoder.dumps(asdict(row), ensure_ascii=False))
    else:
        typer.echo(poolings_table(rows), nl=False)
    if out is not None:
        about = f"{backbone} off the shelf on {judged.name}"
        write_poolings(out, rows, about, shlex.join(["listwise", *sys.argv[1:]]))
        _say_where(console, out)
