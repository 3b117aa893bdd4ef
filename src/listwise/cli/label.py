"""`listwise label`: clean labels, or find labels, by matching photos."""

from functools import partial
from pathlib import Path
from typing import Annotated

from listwise.cli import options
from listwise.cli.output import (
    note,
    open_console,
    print_result,
    stoppable,
    typed_command,
    warn_of_unreadable,
)
from listwise.progress import stage_bars

EXAMPLES = """Examples:
  listwise label photos --out labels.csv              # class folders
  listwise label photos --no-labels --out labels.csv  # without labels
  listwise label all.csv --split train --all-groups --out labels.csv
  listwise train labels.csv                           # train on the result

Open labels.html to look through the result. Run the same command again to resume after an
interruption.
"""
Photos = Annotated[
    str,
    options.argument(
        "PHOTOS",
        "Folder of class folders, folder of photos, .csv or .parquet table, .txt list, or name of "
        "a data set.",
    ),
]
Out = Annotated[
    Path,
    options.path(
        "Table of labels to write (.csv). A page (.html), a table of all photos (.photos.csv) and "
        "a summary (.json) are written next to it."
    ),
]
UseLabels = Annotated[
    bool | None,
    options.flag(
        "--labels/--no-labels",
        "Use the labels of the photos, or group the photos without labels; by default the labels "
        "are used if there are any.",
    ),
]
Inliers = Annotated[
    int, options.integer("Minimum number of inliers of two photos that match.", min=4)
]
Partners = Annotated[
    int | None,
    options.integer(
        "Maximum number of photos each photo is compared with.",
        min=2,
        show_default="26, without labels 10",
    ),
]
MinPhotos = Annotated[int, options.integer("Minimum number of photos per class.", min=2)]
AllGroups = Annotated[
    bool,
    options.flag(
        "--all-groups",
        "Keep the smaller groups of a class too, as classes called NAME/2, NAME/3 and so on.",
    ),
]
Merge = Annotated[bool, options.flag("--merge", "Merge classes that show the same thing.")]
ListModel = Annotated[
    str | None,
    options.text(
        "Model folder or timm backbone that finds similar photos to compare.",
        show_default="none with labels, else a pretrained backbone",
    ),
]
FeatureCount = Annotated[
    int, options.integer("Maximum number of local features per photo.", min=50, max=951)
]
OneSplit = Annotated[
    str | None,
    options.text("Examine only the photos of this split; the others keep their labels."),
]
KeepWork = Annotated[
    bool,
    options.flag(
        "--keep-work",
        "Keep the features and matches in OUT.partial, so that a run with other thresholds takes "
        "seconds.",
    ),
]
Processes = Annotated[
    int | None, options.integer("Number of processes.", min=0, show_default="one per CPU core")
]


def label(
    photos: Photos,
    out: Out,
    labels: UseLabels = None,
    inliers: Inliers = 8,
    partners: Partners = None,
    min_photos: MinPhotos = 2,
    all_groups: AllGroups = False,
    merge: Merge = False,
    model: ListModel = None,
    features: FeatureCount = 700,
    split: OneSplit = None,
    keep_work: KeepWork = False,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    workers: Processes = None,
    json: options.AsJson = False,
) -> None:
    """Compare photos by local features, and write labels for those that show the same thing."""
    from listwise.labeling import label as label_photos

    console = open_console(json)
    with stoppable(), stage_bars(console) as advance:
        found = label_photos(
            photos,
            out,
            labels=labels,
            model=model,
            split=split,
            keep_work=keep_work,
            command=typed_command(),
            workers=workers,
            device=device,
            on_progress=advance,
            on_note=partial(note, console),
            inliers=inliers,
            min_photos=min_photos,
            all_groups=all_groups,
            merge=merge,
            features=features,
            seed=seed,
            **({} if partners is None else {"partners": partners}),
        )
    if not json:
        warn_of_unreadable(console, list(found.errors.values()))
    facts = {"file": found.file, "page": found.page, "table": found.table, **found.summary()}
    text = (
        f"kept {facts['kept']} of {facts['photos']} photos in {facts['classes']} classes: "
        f"the labels are in {found.file}; open {found.page} to look through them"
    )
    print_result(console, json, facts, text)
