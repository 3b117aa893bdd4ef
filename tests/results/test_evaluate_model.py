"""Models on small benchmarks with real files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from listwise.data import read_labelled
from listwise.data.catalog import Benchmark, find_dataset
from listwise.data.toy import make_toy_landmarks
from listwise.descriptors import (
    DescriptorFile,
    DescriptorHeader,
    DescriptorWriter,
    Model,
    Whitening,
)
from listwise.descriptors.settings import make_settings
from listwise.errors import InputError
from listwise.evaluation import evaluate_scores
from listwise.models import RetrievalNet
from listwise.results import describe_benchmark
from listwise.search import alpha_query_expansion
from listwise.studies.poolings import VARIANTS, compare_poolings


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    return make_toy_landmarks(folder, buildings=9, views=6, workers=1)


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    return Model(RetrievalNet("resnet10t", weights="random"))


@pytest.fixture(scope="session")
def described(toy, model):
    return describe_benchmark(model, find_dataset(toy).benchmark(), workers=0)


def test_queries_are_cropped_to_their_boxes(toy, model, described):
    benchmark = find_dataset(toy).benchmark()
    photo = Image.open(benchmark.queries.paths[0]).crop(
        tuple(round(x) for x in benchmark.queries.box(0))
    )
    pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)[None]
    with torch.no_grad():
        expected = model.net.eval()(pixels)[0]
    np.testing.assert_allclose(described.queries[0], expected.numpy(), atol=1e-5)


def test_figures_are_those_of_the_score_matrix(described):
    judged = described.benchmark.judged
    plain = evaluate_scores(described.queries @ described.database.T, judged)
    found = described.evaluate()
    for protocol in ("Easy", "Medium", "Hard"):
        assert found[protocol].figures == pytest.approx(plain[protocol].figures, abs=1e-12)
    queries = alpha_query_expansion(described.queries, described.database)
    expanded = evaluate_scores(queries @ described.database.T, judged)
    assert described.evaluate(expand=True)["Easy"].mAP == pytest.approx(
        expanded["Easy"].mAP, abs=1e-12
    )


def test_distractors_count_as_wrong(described, model, tmp_path):
    rng = np.random.default_rng(0)
    rows = described.queries.repeat(3, 0) + 0.01 * rng.normal(size=(3 * len(described.queries), 1))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    header = DescriptorHeader(
        model="m", whitened=False, settings=make_settings(None, (1.0,), 3.0, "float32")
    )
    path = tmp_path / "more.parquet"
    with DescriptorWriter(path, rows.shape[1], header) as writer:
        ids = [str(i) for i in range(len(rows))]
        writer.write(ids, np.ones((len(rows), 2), np.int32), rows)
    found = described.evaluate(distractors=DescriptorFile.open(path))
    table = np.hstack([described.queries @ described.database.T, described.queries @ rows.T])
    judged = described.benchmark.judged
    padded = replace(judged, names=[*judged.names, *ids])
    assert found["Medium"].mAP == pytest.approx(evaluate_scores(table, padded)["Medium"].mAP)
    assert found["Medium"].mAP < described.evaluate()["Medium"].mAP


def test_labelled_photos(toy, model, tmp_path):
    images = read_labelled(toy / "train.csv", "val")
    benchmark = Benchmark.of_labels("val", images)
    found = describe_benchmark(model, benchmark, workers=0)
    result = found.evaluate()["Labels"].figures
    assert set(result) == {"mAP", "mAP@R", "Recall@1", "Recall@2", "Recall@4", "Recall@8"}
    assert 0 < result["mAP"] <= 1
    with pytest.raises(InputError, match="labelled set"):
        found.evaluate(expand=True)


def test_an_unreadable_photo_of_a_judged_benchmark_is_an_error(toy, model, tmp_path):
    benchmark = find_dataset(toy).benchmark()
    paths = (str(tmp_path / "gone.jpg"), *benchmark.database.paths[1:])
    images = type(benchmark.database)(paths, benchmark.database.ids, None)
    broken = replace(benchmark, database=images)
    with pytest.raises(InputError, match=r"1 photos of toy cannot be read.*gone\.jpg"):
        describe_benchmark(model, broken, workers=0)


def test_poolings_share_one_pass_and_equal_networks_of_their_own(toy):
    torch.manual_seed(0)
    benchmark = find_dataset(toy).benchmark()
    others = read_labelled(toy / "train.csv", "train")
    net = RetrievalNet("resnet10t", weights="random")
    weights = toy.parent / "weights.safetensors"
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in net.backbone.state_dict().items()}, weights)
    seen = []
    rows = compare_poolings(
        benchmark,
        others,
        "resnet10t",
        weights,
        poolings=("mac", "gem"),
        dim=8,
        on_progress=seen.append,
    )
    assert sum(seen) == len(benchmark.queries) + len(benchmark.database) + len(others)
    assert [(row.pooling, row.variant) for row in rows] == [
        (pooling, variant) for pooling in ("mac", "gem") for variant in VARIANTS
    ]
    model = Model(RetrievalNet("resnet10t", pooling="mac", weights=weights))
    plain = describe_benchmark(model, benchmark, workers=0).evaluate()
    assert rows[0].mean_average_precision["Medium"] == pytest.approx(plain["Medium"].mAP, abs=1e-3)
    whitening = Whitening.learn([model.describe(others, workers=0).descriptors], 8)
    white = describe_benchmark(Model(model.net, whitening), benchmark, workers=0)
    for row, expand in ((rows[1], False), (rows[2], True)):
        expected = white.evaluate(expand=expand)["Medium"].mAP
        assert row.mean_average_precision["Medium"] == pytest.approx(expected, abs=2e-2)
