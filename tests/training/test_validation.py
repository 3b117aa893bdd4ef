"""Validation photos are described by the current network, and decoded once if they fit."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from training_examples import SETTINGS

from listwise.data import decode_photos
from listwise.data.kept_photos import KeptPhotos
from listwise.models.embed import embed_photos
from listwise.training import Trainer, parts, prepare


@pytest.mark.parametrize(("budget", "decodings"), [(10**6, 1), (20_000, 3), (None, 3)])
def test_validation_photos_are_decoded_once(photos, tmp_path, monkeypatch, budget, decodings):
    shutil.copytree(photos, tmp_path / "photos")
    plan = prepare(tmp_path / "photos", SETTINGS)
    broken = Path(plan.validation.paths[3])
    broken.write_bytes(broken.read_bytes()[:-300])
    trainer = Trainer(plan, tmp_path / "run")
    if budget is not None:
        count = len(plan.train) + len(plan.validation)
        trainer.session.kept = KeptPhotos(count, torch.device("cpu"), budget, on_device=True)
    calls = []

    def decode(*arguments):
        calls.append(arguments)
        return decode_photos(*arguments)

    monkeypatch.setattr(parts, "decode_photos", decode)
    for _ in range(3):
        with torch.no_grad():
            for parameter in trainer.net.parameters():
                parameter.mul_(0.9)
        found = trainer.parts.validator.describe()
        expected = embed_photos(trainer.net, plan.validation, max_side=48)
        assert found.kept == expected.kept == [0, 1, 2, *range(4, len(plan.validation))]
        np.testing.assert_allclose(found.descriptors, expected.descriptors, atol=1e-5)
    assert len(calls) == decodings
