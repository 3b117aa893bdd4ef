from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from listwise.data import CropSettings, LabelledImages, load_image, read_labelled, whole_image
from listwise.errors import InputError
from listwise.local.delf import Delf, find_locations
from listwise.local.delf_training import (
    DelfProgress,
    DelfResult,
    hold_out_photos,
    train_delf,
)
from listwise.models import RetrievalNet
from listwise.settings import DelfTraining

COMMON = DelfTraining(
    backbone="test_resnet.r160_in1k",
    weights="random",
    hidden=32,
    dim=16,
    val_fraction=0.2,
    crops=CropSettings(size=64, min_area=0.8),
    min_scale=0.5,
    fine_tune_updates=36,
    fine_tune_learning_rate=2e-3,
    attention_updates=120,
    attention_learning_rate=2e-2,
    batch_size=12,
    seed=2,
    pca_photos=1000,
    validate_every=20,
    device="cpu",
    workers=0,
)
BRIEF = COMMON.model_copy(
    update={
        "fine_tune_updates": 3,
        "attention_updates": 4,
        "batch_size": 4,
        "validate_every": 2,
        "pca_photos": 2,
        "dim": 4,
    }
)


@pytest.fixture(scope="module")
def images(photos) -> LabelledImages:
    return read_labelled(photos)


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory) -> tuple[DelfResult, list[DelfProgress]]:
    steps: list[DelfProgress] = []
    out = tmp_path_factory.mktemp("trained") / "delf"
    return train_delf(images, out, COMMON, on_progress=steps.append), steps


# What is learned


@pytest.mark.parametrize("step", ["fine-tuning", "attention"])
def test_both_steps_lower_the_loss(trained, step):
    losses = [each.loss for each in trained[1] if each.step == step]
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])


def test_held_out_photos_are_told_better_than_by_chance(trained):
    result, steps = trained
    assert result.attention_accuracy >= 3 / 8
    measured = [each.accuracy for each in steps if each.step == "attention"]
    assert result.attention_accuracy == max(each for each in measured if each is not None)


def test_the_pca_is_that_of_the_chosen_locations(trained, images):
    net = Delf.load(trained[0].folder)
    rows = []
    for index in hold_out_photos(images, COMMON.val_fraction, COMMON.seed)[0]:
        found = find_locations(net, whole_image(load_image(images.paths[index]))[None])
        rows.append(found.features[found.kept].double().numpy())
    features = np.concatenate(rows)
    features /= np.sqrt((features**2).sum(axis=1, keepdims=True))
    mean = features.mean(axis=0)
    np.testing.assert_allclose(net.pca_mean, mean, atol=1e-5)
    directions = np.linalg.svd(features - mean, full_matrices=False)[2][: COMMON.dim]
    # Directions are the same up to their sign and one common factor.
    learned = net.pca_projection.double().numpy()
    learned /= np.sqrt((learned**2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.abs(learned @ directions.T), np.eye(COMMON.dim), atol=1e-2)
    lengths = np.sqrt((net.pca_projection.double().numpy() ** 2).sum(axis=1))
    np.testing.assert_allclose(lengths / lengths[0], 1, atol=1e-5)


def test_the_folder_says_where_it_comes_from(trained, images):
    result, steps = trained
    net = Delf.load(result.folder)
    assert net.fingerprint() == result.fingerprint
    assert net.config.provenance["photos"] == len(images)
    assert net.config.provenance["attention_accuracy"] == result.attention_accuracy
    assert DelfTraining.model_validate(net.config.provenance["settings"]) == COMMON
    assert [file.name for file in result.folder.iterdir()] == ["model.safetensors"]
    assert [each.done for each in steps if each.step == "attention"] == list(range(1, 121))
    assert steps[-1].step == "pca"
    assert steps[-1].done == steps[-1].total


# Where it starts


@pytest.mark.parametrize("tuned", [True, False])
def test_a_trained_network_is_the_start_and_only_fine_tuning_changes_it(images, tmp_path, tuned):
    start = RetrievalNet("test_resnet.r160_in1k", weights="random")
    start.save(tmp_path / "global")
    changes = {"backbone": "resnet50", "weights": str(tmp_path / "global"), "fine_tune": tuned}
    result = train_delf(images, tmp_path / "delf", BRIEF.model_copy(update=changes))
    assert (result.fine_tuned_accuracy is not None) == tuned
    net = Delf.load(tmp_path / "delf")
    assert net.config.backbone == "test_resnet.r160_in1k"
    ours, theirs = net.backbone.state_dict(), start.backbone.state_dict()
    changed = {name for name, value in ours.items() if not torch.equal(value, theirs[name])}
    assert ("layer3.0.conv1.weight" in changed) == tuned
    assert not any("running" in name for name in changed)
    assert tuned or not changed


# Photos


def test_unreadable_photos_are_named_and_stood_in_for(photos, tmp_path):
    for file in sorted(photos.glob("class[01]/*.jpg")):
        target = tmp_path / "photos" / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes() if file.name != "0.jpg" else b"no photo")
    notes: list[str] = []
    settings = BRIEF.model_copy(update={"pca_photos": 1000, "attention_updates": 8})
    train_delf(
        read_labelled(tmp_path / "photos"), tmp_path / "delf", settings, on_note=notes.append
    )
    assert all(note.count("0.jpg") == 1 for note in notes)
    assert any("another photo of its class is used instead" in note for note in notes)
    assert any("the PCA is learned without this photo" in note for note in notes)


def test_what_cannot_be_trained_is_refused(trained, images, tmp_path):
    with pytest.raises(InputError, match="already holds a network"):
        train_delf(images, trained[0].folder, BRIEF)
    other = BRIEF.model_copy(update={"backbone": "mobilenetv3_small_050"})
    with pytest.raises(InputError, match="is not a ResNet of timm"):
        train_delf(images, tmp_path / "delf", other)
    one = images.subset(np.flatnonzero(images.labels == 0))
    with pytest.raises(InputError, match="6 photos of 1 classes"):
        train_delf(one, tmp_path / "delf", BRIEF)
    assert not (tmp_path / "delf").exists()


def labelled(labels: list[int]) -> LabelledImages:
    names = tuple(str(Path(f"{i}.jpg")) for i in range(len(labels)))
    kinds, numbers = np.unique(labels, return_inverse=True)
    classes = tuple(str(kind) for kind in kinds)
    return LabelledImages(
        names, names, None, labels=numbers.astype(np.int64), class_names=classes, splits=None
    )


@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=60), st.floats(0.01, 0.99), st.integers(0, 9)
)
def test_every_class_keeps_a_photo_to_learn_from(labels, fraction, seed):
    images = labelled(labels)
    if len(set(labels)) < 2 or len(set(labels)) == len(labels):
        with pytest.raises(InputError):
            hold_out_photos(images, fraction, seed)
        return
    train, held_out = hold_out_photos(images, fraction, seed)
    assert sorted([*train, *held_out]) == list(range(len(labels)))
    assert set(images.labels[train]) == set(images.labels)
    assert 1 <= len(held_out) <= max(1, round(fraction * len(labels)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_training_on_a_gpu(images, tmp_path):
    steps: list[DelfProgress] = []
    settings = COMMON.model_copy(update={"device": "cuda"})
    train_delf(images, tmp_path / "delf", settings, on_progress=steps.append)
    losses = [each.loss for each in steps if each.step == "attention"]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
