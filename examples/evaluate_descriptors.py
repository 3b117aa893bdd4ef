"""Evaluate descriptors that you have as NumPy arrays.

Shows `evaluate_descriptors` on revisited Oxford (Easy, Medium, Hard) and `evaluate_labelled` on a
labelled set. The descriptors may come from any network: one unit row per photo.

    pip install .
    python examples/evaluate_descriptors.py
    python examples/evaluate_descriptors.py --ground-truth gnd_roxford5k.pkl \\
        --queries queries.npy --database database.npy

The rows of the two arrays must be in the order of `qimlist` and `imlist` in the ground truth file.
Without arguments, the script generates a small ground truth and random descriptors.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from listwise.data.catalog.ground_truth import read_ground_truth
from listwise.evaluation import JudgedQueries, evaluate_descriptors, evaluate_labelled

Array = NDArray[np.floating]


def unit(rows: Array) -> Array:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def generated(rng: np.random.Generator) -> tuple[JudgedQueries, Array, Array]:
    """A ground truth of 5 queries and 200 photos, with descriptors [5, 64] and [200, 64]."""
    photos = rng.permutation(200)[:60].reshape(5, 12)  # 12 judged photos for each query
    judged = JudgedQueries.revisited(
        names=[f"photo{i}" for i in range(200)],
        queries=[f"query{i}" for i in range(5)],
        boxes=[(0, 0, 640, 480)] * 5,
        easy=[row[:6] for row in photos],
        hard=[row[6:10] for row in photos],
        junk=[row[10:] for row in photos],
    )
    queries, database = unit(rng.normal(size=(5, 64))), rng.normal(size=(200, 64))
    for query, row in zip(queries, photos, strict=True):
        database[row[:6]] += 4 * query  # easy photos are more similar to the query than hard ones
        database[row[6:]] += 2 * query
    return judged, queries, unit(database)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate descriptors in NumPy files.")
    parser.add_argument("--ground-truth", help="gnd_roxford5k.pkl or gnd_rparis6k.pkl")
    parser.add_argument("--queries", help="descriptors of the queries, .npy [Q, C]")
    parser.add_argument("--database", help="descriptors of the database, .npy [N, C]")
    options = parser.parse_args()
    rng = np.random.default_rng(0)

    if options.ground_truth:
        judged = read_ground_truth(options.ground_truth)
        queries = unit(np.load(options.queries))
        database = np.load(options.database, mmap_mode="r")  # read block by block
    else:
        judged, queries, database = generated(rng)
    results = evaluate_descriptors(queries, database, judged)
    for protocol, result in results.items():
        metrics = "  ".join(f"{name} {100 * value:.1f}" for name, value in result.figures.items())
        print(f"{protocol:6}  {metrics}")
    hardest = int(np.nanargmin(results["Medium"].per_query_ap))
    print(f"lowest AP (Medium): {judged.queries[hardest]}")

    # A labelled set: each row is a query, and all other rows are its database.
    labels = np.arange(60) // 6
    descriptors = unit(rng.normal(size=(10, 32))[labels] + rng.normal(size=(60, 32)))
    labelled = evaluate_labelled(descriptors, labels)
    print("labelled set:", {name: round(value, 3) for name, value in labelled.figures.items()})


if __name__ == "__main__":
    main()
