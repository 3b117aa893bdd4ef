"""A fixed part of the 362-pixel revisited Oxford with the ImageNet ResNet-50, for real."""

import os
from pathlib import Path

import numpy as np
import pytest
from tiny_net import TINY_NET

from listwise.data.catalog import find_dataset
from listwise.descriptors import Model
from listwise.models import RetrievalNet
from listwise.results import describe_benchmark

pytestmark = pytest.mark.skipif(
    "LISTWISE_REAL_DATA" not in os.environ, reason="LISTWISE_REAL_DATA names no folder"
)
QUERIES = range(0, 70, 10)
DISTRACTORS = 20


def part(benchmark, rng):
    """Seven queries, at most three easy and three hard photos of each, and some other photos."""
    judged = benchmark.judged
    keep = set()
    for query in QUERIES:
        for grade, most in (("easy", 3), ("hard", 3), ("junk", 1)):
            keep |= set(judged.grades[grade][query][:most].tolist())
    keep |= set(rng.choice(len(judged.names), DISTRACTORS, replace=False).tolist())
    return benchmark.subset(list(QUERIES), sorted(keep))


@pytest.mark.slow
def test_imagenet_resnet50_on_part_of_revisited_oxford():
    real = Path(os.environ["LISTWISE_REAL_DATA"])
    data = find_dataset(real / "data" / "roxford5k")
    assert data.check() == []
    benchmark = part(data.benchmark(), np.random.default_rng(0))
    net = RetrievalNet("resnet50", weights=real / "weights" / "resnet50-imagenet.safetensors")
    found = describe_benchmark(Model(net), benchmark, workers=0, max_side=128).evaluate()
    trivial = RetrievalNet(TINY_NET, weights="random")
    chance = describe_benchmark(Model(trivial), benchmark, workers=0, max_side=48).evaluate()
    assert found["Easy"].mAP > found["Medium"].mAP > found["Hard"].mAP
    assert found["Medium"].mAP > chance["Medium"].mAP + 0.1
    assert 0.3 < found["Medium"].mAP < 0.7
