"""Learn from marks: search an index, mark results, train its model, and upgrade the index.

Shows `index.mark`, `listwise.train(from_index=...)`, `index.upgrade`, `index.changes` and
`index.rollback`. Instead of a person, the true labels of the photos decide which results are the
same, so the script can also measure how much the model has learned on all photos.

    pip install '.[train,index,imagenet]'
    python examples/learn_from_marks.py labels.csv    # a table with the columns path and label
    python examples/learn_from_marks.py               # without a table: draws toy buildings

The index and the run are written to the folder `example-marks`; `--out` sets another folder. A
second call with another `--seed` uses the same index with other marks.
"""

import argparse
from pathlib import Path

import numpy as np

import listwise
from listwise.data import read_labelled
from listwise.demo import TOY_LABELS, make_toy_landmarks
from listwise.evaluation import evaluate_labelled


def mark_results(index: listwise.Index, labels: dict[str, str], count: int, seed: int) -> None:
    """Search by random entries and mark their first five results, until there are enough marks."""
    index.marks.undo(mark.id for mark in index.marks.read())
    entries = list(index)
    for place in np.random.default_rng(seed).permutation(len(entries)):
        query = entries[place]
        hits = index.search(like=query.id, k=5)
        same = [hit.id for hit in hits if labels[hit.path] == labels[query.path]]
        others = [hit.id for hit in hits if hit.id not in same]
        index.marks.add(query.id, same=same, different=others, by="truth")
        if len(index.marks.read()) >= count:
            break


def true_map(vectors: np.ndarray, labels: list[str]) -> float:
    """The mAP of all photos, each searched among the others, with their true labels."""
    return 100 * evaluate_labelled(vectors, np.array(labels)).mAP


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from marks on search results.")
    parser.add_argument("labels", nargs="?", type=Path, help="a .csv with path and label")
    parser.add_argument("--out", type=Path, default=Path("example-marks"), help="output folder")
    parser.add_argument("--model", default="tf_efficientnet_lite0", help="model of the index")
    parser.add_argument("--max-side", type=int, default=160, help="size of the photos")
    parser.add_argument("--marks", type=int, default=50, help="number of marks")
    parser.add_argument("--seed", type=int, default=0, help="chooses the queries")
    parser.add_argument("--buildings", type=int, default=30, help="number of toy buildings")
    parser.add_argument("--views", type=int, default=8, help="photos of each toy building")
    parser.add_argument("--no-upgrade", action="store_true", help="stop after the training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.labels
    if table is None:
        toy = make_toy_landmarks(
            options.out / "toy-landmarks", buildings=options.buildings, views=options.views
        )
        table = toy / TOY_LABELS
    images = read_labelled(table)
    names = [images.class_names[label] for label in images.labels]
    truth = dict(zip(images.paths, names, strict=True))

    place = options.out / "index"
    with listwise.open_index(place, options.model, max_side=options.max_side) as index:
        index.add(list(images.paths))
        mark_results(index, truth, options.marks, options.seed)
        marks = index.marks.read()
        same = sum(mark.same for mark in marks)
        print(f"{len(marks)} marks of {len(index)} photos: {same} same, {len(marks) - same} not")
        for pair in index.marks.suggest(3):
            print(f"unclear: {pair.one.id} and {pair.other.id}")

        run = listwise.train(
            run_folder=options.out / f"run-{options.seed}", from_index=index, adapter=True
        )
        found = run.comparison
        print(f"held-out classes: mAP {100 * found.old_map:.1f} -> {100 * found.new_map:.1f}")
        print(f"the new model is {'better' if found.better else 'not better'}")

        entries = list(index)
        before = index.store.vectors([entry.key for entry in entries])
        labels = [truth[entry.path] for entry in entries]
        # The model of the index has no whitening, so that of the new one is the trained layer.
        after = run.model.whitening.apply(before) if found.better else before
        print(f"all photos: mAP {true_map(before, labels):.1f} -> {true_map(after, labels):.1f}")

        if found.better and not options.no_upgrade:
            index.upgrade(run.model)
            print(f"results that stay: {100 * index.changes().kept:.0f} %")
            index.rollback()


if __name__ == "__main__":
    main()
