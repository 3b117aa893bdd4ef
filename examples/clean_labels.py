"""Clean the labels of photos by geometry, and find labels for photos that have none.

Shows `listwise.label` with and without labels. Photos of a class are matched by local features, and
the largest group of photos that match is kept.

    pip install '.[local,imagenet]'
    python examples/clean_labels.py photos            # class folders, or a .csv with path and label
    python examples/clean_labels.py                   # without photos: draws a few toy buildings

The labels and the page to look through are written to the folder `example-labels`; `--out` sets
another folder.
"""

import argparse
import csv
from pathlib import Path

import listwise
from listwise.data import read_labelled
from listwise.demo import TOY_LABELS, make_toy_landmarks


def toy_labels(folder: Path) -> tuple[Path, set[str]]:
    """Draw three toy buildings, and give every eighth photo the label of another one."""
    toy = make_toy_landmarks(folder / "toy-landmarks", buildings=12, views=8)
    images = read_labelled(toy / TOY_LABELS)
    images = images.subset([i for i, label in enumerate(images.labels) if label % 3 == 0])
    names = images.class_names
    table, wrong = folder / "noisy.csv", set()
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for number, (path, label) in enumerate(zip(images.paths, images.labels, strict=True)):
            if number % 8 == 3:
                wrong.add(path)
                label += 1
            writer.writerow([path, names[label % len(names)]])
    return table, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Clean the labels of photos by geometry.")
    parser.add_argument("photos", nargs="?", help="class folders, or a .csv with path and label")
    parser.add_argument("--out", type=Path, default=Path("example-labels"), help="output folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    photos, wrong, settings = options.photos, set(), {}
    if photos is None:
        photos, wrong = toy_labels(options.out)
        # Drawn buildings have the same windows and doors, which match in any two pictures. The
        # default, 8 inliers, suits photographs. So few photos need no worker processes.
        settings = {"inliers": 30, "workers": 0}

    labels = listwise.label(photos, options.out / "labels.csv", **settings)
    counts = labels.summary()
    print(f"kept {counts['kept']} of {counts['photos']} photos in {counts['classes']} classes")
    print(f"look through {labels.page}")
    if wrong:
        kept = {path for paths in labels.classes.values() for path in paths}
        print(f"wrong labels: {len(wrong)}, still there: {len(wrong & kept)}")

    # Without labels, every group of photos that match becomes a class.
    groups = listwise.label(photos, options.out / "groups.csv", labels=False, **settings)
    print(f"without labels: {groups.summary()['classes']} classes")
    for name, paths in list(groups.classes.items())[:5]:
        print(f"  {name}: {len(paths)} photos")


if __name__ == "__main__":
    main()
