"""Models on small benchmarks with real files."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET

from listwise.data import read_labelled
from listwise.data.catalog import find_dataset
from listwise.descriptors import (
    DescriptorFile,
    DescriptorHeader,
    DescriptorWriter,
    Model,
    Whitening,
    extract,
)
from listwise.errors import InputError
from listwise.evaluation import evaluate_labelled, evaluate_scores
from listwise.models import RetrievalNet
from listwise.models.storage import ModelSettings
from listwise.results import describe_benchmark, evaluate, open_benchmark
from listwise.search import alpha_query_expansion
from listwise.search.refinement import REFINEMENTS
from listwise.settings import make_settings
from listwise.studies.poolings import VARIANTS, compare_poolings


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="session")
def toy(toy_landmarks, tmp_path_factory):
    return Path(shutil.copytree(toy_landmarks, tmp_path_factory.mktemp("toy") / "toy"))


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    return Model(RetrievalNet(TINY_NET, weights="random"))


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


@pytest.mark.parametrize("size", [5, 1000])
@pytest.mark.parametrize("method", sorted(REFINEMENTS))
def test_refined_figures_are_those_of_the_lists(described, method, size, monkeypatch):
    monkeypatch.setitem(REFINEMENTS, method, replace(REFINEMENTS[method], size=size))
    # Descriptors of a random network differ so little that rounding decides about their order.
    rng = np.random.default_rng(0)
    queries, database = (
        unit(part.astype(np.float64) + 0.1 * rng.normal(size=part.shape))
        for part in (described.queries, described.database)
    )
    spread = replace(described, queries=queries, database=database)
    table = []
    for query in queries:
        scores = database @ query
        order = np.argsort(-scores)
        short = order[:size]
        refined = REFINEMENTS[method].score(query, database[short])
        ranked = [*short[np.argsort(-refined)], *order[size:]]
        table.append(-np.argsort(ranked))
    judged = described.benchmark.judged
    expected = evaluate_scores(np.array(table), judged)
    found = spread.evaluate(refine=method)
    for protocol in ("Easy", "Medium", "Hard"):
        assert found[protocol].figures == pytest.approx(expected[protocol].figures, abs=1e-12)
    assert found["Medium"].mAP != pytest.approx(spread.evaluate()["Medium"].mAP, abs=1e-6)


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


def test_distractors_with_other_settings_are_refused(toy, model, tmp_path):
    photos = open_benchmark(toy).queries.subset([0])
    path = tmp_path / "more.parquet"
    extract(model, photos, path, scales=(1.0,), max_side=64, workers=0)
    tuned = ModelSettings(max_side=64, scales=(1.0, 0.5))
    with pytest.raises(InputError, match=r"made with --max-side 64 .*: extract .* --scales 1,0\.5"):
        evaluate(replace(model, tuned=tuned), toy, distractors=path, workers=0)
    alike = replace(model, tuned=tuned.model_copy(update={"scales": (1.0,)}))
    assert evaluate(alike, toy, distractors=path, workers=0).distractors == 1


def test_evaluate_gives_figures_and_a_table(toy, model, described):
    done = []
    found = evaluate(
        model,
        toy,
        expand=True,
        refine=["superglobal", "diffusion"],
        workers=0,
        on_progress=done.append,
    )
    assert sum(done) == found.benchmark.photo_count
    expected = {name: result.figures for name, result in described.evaluate().items()}
    assert found.figures == expected
    assert list(found.rows) == [
        "model",
        "model + αQE",
        "model + SuperGlobal",
        "model + diffusion",
    ]
    assert found.milliseconds.keys() == found.rows.keys()
    assert min(found.milliseconds.values()) > 0
    lines = found.table().splitlines()
    assert lines[0] == "toy"
    assert lines[1].split() == ["protocol", "mAP", "mP@1", "mP@5", "mP@10"]
    assert len(lines) == 3 + 4 * 3
    assert lines[3].split() == [
        "model",
        "Easy",
        *(f"{100 * v:.1f}" for v in found.figures["Easy"].values()),
    ]
    assert str(found) == found.table()
    assert found.unreadable == ()


def test_unreadable_photos_of_labelled_sets_are_left_out(model, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a/0", "a/1", "a/2", "b/0", "b/1"):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (48, 48, 3), np.uint8)).save(path)
    without = evaluate(model, tmp_path / "photos", workers=0)
    (tmp_path / "photos" / "a" / "00.jpg").write_bytes(b"not a photo")
    found = evaluate(model, tmp_path / "photos", workers=0)
    assert len(found.unreadable) == 1
    assert found.benchmark.queries is found.benchmark.database
    assert found.benchmark.database.ids == without.benchmark.database.ids
    assert found.figures == without.figures
    again = found.report(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "00.jpg" not in again
    images = read_labelled(tmp_path / "photos")
    again = evaluate(model, images, workers=0)
    assert again.figures == found.figures
    (described,) = again.described.values()
    expected = evaluate_labelled(described.database, described.benchmark.database.labels)
    assert again.figures["Labels"] == pytest.approx(expected.figures)
    with pytest.raises(InputError, match="labelled set"):
        described.evaluate(refine="diffusion")
    with pytest.raises(InputError, match="`split` is for your own labelled photos"):
        open_benchmark("roxford5k", tmp_path, "val")


def test_an_unreadable_photo_of_a_judged_benchmark_is_an_error(toy, model, tmp_path):
    benchmark = find_dataset(toy).benchmark()
    paths = (str(tmp_path / "gone.jpg"), *benchmark.database.paths[1:])
    broken = replace(benchmark, database=replace(benchmark.database, paths=paths))
    with pytest.raises(InputError, match=r"1 photos of toy cannot be read.*gone\.jpg"):
        describe_benchmark(model, broken, workers=0)
    with pytest.raises(InputError, match="`against` is the same model"):
        evaluate(tmp_path, toy, against=tmp_path)


def test_poolings_share_one_pass_and_equal_networks_of_their_own(toy):
    torch.manual_seed(0)
    benchmark = find_dataset(toy).benchmark()
    others = read_labelled(toy / "train.csv", "train")
    net = RetrievalNet(TINY_NET, weights="random")
    weights = toy.parent / "weights.safetensors"
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in net.backbone.state_dict().items()}, weights)
    seen = []
    rows = compare_poolings(
        benchmark,
        others,
        TINY_NET,
        weights,
        poolings=("mac", "gem"),
        dim=8,
        on_progress=seen.append,
    )
    assert sum(seen) == len(benchmark.queries) + len(benchmark.database) + len(others)
    assert [(row.pooling, row.variant) for row in rows] == [
        (pooling, variant) for pooling in ("mac", "gem") for variant in VARIANTS
    ]
    model = Model(RetrievalNet(TINY_NET, pooling="mac", weights=weights))
    plain = describe_benchmark(model, benchmark, workers=0).evaluate()
    assert rows[0].mean_average_precision["Medium"] == pytest.approx(plain["Medium"].mAP, abs=1e-3)
    whitening = Whitening.learn([model.describe(others, workers=0).descriptors], 8)
    white = describe_benchmark(Model(model.net, whitening), benchmark, workers=0)
    for row, expand in ((rows[1], False), (rows[2], True)):
        expected = white.evaluate(expand=expand)["Medium"].mAP
        assert row.mean_average_precision["Medium"] == pytest.approx(expected, abs=2e-2)
