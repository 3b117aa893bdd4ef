"""A fixed part of the 362-pixel revisited Oxford with the ImageNet ResNet-50, for real."""

import os
from pathlib import Path

import numpy as np
import pytest

from listwise.data.catalog import Benchmark, find_dataset
from listwise.data.ground_truth import GroundTruth
from listwise.descriptors import Model
from listwise.models import RetrievalNet
from listwise.results.evaluate import evaluate_searched, search_benchmark

pytestmark = pytest.mark.skipif(
    "LISTWISE_REAL_DATA" not in os.environ, reason="LISTWISE_REAL_DATA names no folder"
)
QUERIES = range(0, 70, 10)
DISTRACTORS = 60


def part(benchmark, rng):
    """Seven queries, at most eight easy and eight hard photos of each, and some other photos."""
    truth = benchmark.truth
    keep = set()
    for query in QUERIES:
        keep |= {*truth.easy[query][:8], *truth.hard[query][:8], *truth.junk[query][:2]}
    keep |= set(rng.choice(len(truth.names), DISTRACTORS, replace=False))
    kept = np.array(sorted(keep))
    place = {int(old): new for new, old in enumerate(kept)}

    def moved(judged):
        return [
            np.array([place[i] for i in judged[q].tolist() if i in place], np.int64)
            for q in QUERIES
        ]

    small = GroundTruth(
        [truth.names[i] for i in kept],
        [truth.queries[q] for q in QUERIES],
        [truth.boxes[q] for q in QUERIES],
        moved(truth.easy),
        moved(truth.hard),
        moved(truth.junk),
    )
    return Benchmark(
        "part of roxford5k",
        "revisited",
        benchmark.database.subset(kept),
        benchmark.queries.subset(list(QUERIES)),
        small,
    )


@pytest.mark.slow
def test_imagenet_resnet50_on_part_of_revisited_oxford():
    real = Path(os.environ["LISTWISE_REAL_DATA"])
    data = find_dataset(real / "data" / "roxford5k")
    assert data.check() == []
    benchmark = part(data.benchmark(), np.random.default_rng(0))
    net = RetrievalNet("resnet50", weights=real / "weights" / "resnet50-imagenet.safetensors")
    found = evaluate_searched(search_benchmark(Model(net), benchmark, workers=0, max_side=224))
    trivial = RetrievalNet("resnet50", weights="random")
    chance = evaluate_searched(search_benchmark(Model(trivial), benchmark, workers=0, max_side=96))
    assert found["Easy"].mAP > found["Medium"].mAP > found["Hard"].mAP
    assert found["Medium"].mAP > chance["Medium"].mAP + 0.1
    assert 0.3 < found["Medium"].mAP < 0.7
