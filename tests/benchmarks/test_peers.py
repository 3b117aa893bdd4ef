"""The study that compares Listwise with losses of pytorch-metric-learning."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from benchmarks.__main__ import main
from benchmarks.peer_recipes import (
    PeerRecipe,
    draw_balanced,
    evaluate_photos,
    train_peer,
)
from benchmarks.peers import (
    PeerOutcome,
    divide_classes,
    plan_peers,
    run_peers,
    verdict,
)
from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.settings import make_config

pytest.importorskip("pytorch_metric_learning")

GIVEN = {
    "backbone": TINY_NET,
    "weights": "random",
    "projection": 8,
    "val_fraction": 0.25,
    "val_max_side": 48,
    "crops": {"size": 32},
    "batch_size": 12,
    "updates": 2,
    "validate_every": 1,
    "device": "cpu",
    "workers": 0,
}
RECIPE = PeerRecipe(epochs=1, batch_size=8, per_class=2, crop=32)


@pytest.fixture(scope="module")
def study(photos, tmp_path_factory):
    """A finished study of three recipes with one seed."""
    made = plan_peers(
        photos, tmp_path_factory.mktemp("peers") / "out", GIVEN, recipe=RECIPE, seeds=1
    )
    return made, run_peers(made)


def test_every_recipe_trains_on_the_first_half_of_the_classes_and_is_tested_on_the_rest(study):
    made, outcomes = study
    assert made.train.class_names == ("class0", "class1", "class2", "class3")
    assert made.test.class_names == ("class4", "class5", "class6", "class7")
    assert set(made.plan.train.class_names) < set(made.train.class_names)
    assert [outcome.method for outcome in outcomes] == [
        "listwise", "multi-similarity", "proxy-anchor",
    ]  # fmt: skip
    for outcome in outcomes:
        assert 0 < outcome.figures["mAP@R"] <= outcome.figures["Recall@1"] <= 1
        assert outcome.seconds > 0
    # 24 photos in batches of 8; Listwise has two updates.
    assert [outcome.updates for outcome in outcomes] == [2, 3, 3]
    assert [outcome.backwards for outcome in outcomes][1:] == [24, 24]


def test_a_finished_study_is_read_and_other_settings_are_refused(study, photos):
    made, outcomes = study
    again = plan_peers(photos, made.out, GIVEN, recipe=RECIPE, seeds=1)
    assert run_peers(again) == outcomes
    with pytest.raises(InputError, match=r"multi-similarity.seed-0 is a run with other settings"):
        plan_peers(photos, made.out, GIVEN, recipe=replace(RECIPE, epochs=2), seeds=1)
    with pytest.raises(InputError, match=r"listwise.seed-0 is a run with other settings"):
        plan_peers(photos, made.out, GIVEN | {"bins": 5}, recipe=RECIPE, seeds=1)
    content = json.loads((made.out / "study.json").read_text())
    assert content == {"study": "peers"}


def outcome(method, seed, recall, map_at_r, seconds):
    return PeerOutcome(method, seed, seconds, 1, 1, {"Recall@1": recall, "mAP@R": map_at_r})


def test_the_verdict_names_the_best_rival_of_each_metric_and_the_fastest():
    outcomes = [
        outcome("listwise", 0, 0.627, 0.237, 90.0),
        outcome("multi-similarity", 0, 0.640, 0.200, 100.0),
        outcome("proxy-anchor", 0, 0.600, 0.225, 120.0),
    ]
    assert verdict(outcomes) == (
        "Listwise is behind multi-similarity in Recall@1 (62.7 against 64.0) and ahead of "
        "proxy-anchor in mAP@R (23.7 against 22.5), in 0.90 × the time of multi-similarity."
    )
    assert "needs a run" in verdict(outcomes[:1])


def test_batches_are_balanced_and_repeatable():
    labels = np.repeat(np.arange(10), [2, 3, 9, 9, 9, 9, 9, 9, 9, 9])
    batch = draw_balanced(labels, 20, 4, seed=0, update=3)
    assert np.array_equal(batch, draw_balanced(labels, 20, 4, seed=0, update=3))
    assert not np.array_equal(batch, draw_balanced(labels, 20, 4, seed=1, update=3))
    found, counts = np.unique(labels[batch], return_counts=True)
    assert (len(found), set(counts)) == (5, {4})
    # Two classes fill the batch with ten images each.
    _, counts = np.unique(np.repeat([0, 1], 30)[draw_balanced(np.repeat([0, 1], 30), 20, 4, 0, 0)],
                          return_counts=True)  # fmt: skip
    assert list(counts) == [10, 10]


def test_training_improves_the_network_that_its_seed_makes(photos):
    images, _ = divide_classes(read_labelled(photos), "photos")
    config = make_config(GIVEN | {"backbone": "test_resnet"})
    recipe = replace(RECIPE, epochs=12, batch_size=24)
    trained = train_peer("proxy-anchor", 1e-3, images, config, recipe, seed=1).net
    torch.manual_seed(1)
    start = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
    before, after = (evaluate_photos(net, images, config, RECIPE) for net in (start, trained))
    assert after["mAP@R"] > before["mAP@R"]


def test_a_class_in_both_parts_is_refused(photos):
    images = read_labelled(photos)
    mixed = replace(images, splits=("train", "test") * (len(images) // 2))
    with pytest.raises(InputError, match="'class0' has training and test photos"):
        divide_classes(mixed, "photos")


def test_the_comparison_as_it_is_typed(photos, tmp_path, capsys):
    (tmp_path / "quick.yaml").write_text("updates: 2\nbatch_size: 12\ncrops: {size: 32}\n")
    command = [
        "peers", str(photos), "--out", str(tmp_path / "out"), "--seeds", "1",
        "--config", str(tmp_path / "quick.yaml"), "--backbone", TINY_NET, "--weights", "random",
        "--projection", "8", "--epochs", "1", "--batch", "12", "--crop", "32", "--device", "cpu",
        "--workers", "0", "--json",
    ]  # fmt: skip
    main(command)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["recipe"] for row in rows] == ["listwise", "multi-similarity", "proxy-anchor"]
    assert "Listwise is " in (tmp_path / "out" / "table.md").read_text()
