"""The study that compares Listwise with losses of pytorch-metric-learning."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.settings import make_config
from listwise.studies import peers
from listwise.studies.peer_recipes import (
    PeerLoss,
    PeerRecipe,
    _make_optimizer,
    _make_schedule,
    draw_balanced,
    evaluate_photos,
    train_peer,
)
from listwise.studies.peers import PeerOutcome, divide_classes, plan_peers, run_peers
from listwise.studies.peers_outputs import peers_table, verdict, write_peers
from listwise.training.run.folder import CHECKPOINT_FILE
from listwise.training.run.view import TrainView

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


def test_the_figures_are_those_of_the_saved_networks(study):
    made, outcomes = study
    for method, outcome in zip(made.methods, outcomes, strict=True):
        net = RetrievalNet.load(made.folder(method, 0) / "model")
        recipe = made.recipe if method.loss else None
        assert evaluate_photos(net, made.test, made.config(0), recipe) == outcome.figures


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


def test_a_study_stopped_during_the_test_keeps_its_training(photos, tmp_path, monkeypatch):
    made = plan_peers(photos, tmp_path / "out", GIVEN, recipe=RECIPE, seeds=1)
    made = replace(made, methods=made.methods[:1])
    folder = made.folder(made.methods[0], 0)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "evaluate_photos", stop)
        with pytest.raises(KeyboardInterrupt):
            run_peers(made)
    metrics = (folder / "metrics.jsonl").read_text()
    assert (folder / CHECKPOINT_FILE).exists()
    (outcome,) = run_peers(made)
    assert outcome.updates == 2
    assert (folder / "metrics.jsonl").read_text() == metrics  # nothing was trained again
    assert not (folder / CHECKPOINT_FILE).exists()


def stop(*arguments):
    raise KeyboardInterrupt


def test_the_outputs_have_a_row_per_recipe_and_the_verdict(study):
    made, outcomes = study
    write_peers(made, outcomes, "listwise study peers photos")
    text = (made.out / "table.md").read_text()
    assert peers_table(outcomes) in text
    assert verdict(outcomes) in text
    assert "24 training photos of 4 classes, 1 epochs, batches of 8" in text
    with (made.out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["Recall@1"]) for row in rows] == [o.figures["Recall@1"] for o in outcomes]
    assert (made.out / "plot.svg").read_text().count('class="mean"') == 6


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
    noisy = [
        outcome("listwise", 0, 0.60, 0.30, 1.0),
        outcome("listwise", 1, 0.64, 0.30, 3.0),
        outcome("proxy-anchor", 0, 0.61, 0.20, 1.0),
        outcome("proxy-anchor", 1, 0.61, 0.20, 1.0),
    ]
    assert "about equal to proxy-anchor in Recall@1 (62.0 against 61.0)" in verdict(noisy)
    assert verdict(noisy).endswith("in 2.00 × the time of proxy-anchor.")
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


def test_training_lowers_the_loss_and_starts_with_the_weights_of_its_seed(photos):
    images, _ = divide_classes(read_labelled(photos), "photos")
    config = make_config(GIVEN | {"backbone": "test_resnet"})
    nets = {}
    for epochs in (0, 12):
        recipe = replace(RECIPE, epochs=epochs, batch_size=24)
        nets[epochs] = train_peer("proxy-anchor", 1e-3, images, config, recipe, seed=1).net
    torch.manual_seed(1)
    start = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
    for name, value in start.state_dict().items():
        assert torch.equal(value, nets[0].state_dict()[name]), name
    before, after = (evaluate_photos(nets[e], images, config, RECIPE) for e in (0, 12))
    assert after["mAP@R"] > before["mAP@R"]


@pytest.mark.parametrize(
    ("name", "epochs", "warmup"),
    [
        ("multi-similarity", 30, 0),
        ("proxy-anchor", 30, 50),
        ("proxy-anchor", 2, 10),  # half of a short training
        ("proxy-anchor", 1, 5),
    ],
)
def test_proxy_anchor_trains_the_backbone_after_its_warmup(name, epochs, warmup):
    torch.manual_seed(0)
    net = RetrievalNet(TINY_NET, projection=8, weights="random")
    loss, recipe = PeerLoss(name, 3, net.dim), PeerRecipe(epochs=epochs)
    optimizer = _make_optimizer(net, loss, 0.01, recipe)
    schedule = _make_schedule(optimizer, loss, recipe, 10)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    changed = []
    for update in range(warmup + 1):
        before = [each.detach().clone() for each in net.parameters()]
        if update in (0, warmup - 1, warmup):
            optimizer.zero_grad()
            loss(net(torch.rand(6, 3, 32, 32)), labels).backward()
            optimizer.step()
            names = [each for each, _ in net.named_parameters()]
            pairs = zip(names, before, net.parameters(), strict=True)
            changed.append({each.split(".")[0] for each, old, new in pairs if (old != new).any()})
        schedule.step()
    assert changed[-1] >= {"backbone", "projection"}
    assert all(each == {"projection"} for each in changed[:-1])
    assert len(changed) == (3 if warmup else 1)


def test_a_photo_that_cannot_be_decoded_is_named_once(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    damaged = folder / "class0" / "0.jpg"
    damaged.write_bytes(damaged.read_bytes()[:400])
    images, _ = divide_classes(read_labelled(folder), "photos")
    lines = []
    view = TrainView()
    view.message = lines.append
    recipe = replace(RECIPE, epochs=2, batch_size=24, per_class=6)
    train_peer("multi-similarity", 1e-4, images, make_config(GIVEN), recipe, 0, view)
    assert len(lines) == 1
    assert str(damaged) in lines[0]
    assert lines[0].endswith("another photo of its class is used instead")


def test_the_losses_are_those_of_pytorch_metric_learning():
    from pytorch_metric_learning import losses, miners

    torch.manual_seed(0)
    descriptors = torch.nn.functional.normalize(torch.randn(12, 8), dim=1)
    labels = torch.arange(12) // 3
    pairs = miners.MultiSimilarityMiner(0.1)(descriptors, labels)
    expected = losses.MultiSimilarityLoss(2, 50, 0.5)(descriptors, labels, pairs)
    assert torch.equal(PeerLoss("multi-similarity", 4, 8)(descriptors, labels), expected)
    torch.manual_seed(1)
    anchors = PeerLoss("proxy-anchor", 4, 8)
    torch.manual_seed(1)
    reference = losses.ProxyAnchorLoss(4, 8)
    assert torch.equal(anchors(descriptors, labels), reference(descriptors, labels))
    assert [list(p.shape) for p in anchors.parameters()] == [[4, 8]]


def table(photos, tmp_path, splits):
    lines = ["path,label,split"]
    for i, split in enumerate(splits):
        lines += [f"{photos}/class{i}/{n}.jpg,class{i},{split}" for n in range(6)]
    path = tmp_path / "photos.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("splits", "trained", "tested"),
    [
        (["train"] * 5 + ["val"] * 3, 5, 3),
        (["train"] * 5 + ["test"] * 3, 5, 3),
        (["train"] * 4 + ["val"] * 2 + ["test"] * 2, 6, 2),
    ],
)
def test_splits_of_a_table_are_used(photos, tmp_path, splits, trained, tested):
    made = plan_peers(table(photos, tmp_path, splits), tmp_path / "out", GIVEN, seeds=1)
    assert (len(made.train.class_names), len(made.test.class_names)) == (trained, tested)
    assert set(made.plan.train.class_names) < set(made.train.class_names)
    if trained == 6:  # the validation classes of the table
        assert made.plan.validation.class_names == ("class4", "class5")


def test_mistakes_are_explained(photos, tmp_path):
    with pytest.raises(InputError, match="choose from multi-similarity, proxy-anchor"):
        plan_peers(photos, tmp_path, GIVEN, losses=["triplet"])
    with pytest.raises(InputError, match="a value twice"):
        plan_peers(photos, tmp_path, GIVEN, rates=[1e-4, 1e-4])
    with pytest.raises(InputError, match="`seed` cannot be given"):
        plan_peers(photos, tmp_path, GIVEN | {"seed": 1})
    with pytest.raises(InputError, match="no photo has the split test or val"):
        plan_peers(table(photos, tmp_path, ["train"] * 4 + ["query"] * 4), tmp_path, GIVEN)
    images = read_labelled(photos)
    mixed = replace(images, splits=("train", "test") * (len(images) // 2))
    with pytest.raises(InputError, match="'class0' has training and test photos"):
        divide_classes(mixed, "photos")
