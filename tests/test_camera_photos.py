"""An indexed file that is searched for is the first hit with score 1, whatever its size."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import programs
import pytest
from PIL import Image
from serving_examples import serving

from listwise.demo.facade import build
from listwise.demo.photo import draw_viewpoint, take_photo
from listwise.demo.plans import draw_house
from listwise.descriptors import load_model
from listwise.errors import InputError
from listwise.models.storage import ModelSettings
from listwise.search import open_index
from listwise.serving.server import Limits

MODEL = "tf_efficientnet_lite0"
SIZES = {
    "362": (362, 272),
    "1024": (768, 1024),
    "1600": (1600, 1200),
    "4032": (4032, 3024),
    "108 megapixels": (1600, 1200),  # enlarged
}
SAME = 0.9999
SLOWLY = Limits(seconds=60)


@pytest.fixture(scope="module")
def camera(tmp_path_factory):
    """A folder of photos as cameras make them, drawn at their sizes."""
    folder = tmp_path_factory.mktemp("camera")
    for number, (name, size) in enumerate(SIZES.items()):
        rng = np.random.default_rng(number)
        house = build(draw_house(rng), rng, max(340, max(size) // 2))
        photo, _ = take_photo(house, draw_viewpoint("easy", rng), rng, size)
        turned = Image.Exif()
        turned[0x0112] = 6  # the camera was held upright
        exif = Image.Exif() if name == "1600" else turned
        if name.startswith("108"):
            photo = photo.resize((12000, 9000))
        photo.save(folder / f"{name}.jpg", quality=90, exif=exif)
    return folder


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL, "cpu")


@pytest.fixture(scope="module")
def place(camera, model, tmp_path_factory):
    place = tmp_path_factory.mktemp("index") / "shop"
    with open_index(place, model) as index:
        assert len(index.add(camera, workers=0).added) == len(SIZES)
        assert index.header.settings.max_side == 512
    return place


def check_first(results, name):
    """The file comes first with score 1, and no other photo is taken for it."""
    (first, score), (_, second) = results[:2]
    assert (first, score) == (name, pytest.approx(1, abs=1 - SAME))
    assert second < SAME


def check_index(index, camera):
    for path in sorted(camera.iterdir()):
        _, second = hits = index.search(path, 2)
        check_first([(hit.id, hit.score) for hit in hits], path.name)
        (nearest,) = index.search(like=index.entry(path.name).key, k=1)  # without the entry itself
        assert (nearest.id, nearest.score) == (second.id, pytest.approx(second.score, abs=1e-4))


def test_python(place, camera, model):
    with open_index(place, create=False) as index:
        check_index(index, camera)
        for path in sorted(camera.iterdir()):
            stored = index.store.vectors([index.entry(path.name).key])[0]
            assert stored @ model.encode(path) >= SAME
            with Image.open(path) as photo:  # decoded in full: cosine of the two ways to reduce it
                assert stored @ model.encode(photo) >= 0.995


def test_a_box_is_the_same_part_at_every_size(place, camera):
    with open_index(place, create=False) as index:
        for path in sorted(camera.iterdir()):
            with Image.open(path) as photo:
                width, height = photo.size
            whole = index.search(path, 1)[0].score
            box = (0, 0, min(width, height), min(width, height))  # the photo may be turned
            part = index.search(path, 1, box=box)[0].score
            assert part < whole


def test_command(place, camera):
    for name in ("362.jpg", "4032.jpg", "108 megapixels.jpg"):
        found = programs.listwise("search", place, camera / name, "-k", 2, "--json")
        answer, _ = found.communicate()
        assert found.returncode == 0, found.errors()
        check_first([(hit["id"], hit["score"]) for hit in json.loads(answer)["results"]], name)


def test_http(place, camera):
    with open_index(place, create=False) as index, serving(index, limits=SLOWLY) as client:
        assert client.get("/api/info").json()["max_side"] == 512
        for path in sorted(camera.iterdir()):
            sent = {"photos": (path.name, path.read_bytes())}
            answer = client.post("/api/search", files=sent, data={"k": "2"})
            assert answer.status_code == 200, answer.text
            found = [(each["id"], each["score"]) for each in answer.json()["results"]]
            check_first(found, path.name)


def test_an_onnx_file(camera, tmp_path):
    file = Path(__file__).parent / "descriptors" / "version-1.onnx"
    with open_index(tmp_path / "shop", file) as index:
        index.add(camera, workers=0)
        assert index.header.settings.max_side == 512
        for path in sorted(camera.iterdir()):
            first = index.search(path, 1)[0]  # this network is too small to tell houses apart
            assert (first.id, first.score) == (path.name, pytest.approx(1, abs=1 - SAME))


def test_milvus(model, camera, tmp_path):
    with open_index(tmp_path / "shop.db", model) as index:
        index.add(camera, workers=0)
        check_index(index, camera)


def test_after_an_upgrade_to_another_size(place, camera, tmp_path):
    shutil.copytree(place, tmp_path / "shop")
    new = load_model(MODEL, "cpu")
    new = type(new)(new.net, tuned=ModelSettings(max_side=320)).truncate(128)
    new.save(tmp_path / "new")
    with open_index(tmp_path / "shop", create=False) as index:
        index.upgrade(tmp_path / "new", workers=0)
        assert index.header.settings.max_side == 320
        check_index(index, camera)


def test_photos_too_large_for_their_original_size_are_named(model, camera, tmp_path):
    large = replace(model, tuned=ModelSettings(max_side=4032))
    for tried, given in ((model, {"max_side": 4032}), (large, {})):
        with pytest.raises(InputError, match=r"4032 pixels.*CPU: give a `max_side` of at most 204"):
            open_index(tmp_path / "shop", tried, **given)
    with open_index(tmp_path / "shop", model, max_side=0) as index:
        assert index.header.settings.max_side is None
        done = index.add(camera, workers=0)
        assert sorted(done.added) == ["1024.jpg", "1600.jpg", "362.jpg"]
        assert len(done.errors) == 2
        assert "108 megapixels.jpg: has a long side of 12000 pixels, more than" in done.errors[0]
        check_first([(hit.id, hit.score) for hit in index.search(camera / "362.jpg", 2)], "362.jpg")
        with Image.open(camera / "4032.jpg") as photo, pytest.raises(ValueError, match="of 4032"):
            index.search(photo)
        with pytest.raises(ValueError, match=r"4032\.jpg: has a long side of 4032 pixels"):
            index.search(camera / "4032.jpg")
        with serving(index) as client:
            sent = {"photos": ("a.jpg", (camera / "4032.jpg").read_bytes())}
            answer = client.post("/api/search", files=sent)
        assert answer.status_code == 413
        assert re.search("4032.*--max-side", answer.text)


def start_build(folder, photos):
    command = [sys.executable, "-m", "listwise", "index", "build", folder, photos, "--model", MODEL]
    return subprocess.Popen(
        [*map(str, command), "--json"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def memory_of(leader):
    """Bytes of memory of a process and of those that it started."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getsid(int(process.name)) == leader:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_kill_of_a_build_loses_seconds_and_no_build_takes_3_gb(camera, model, tmp_path):
    """12, 24 and 108 megapixels, and a file that cannot be decoded in bounded memory."""
    photos = tmp_path / "photos"
    photos.mkdir()
    camera_photo = (camera / "4032.jpg").read_bytes()
    for number in range(48):
        (photos / f"a{number}.jpg").write_bytes(camera_photo + b"%d" % number)
    with Image.open(camera / "4032.jpg") as photo:
        photo.resize((6000, 4000)).save(photos / "b.jpg", quality=85, progressive=True)
        photo.resize((12_000, 9_000), Image.Resampling.NEAREST).save(
            photos / "bb.jpg", quality=85, progressive=True, subsampling=0
        )
    shutil.copy(camera / "108 megapixels.jpg", photos / "c.jpg")
    Image.new("L", (14_000, 14_000)).save(photos / "d.png", compress_level=1)

    first, stored, peak = start_build(tmp_path / "shop", photos), 0, 0
    while not stored and first.poll() is None:
        peak = max(peak, memory_of(first.pid))
        time.sleep(0.1)
        with suppress(InputError), open_index(tmp_path / "shop", model, create=False) as index:
            stored = len(index)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert 0 < stored < 48

    second = start_build(tmp_path / "shop", photos)
    while second.poll() is None:
        peak = max(peak, memory_of(second.pid))
        time.sleep(0.05)
    done = json.loads(second.stdout.read())
    assert done["unchanged"] >= stored
    assert done["unchanged"] + done["added"] == 51
    (error,) = done["errors"]
    assert re.search(r"d\.png: declares 14000 × 14000 pixels", error)
    assert 0.3e9 < peak <= 3e9
