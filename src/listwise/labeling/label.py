"""Find the labels of photos by matching them: `label`."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from listwise.data import Images, LabelledImages
from listwise.data.catalog.dataset import labelled_of, photos_of
from listwise.data.images import printable
from listwise.data.workers import explain_lost_workers
from listwise.descriptors import Model, load_model
from listwise.descriptors.extract import lock_folder, photos_key
from listwise.errors import InputError, validated
from listwise.files import write_text
from listwise.labeling.result import FEW_PHOTOS, Labels, Progress
from listwise.machine import Machine
from listwise.models.backbone import choose_backbone
from listwise.progress import stage_bars
from listwise.settings import LabelSettings

UNLABELLED_PARTNERS = 10  # similar photos: more of them find few matches, and join wrong groups
_VERSION = 1  # raised when the files of an interrupted run can no longer be used
_KEY = "listwise.key"


@explain_lost_workers()
def label(
    photos: str | Path | Images,
    out: str | Path,
    *,
    labels: bool | None = None,
    model: Model | str | Path | None = None,
    split: str | None = None,
    keep_work: bool = False,
    command: str = "",
    workers: int | None = None,
    device: str = "auto",
    on_progress: Progress | None = None,
    on_note: Callable[[str], object] = lambda note: None,
    **settings: Any,
) -> Labels:
    """Clean the labels of photos, or find labels for photos without any, by local features.

    With labels, the photos of each class are compared with each other, and the largest group of
    photos that match is kept. Without labels, each photo is compared with those that have the
    most similar descriptors, and every group becomes a class. An interrupted run resumes.

    Args:
        photos: folder of class folders, folder of photos, .csv or .parquet table, .txt list, or
            name of a data set.
        out: table of labels to write (.csv). A page (.html), a table of all photos (.photos.csv)
            and a summary (.json) are written next to it.
        labels: use the labels of the photos, or group the photos without labels; by default the
            labels are used if there are any.
        model: model folder or timm backbone that finds similar photos to compare; by default none
            with labels, else a pretrained backbone.
        split: examine only the photos of this split; the others keep their labels.
        keep_work: keep the features and matches in OUT.partial, so that a run with other thresholds
            takes seconds.
        command: command to show on the page.
        workers: number of processes; by default one per CPU core.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        on_progress: called with a stage, the number of steps done and in total; by default a
            terminal shows progress bars.
        on_note: called with sentences for the user.
        **settings: settings of `LabelSettings`: inliers, partners, min_photos, features,
            all_groups, merge, seed.

    Returns:
        The labels, and what happened to each photo.

    Examples:
        >>> labels = listwise.label("photos", "labels.csv")     # doctest: +SKIP
        >>> labels.summary()["kept"]                            # doctest: +SKIP
        3681
        >>> listwise.train("labels.csv")                        # doctest: +SKIP
    """
    # They need OpenCV; a missing extra is reported before anything else.
    from listwise.labeling.candidates import few_classes
    from listwise.labeling.comparisons import forget_photos
    from listwise.labeling.outputs import write_label_page, write_labels, write_table
    from listwise.labeling.rounds import match_photos
    from listwise.labeling.select import choose_labels
    from listwise.local.workers import Workers

    chosen = validated(LabelSettings, settings)
    out = _checked(Path(out), photos)
    images, others = _read(photos, labels, split, on_note)
    if "partners" not in settings and not isinstance(images, LabelledImages):
        chosen = chosen.model_copy(update={"partners": UNLABELLED_PARTNERS})
    if chosen.merge and model is None and isinstance(images, LabelledImages):
        classes = int((images.class_sizes() >= chosen.min_photos).sum())
        if not few_classes(classes, len(images)):
            raise InputError(
                f"{classes} classes are too many to compare all of them with each other: give "
                "`model`, which finds similar classes, or leave out `merge`"
            )
    network = _load(model, device, isinstance(images, LabelledImages), on_note)
    shown = nullcontext(on_progress) if on_progress else stage_bars()
    work = out.with_name(f"{out.name}.partial")
    with lock_folder(work, f"another process is writing {out}"), shown as advance:
        forget_photos()
        _prepare(work, images, chosen, on_note)
        with Workers(workers) as processes:
            matches = match_photos(images, work, chosen, network, processes, advance, on_note)
        found = choose_labels(images, matches, chosen, out)
        write_labels(found, others)
        write_table(found)
        write_label_page(found, matches, command, partial(advance, "writing the page"))
        if not keep_work:
            shutil.rmtree(work)
    forget_photos()
    if not found.classes:
        on_note(_advice(found))
    return found


def _checked(out: Path, source: str | Path | Images) -> Path:
    if out.suffix.lower() != ".csv":
        raise InputError(f"cannot write {out}: the name of `out` must end with .csv")
    if printable(out) != str(out):
        raise InputError(f"the path {printable(out)} is not UTF-8: give another name")
    if not out.parent.is_dir():
        raise InputError(f"cannot write {out}: the folder {out.parent} does not exist")
    if not isinstance(source, Images) and os.path.isfile(source):
        for file in (out, *map(out.with_suffix, (".photos.csv", ".json", ".html"))):
            if file.exists() and file.samefile(source):
                raise InputError(
                    f"cannot write {file}: the photos are read from it; give another `out`"
                )
    return out


def _read(
    source: str | Path | Images,
    labels: bool | None,
    split: str | None,
    on_note: Callable[[str], object],
) -> tuple[Images, LabelledImages | None]:
    """Return the photos to examine, and those that keep their labels."""
    images: Images
    if isinstance(source, Images):
        images = source
    else:
        images = photos_of(source) if labels is False else _with_labels(source, labels, on_note)
    if labels is False and isinstance(images, LabelledImages):
        images = Images(images.paths, images.ids, images.boxes)
    if labels and not isinstance(images, LabelledImages):
        raise InputError("the photos have no labels: give `labels=False`")
    others = None
    if split is not None:
        if not isinstance(images, LabelledImages):
            raise InputError("`split` needs labelled photos: leave it out")
        chosen = images.of_split(split)
        rest = [i for i, name in enumerate(images.splits or ()) if name != split]
        images, others = chosen, images.subset(rest) if rest else None
    if len(images) < 2:
        raise InputError(f"{len(images)} photo cannot be matched: give two or more")
    return images, others


def _with_labels(
    source: str | Path, labels: bool | None, on_note: Callable[[str], object]
) -> Images:
    """Read photos with their labels; without them if they have none and none are required."""
    try:
        found = labelled_of(source)
    except InputError:
        images = photos_of(source)
        some = any("label" in each for each in images.attributes or ())
        folders = Path(source).is_dir() and all("/" in name for name in images.ids)
        if labels or some or folders:  # there are labels, and the error tells what is wrong
            raise
        on_note("the photos have no labels: they are grouped without labels")
        return images
    if labels is None and Path(source).is_dir():
        on_note(
            f"the {len(found.class_names)} folders in {printable(source)} are used as labels; "
            "to group the photos without them, give `labels=False`"
        )
    return found


def _advice(found: Labels) -> str:
    """Return what to change after a run that kept no photo."""
    reasons = found.summary()["reasons"]
    why = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
    change = "lower `inliers`, or give more `partners`"
    if FEW_PHOTOS in reasons:
        change = f"lower `min_photos`, {change}"
    elif found.labelled:
        change += ", or group the photos without labels (`labels=False`)"
    return f"no photo was kept ({why}): look through {found.page}, then {change}"


def _prepare(
    work: Path, images: Images, settings: LabelSettings, on_note: Callable[[str], object]
) -> None:
    """Mark the folder of intermediate files with its photos, and empty it if it has others."""
    versions = [_file_version(path) for path in images.paths]
    key = photos_key(f"label {_VERSION} {settings.features} {versions}", images)
    name = work / _KEY
    if not name.exists():
        if any(work.glob("*.sqlite")):
            raise InputError(f"{work} contains other files: move them, or give another name")
    elif name.read_text(encoding="utf-8") == key:
        on_note(f"resuming with the features and matches in {work}")
        return
    else:
        on_note(
            f"{work} is from other photos, older versions of them or another number of "
            "features: discarding it"
        )
        for file in work.glob("*.*"):
            if file.name.startswith(("features.", "descriptors-", "matches.")):
                file.unlink() if file.is_file() else shutil.rmtree(file)
    write_text(name, key)


def _file_version(path: str) -> str:
    """Return the size and time of a file, which change when a photo changes."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _load(
    model: Model | str | Path | None,
    device: str,
    labelled: bool,
    on_note: Callable[[str], object],
) -> Model | None:
    if isinstance(model, Model) or (model is None and labelled):
        return model
    if model is None:
        model, reason = choose_backbone(Machine.detect(device))
        on_note(
            f"using the pretrained model {model} to find similar photos, because {reason}; choose "
            "another with `model`"
        )
    return load_model(model, device)
