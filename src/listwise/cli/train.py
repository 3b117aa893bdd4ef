"""`listwise label` and `train`: from photos to labels, and to a network."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from listwise.cli.command import command, make_app
from listwise.cli.output import Output, stoppable, typed_command
from listwise.errors import InputError
from listwise.progress import readable_time, stage_bars
from listwise.settings import LabelSettings, TrainConfig

if TYPE_CHECKING:
    from listwise.feedback import Comparison
    from listwise.training import TrainPlan, TrainResult

app = make_app("Clean labels, or find labels, and train a network on them.")

# How the preset auto chooses a setting (training/choices.py), and the value of the paper
# (section 4.2) if it gives one.
CHOSEN = {
    "backbone": "resnet101 on a GPU, else tf_efficientnet_lite0; paper: resnet101",
    "batch_size": "from the number of photos; paper: 4096",
    "class_weights": "off if the largest class has more than twice the photos of the smallest, "
    "except with --adapter; paper: on",
    "crops.size": "from the size of the photos; paper: 800",
    "learning_rate": "from the batch size; paper: 0.0001",
    "patience": "5",
    "precision": "bfloat16 on a GPU that supports it, else float32",
    "updates": "from the number of photos; paper: 200",
    "val_max_side": "twice the crop size",
    "validate_every": "about 15 validations per run",
    "warmup": "a tenth of the updates, at most 5",
    "workers": "from the number of CPU cores",
}


@command(
    app,
    "labeling.label:label",
    LabelSettings,
    defaults={"partners": "26, without labels 10"},
)
def label(output: Output, photos: str, *, out: Path, **options: Any) -> None:
    """Compare photos by local features, and write labels for those that show the same thing.

    Examples:
      listwise label photos --out labels.csv              # class folders
      listwise label photos --no-labels --out labels.csv  # without labels
      listwise label all.csv --split train --all-groups --out labels.csv
      listwise train labels.csv                           # train on the result

    Open labels.html to look through the result. Run the same command again to resume after an
    interruption.
    """
    from listwise.labeling import label as label_photos

    options |= {"on_note": output.note, "command": typed_command()}
    with stoppable(), stage_bars(output.console) as advance:
        found = label_photos(photos, out, on_progress=advance, **options)
    output.unreadable(list(found.errors.values()))
    facts = {"file": found.file, "page": found.page, "table": found.table, **found.summary()}
    text = (
        f"kept {facts['kept']} of {facts['photos']} photos in {facts['classes']} classes: "
        f"the labels are in {found.file}; open {found.page} to look through them"
    )
    output.result(facts, text, "train", found.file)


# The settings that `--help` shows.
MAIN = ["backbone", "weights", "pooling", "projection", "adapter", "lora", "teacher", "loss"]
MAIN += ["batch_size", "crops.size", "updates", "minutes", "learning_rate", "patience"]
MAIN += ["val_fraction", "val_max_side", "seed", "device", "workers", "micro_batch"]


@command(app, "api:train", TrainConfig, heading="Settings", main=MAIN, defaults=CHOSEN)
def train(
    output: Output,
    photos: str | None = None,
    *,
    from_index: str | None = None,
    # Not --run: torchrun takes that for the beginning of an option of its own.
    run_folder: Path | None = None,
    config: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> None:
    """Train a network on labelled photos by maximizing average precision.

    Args:
        photos: labelled photos: a folder of class folders, a .csv or .parquet table with columns
            path and label, a .txt list, or the name of a data set.
        config: YAML file with settings.
        resume: resume the interrupted run in this folder.

    Examples:
      listwise train photos                # choose settings for these photos
      listwise train photos --minutes 10   # settings for at most ten minutes
      listwise train labels.csv --preset paper --batch-size 1024
      listwise train photos --backbone resnet50 --run-folder runs/b
      listwise train photos --adapter      # train only a linear layer
      listwise train photos --teacher runs/large  # imitate a larger model
      listwise train --from-index shop --adapter  # learn from marks in an index
      listwise train --resume runs/b       # resume an interrupted run
      torchrun --nproc-per-node 8 -m listwise train photos --preset paper
    """
    if resume and (photos or from_index or run_folder or config or options):
        raise InputError("--resume uses the settings of the run: leave out all other options")
    if resume is None and (photos is None) == (from_index is None):
        raise InputError("give the photos to train on: either PHOTOS or --from-index")
    from listwise import api
    from listwise.training.distributed import process_group
    from listwise.training.run import RUN_FILE
    from listwise.training.view import LiveTrainView

    folder = resume or run_folder or api.default_run_folder(str(photos or from_index))
    if resume is None:
        options |= {"photos": photos, "from_index": from_index, "run_folder": folder}
    with process_group() as first:
        output.console.quiet = not first
        status = output.console.status("opening the run" if resume else "checking the photos")

        def on_plan(plan: "TrainPlan") -> None:
            status.stop()
            output.show_plan(plan)

        options |= {"view": LiveTrainView(output.console), "on_plan": on_plan}
        try:
            with status:
                done = api.train(resume=resume, config=config, **options)
        except KeyboardInterrupt:
            started = (folder / RUN_FILE).exists()
            how = f"; resume with: listwise train --resume {folder}" if started else ""
            print(f"listwise: stopped{how}", file=sys.stderr)
            raise typer.Exit(130) from None
        if first:
            _show_result(done.result, done.comparison, output)


def _show_result(result: "TrainResult", found: "Comparison | None", output: Output) -> None:
    """Print the result of a run, and the comparison with the model of the index."""
    output.answer(vars(result) | ({"comparison": found} if found else {}))
    text = (
        f"validation mAP {100 * result.first_map:.1f} -> {100 * result.best_map:.1f} "
        f"(best at update {result.best_update} of {result.updates}, "
        f"{readable_time(result.seconds)})"
    )
    if found is None:
        output.say(f"{text}\nthe model is in {result.model}", "bold")
        output.next_step("index", "build", "INDEX", "PHOTOS", "--model", result.model)
        return

    from listwise.feedback.comparison import comparison_rows, conclusion

    output.say(text)
    output.table(("", "old model", "new model", "difference"), comparison_rows(found))
    page = result.model.parent / "comparison.html"
    output.say(f"the results of the marked queries are in {page}")
    output.say(conclusion(found, result.model), "bold")
