"""A small network that learns the descriptors of a teacher."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_examples import SETTINGS as SMALL
from training_examples import Witness

import listwise
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.training import resume
from listwise.training.distillation import DistillationLoss

SETTINGS = SMALL | {"crops": {"size": 48}, "updates": 2, "validate_every": 1}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    torch.manual_seed(7)
    model = Model(RetrievalNet("test_efficientnet", projection=24, weights="random").eval())
    return model.save(tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def student(photos, teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("student") / "run"
    return listwise.train(photos, folder, progress=False, teacher=teacher.folder, **SETTINGS)


def test_the_loss_is_one_minus_the_cosine():
    loss = DistillationLoss()
    loss.targets = torch.eye(3)
    descriptors = torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]])
    assert loss(descriptors, torch.tensor([1, 2])).item() == pytest.approx(1 - (0.8 + 1) / 2)


def test_the_student_computes_descriptors_like_those_of_the_teacher(photos, teacher, student):
    model = student.model
    assert (model.dim, model.teacher) == (teacher.dim, teacher.fingerprint)
    cosines = (model.encode(photos) * teacher.encode(photos)).sum(axis=1)
    assert cosines.mean() > 0.9
    assert student.result.best_map > 0.3


def test_a_resumed_student_needs_no_teacher(photos, teacher, student, tmp_path):
    settings = SETTINGS | {"checkpoint_every": 1}
    with pytest.raises(InputError, match=r"`teacher` must be a model, .* not int"):
        listwise.train(photos, tmp_path / "run", teacher=3, **settings)
    with pytest.raises(InputError, match="`teacher` has descriptors of 24 dimensions"):
        listwise.train(photos, tmp_path / "run", teacher=teacher, projection=7, **settings)
    with pytest.raises(KeyboardInterrupt):
        listwise.train(
            photos, tmp_path / "run", view=Witness(stop_at=1), teacher=teacher, **settings
        )
    known = tmp_path / "run" / "teacher.safetensors"
    content = known.read_bytes()
    known.write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"teacher\.safetensors is damaged"):
        resume(tmp_path / "run").fit()
    known.write_bytes(content)
    resume(tmp_path / "run").fit()
    assert Model(RetrievalNet.load(tmp_path / "run" / "model")).teacher == teacher.fingerprint
    first, second = (
        load_file(run / "checkpoint.safetensors") for run in (tmp_path / "run", student.folder)
    )
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_only_a_student_queries_the_index_of_the_teacher(photos, teacher, student, tmp_path):
    with listwise.open_index(tmp_path / "index", teacher.folder, device="cpu") as index:
        index.add(photos)
    photo = sorted(photos.rglob("*.jpg"))[0]
    new = tmp_path / "new.jpg"
    new.write_bytes(photo.read_bytes() + b"\0")
    with listwise.open_index(tmp_path / "index", student.model) as index:
        hits = index.search(photo, k=3)
        assert len(hits) == 3
        assert all(hit.probability is None for hit in hits)
        with pytest.raises(InputError, match="holds descriptors of the model"):
            index.add(new)
    stranger = Model(RetrievalNet("test_resnet", projection=24, weights="random").eval())
    with pytest.raises(InputError, match="holds descriptors of the model"):
        listwise.open_index(tmp_path / "index", stranger)


def test_evaluation_describes_the_database_with_the_teacher(photos, teacher, student):
    found = listwise.evaluate(student.model, photos, database_model=teacher)
    described = next(iter(found.described.values()))
    np.testing.assert_allclose(described.database, teacher.encode(photos), atol=1e-5)
    np.testing.assert_allclose(described.queries, student.model.encode(photos), atol=1e-5)
    both = listwise.evaluate(student.model, photos, database_model=teacher, against=teacher)
    other, asked = both.described.values()
    np.testing.assert_array_equal(other.queries, other.database)
    np.testing.assert_array_equal(asked.database, other.database)
    done = []
    with pytest.raises(InputError, match="not its student"):
        listwise.evaluate(teacher, photos, database_model=student.model, on_progress=done.append)
    with pytest.raises(InputError, match="`dims` must be from 1 to 24"):
        listwise.evaluate(teacher, photos, dims=[32], on_progress=done.append)
    assert done == []  # before photos are described
