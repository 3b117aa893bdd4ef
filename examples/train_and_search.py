"""Train a network on your photos, then search them.

Shows `listwise.train`, `listwise.open_index`, `index.add` and `index.search`.

    pip install '.[train,index,imagenet]'
    python examples/train_and_search.py photos        # a folder with one folder of photos per class
    python examples/train_and_search.py               # without photos: draws a few toy buildings

The run, the model and the index are written to the folder `example-run`; `--out` sets another
folder.
"""

import argparse
from pathlib import Path

import listwise
from listwise.data import read_labelled
from listwise.demo import TOY_LABELS, make_toy_landmarks


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network on photos, then search them.")
    parser.add_argument("photos", nargs="?", help="class folders, or a .csv with path and label")
    parser.add_argument("--out", type=Path, default=Path("example-run"), help="output folder")
    parser.add_argument("--updates", type=int, default=4, help="optimizer steps of the training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    photos = options.photos
    if photos is None:
        toy = make_toy_landmarks(options.out / "toy-landmarks", buildings=9, views=8)
        photos = toy / TOY_LABELS

    # These settings make the example finish in seconds on a CPU. Leave them out for a real
    # training: Listwise then chooses settings from the photos and the machine.
    run = listwise.train(
        photos,
        options.out / "run",
        backbone="tf_efficientnet_lite0",
        batch_size=24,
        updates=options.updates,
        validate_every=options.updates,
        val_max_side=128,
        crops={"size": 96},
    )
    before, after = (line["validation_map"] for line in run.metrics if "validation_map" in line)
    print(f"validation mAP: {before:.3f} before training, {after:.3f} after")

    # The index keeps descriptors on disk and remembers the model.
    with listwise.open_index(options.out / "index", run.model, max_side=160) as index:
        added = index.add(photos)
        print(f"photos in the index: {added.added}")
        query = read_labelled(photos).paths[0]
        print(f"most similar to {Path(query).name}:")
        for hit in index.search(query, k=3):
            print(f"  {hit.score:.3f} {hit.id}")


if __name__ == "__main__":
    main()
