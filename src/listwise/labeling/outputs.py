"""Write labels as a table for training, and what happened to each photo for programs."""

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from listwise.data import Images, LabelledImages
from listwise.data.images import Box, printable
from listwise.files import write_text
from listwise.labeling.result import REASONS, Labels


def write_labels(labels: Labels, others: LabelledImages | None) -> None:
    """Write the photos that were kept: path, label, and split and box if there are any.

    Photos of `others`, which were not examined, follow with their own labels.
    """
    kept = [i for i, photo in enumerate(labels.photos) if photo.label]
    rows = [
        (i, labels.images, labels.photos[i].label, labels.splits[i] if labels.splits else "")
        for i in kept
    ]
    if others is not None:
        rows += [
            (i, others, others.class_names[kind], others.splits[i] if others.splits else "")
            for i, kind in enumerate(others.labels.tolist())
        ]
    with_split = any(split for *_, split in rows)
    with_box = any(images.box(i) is not None for i, images, *_ in rows)
    header = ["path", "label", *(["split"] if with_split else []), *(["box"] if with_box else [])]
    table = [
        [
            _path(images, i, labels.file),
            label,
            *([split] if with_split else []),
            *([_box(images.box(i))] if with_box else []),
        ]
        for i, images, label, split in rows
    ]
    _write_csv(labels.file, header, table)


def write_table(labels: Labels) -> None:
    """Write a table with a row for every photo, and a summary as JSON."""
    header = ["path", "given", "label", "status", "reason", "group", "matches", "partner"]
    header += ["inliers", "copy_of"]
    rows = []
    for i, photo in enumerate(labels.photos):
        near = [_path(labels.images, j, labels.file) if j >= 0 else "" for j in photo[5::2]]
        status = "kept" if photo.label else "dropped"
        rows.append(
            [
                _path(labels.images, i, labels.file),
                photo.given,
                photo.label,
                status,
                labels.errors.get(i, photo.reason),
                photo.group,
                photo.matches,
                near[0],
                photo.inliers,
                near[1],
            ]
        )
    _write_csv(labels.table, header, rows)
    facts = {
        **labels.summary(),
        "settings": asdict(labels.settings),
        "reasons_explained": REASONS,
        "merges_found": [
            {**merge._asdict(), "photos": [labels.images.ids[i] for i in merge.photos]}
            for merge in labels.merges
        ],
        "copies_found": [[labels.images.ids[i] for i in each] for each in labels.copies],
        "unreadable": list(labels.errors.values()),
    }
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    write_text(labels.file.with_suffix(".json"), printable(text))


def _path(images: Images, number: int, out: Path) -> str:
    """Return the path of a photo relative to the folder of the table if it is inside it."""
    path, folder = images.paths[number], os.path.abspath(out.parent)
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


def _box(box: Box | None) -> str:
    return "" if box is None else ",".join(f"{edge:g}" for edge in box)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    # The names of photos that were left out may not be UTF-8.
    write_text(path, printable(text.getvalue()))
