"""Probabilities of hits, and the minimums that they are compared with."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from listwise.calibration import Calibration
from listwise.data import read_labelled
from listwise.descriptors import load_model
from listwise.descriptors.learning import learn_whitening
from listwise.errors import InputError
from listwise.models.storage import ModelSettings
from listwise.search import Index, open_index
from listwise.search.opening import create_store, header_of
from listwise.settings import Expansion


@pytest.fixture(scope="module")
def calibrated(model, photos):
    return model.calibrate(photos, workers=0)


def test_a_model_is_calibrated_on_labelled_photos(calibrated, model, photos, tmp_path):
    assert model.calibration is None
    fitted = calibrated.calibration
    assert fitted.photos == 48
    assert fitted.source == str(photos)
    assert calibrated.fingerprint == model.fingerprint  # an index takes both
    again = model.calibrate(read_labelled(photos), workers=0).calibration
    assert again.slope == pytest.approx(fitted.slope)
    calibrated.save(tmp_path / "model")
    assert load_model(tmp_path / "model", "cpu").calibration == fitted
    # Other scores: the calibration does not count any more.
    learn_whitening(tmp_path / "model", str(photos), dim=8, device="cpu")
    assert load_model(tmp_path / "model", "cpu").calibration is None
    model.save(tmp_path / "model")
    assert load_model(tmp_path / "model", "cpu").calibration is None


def test_hits_have_probabilities(calibrated, photos, tmp_path):
    with open_index(tmp_path / "index", calibrated) as index:
        index.add(photos / "class0", workers=0, progress=False)
        hits = index.search(photos / "class0" / "0.jpg", k=6)
        expected = calibrated.calibration.probability([hit.score for hit in hits])
        assert [hit.probability for hit in hits] == pytest.approx(expected.tolist())
        middle = hits[3]
        for minimum in ({"min_score": middle.score}, {"min_probability": middle.probability}):
            found = index.search(photos / "class0" / "0.jpg", k=6, **minimum)
            assert [hit.id for hit in found][:3] == [hit.id for hit in hits][:3]
            assert len(found) in (3, 4)  # the boundary itself may be rounded
        lower = index.search(photos / "class0" / "0.jpg", min_score=2.0)
        assert lower == []
        for wrong in ({"min_probability": 1.5}, {"min_score": np.nan}):
            with pytest.raises(InputError, match="must be"):
                index.search(photos / "class0" / "0.jpg", **wrong)
    # The index remembers it, without its model.
    with open_index(tmp_path / "index", create=False) as index:
        assert index.calibration == calibrated.calibration
        assert index.info()["calibrated"]
        key = next(iter(index)).key
        assert index.search(like=key)[0].probability is not None


def test_without_calibration_there_is_no_probability(index, photos):
    hits = index.search(photos / "class0" / "0.jpg")
    assert {hit.probability for hit in hits} == {None}
    with pytest.raises(InputError, match="needs a calibrated model"):
        index.search(photos / "class0" / "0.jpg", min_probability=0.5)
    assert len(index.search(photos / "class0" / "0.jpg", min_score=-1)) == 10


def test_the_calibration_of_a_model_that_a_search_loads_counts(
    calibrated, model_folder, photos, tmp_path
):
    shutil.copytree(model_folder, tmp_path / "model")
    model = load_model(tmp_path / "model", "cpu")
    photo = photos / "class0" / "0.jpg"
    with create_store(tmp_path / "index", header_of(model)) as store:
        Index(store, model).add(photo, workers=0)
        replace(model, calibration=calibrated.calibration).save(tmp_path / "model")
        (hit,) = Index(store, device="cpu").search(photo, min_probability=0)
        assert hit.probability is not None


def test_a_later_calibration_counts_unless_the_model_was_tuned_to_other_scales(index, photos):
    fitted = Calibration(slope=5, intercept=0, source="s", photos=2, pairs=2, positives=1)
    for tuned, known in (
        (None, fitted),
        (ModelSettings(), fitted),
        (ModelSettings(scales=(1, 2)), None),
    ):
        later = Index(index.store, replace(index.model, calibration=fitted, tuned=tuned))
        assert later.calibration == known
        probability = later.search(photos / "class0" / "0.jpg")[0].probability
        assert probability > 0.99 if known else probability is None


def test_the_probabilities_of_an_expanded_query_are_those_before_expansion(
    calibrated, photos, tmp_path
):
    tuned = ModelSettings(expansion=Expansion(k=5, alpha=1))
    with open_index(tmp_path / "index", replace(calibrated, tuned=tuned)) as index:
        index.add(photos, workers=0, progress=False)
        photo = photos / "class0" / "0.jpg"
        plain = {hit.id: hit for hit in index.search(photo, k=48, expand=False)}
        expanded = index.search(photo, k=20)
        assert len(expanded) == 20
        differ = [abs(hit.score - plain[hit.id].score) for hit in expanded]
        assert max(differ) > 0.001
        for hit in expanded:
            assert hit.probability == pytest.approx(plain[hit.id].probability, abs=1e-5)
        # A minimum probability is compared with the scores that the hits are sorted by.
        minimum = sorted(hit.probability for hit in plain.values())[-6] - 1e-6
        likely = index.search(photo, k=48, min_probability=minimum)
        assert {hit.id for hit in likely} == {
            hit.id for hit in plain.values() if hit.probability >= minimum
        }
        with pytest.raises(InputError, match="does not work with `expand`"):
            index.search(photo, expand=True, min_probability=0.5)
        assert index.search(photo, min_score=2.0) == []
