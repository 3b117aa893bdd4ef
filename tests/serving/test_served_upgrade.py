"""A running server switches to an upgraded index; no request fails."""

import io
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from serving_examples import BEARER, TOKEN, serving, wait_for

from listwise.data import Images
from listwise.descriptors import load_model
from listwise.models import RetrievalNet
from listwise.search import IndexUpgradedError, open_index
from listwise.search.entries import entry_key
from listwise.search.filling import add_photos
from listwise.search.hits import Query
from listwise.search.opening import create_store, header_of
from listwise.search.options import SearchOptions
from listwise.serving import engine
from listwise.serving.forms import Upload
from listwise.serving.server import Limits, ServeSettings
from listwise.serving.service import Service
from listwise.serving.upload_folder import UploadFolder


@pytest.fixture(scope="module")
def new_model(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("upgrade") / "new"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(folder)
    return load_model(folder, "cpu")


@pytest.fixture(scope="module")
def few(model, photos, tmp_path_factory):
    """The folder of an index of two classes, because each upgrade describes all photos."""
    ids = tuple(f"class{kind}/{number}.jpg" for kind in (0, 3) for number in range(6))
    images = Images(tuple(str(photos / name) for name in ids), ids, None)
    folder = tmp_path_factory.mktemp("few") / "index"
    with create_store(folder, header_of(model)) as store:
        assert len(add_photos(store, model, images, workers=0).added) == 12
    return folder


@pytest.fixture
def folder(few, tmp_path):
    """The same, to be written to."""
    return shutil.copytree(few, tmp_path / "index")


@pytest.fixture
def client(folder, model):
    """A client of a server of an index, which another program may upgrade."""
    with (
        open_index(folder, model) as index,
        serving(index, headers=BEARER, token=TOKEN, uploads=folder / "uploads") as client,
    ):
        yield client


class Searches(threading.Thread):
    """Searches by one photo all the time."""

    def __init__(self, client, photo):
        super().__init__()
        self.client, self.content = client, photo.read_bytes()
        self.answers, self.stopped = [], threading.Event()

    def run(self):
        while not self.stopped.is_set():
            answer = self.client.post("/api/search", files={"photos": self.content})
            self.answers.append((answer.status_code, answer.json()))
            time.sleep(0.02)

    def stop(self):
        """The first results; the photo itself is one, with the score of the same model."""
        self.stopped.set()
        self.join()
        assert {code for code, _ in self.answers} == {200}
        return [body["results"][0] for _, body in self.answers]


def test_a_server_switches_and_no_request_fails(
    client, folder, photos, model, new_model, monkeypatch
):
    monkeypatch.setattr(engine, "REFRESH_SECONDS", 0.05)
    searches = Searches(client, photos / "class3" / "2.jpg")
    searches.start()
    with open_index(folder, model) as index:
        index.upgrade(new_model, workers=0)
        wait_for(lambda: client.get("/api/info").json()["model"] == new_model.fingerprint)
        count = len(searches.answers)
        wait_for(lambda: len(searches.answers) > count + 2)
        index.rollback(workers=0)
        wait_for(lambda: client.get("/api/info").json()["model"] == model.fingerprint)
    first = searches.stop()
    assert {hit["id"] for hit in first} == {"class3/2.jpg"}
    assert min(hit["score"] for hit in first) > 0.999
    assert "listwise_generation 0.0" in client.get("/metrics").text


def test_a_change_goes_to_the_upgraded_index(client, folder, photos, model, new_model, monkeypatch):
    """Although the server has not noticed the upgrade yet."""
    monkeypatch.setattr(engine, "REFRESH_SECONDS", 1000)
    with open_index(folder, model) as index:
        index.upgrade(new_model, workers=0)
        assert client.get("/api/info").json()["model"] == model.fingerprint
        content = io.BytesIO()
        Image.new("RGB", (64, 48), "red").save(content, "PNG")
        answer = client.post("/api/entries", files={"photos": content.getvalue()})
        (key,) = answer.json()["added"]
        assert client.get("/api/info").json()["model"] == new_model.fingerprint
        assert int(key) in index.store.get([int(key)])
        index.rollback(workers=0)
        assert client.delete(f"/api/entries/{key}").json() == {"removed": 1}
        assert not index.store.get([int(key)])
        # `listwise search` asks a server for the present state.
        index.upgrade(new_model, workers=0)
        files = {"photos": (photos / "class0" / "0.jpg").read_bytes()}
        fresh = client.post("/api/search", files=files, headers={"Cache-Control": "no-cache"})
        assert fresh.json()["results"][0]["score"] > 0.999
        assert client.get("/api/info").json()["model"] == new_model.fingerprint
        # A generation that the server still uses may be discarded.
        one, two = (str(entry_key(f"class0/{number}.jpg")) for number in (1, 2))
        for other, search in (
            (model, lambda: client.post("/api/search", files=files)),
            (new_model, lambda: client.get(f"/api/entries/{one}/similar")),
        ):
            index.upgrade(other, workers=0)
            index.discard_earlier()
            assert search().status_code == 200
        index.upgrade(model, workers=0)
        index.discard_earlier()
        mark = {"entry": (None, one), "same": (None, two)}
        assert client.get("/api/suggestions").status_code == 200
        assert client.post("/api/marks", files=mark).status_code == 200


def test_an_upgraded_index_whose_model_is_missing(folder, model, new_model, tmp_path):
    """The server uses the earlier one."""
    place = shutil.copytree(new_model.folder, tmp_path / "moved")
    with open_index(folder, model) as index, open_index(folder, model) as other:
        service = Service(index, ServeSettings())
        other.upgrade(place, workers=0)
        place.rename(tmp_path / "elsewhere")
        service.engine.refresh()
        assert index.header.model == model.fingerprint
        service.close()


def test_the_photo_of_another_server_is_kept(folder, model, new_model, tmp_path):
    """A server that has not noticed an upgrade gets the photo that another one has just added."""
    content = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(content, "PNG")
    photos = [Upload("red.png", content.getvalue())]
    with open_index(folder, model) as index, open_index(folder, model) as other:
        other.upgrade(new_model, workers=0)
        stale, upgraded = (UploadFolder(each, tmp_path) for each in (index, other))
        [key] = upgraded.add(photos, [{}]).added
        with pytest.raises(IndexUpgradedError):
            stale.add(photos, [{}])
        assert Path(other.store.get([int(key)])[int(key)].path).exists()


def test_hits_are_reranked_with_the_generation_that_was_searched(folder, model, new_model):
    query = Query(entries=["class0/1.jpg"], options=SearchOptions(k=5, quality="best"))
    with open_index(folder, model) as index, open_index(folder, model) as other:
        working = engine.Engine(index, Limits())
        [found] = working.search([query])
        job = found, 0  # no time to verify, only to diffuse
        before = working.rerank(*job)
        other.upgrade(new_model, workers=0)
        assert working.switch()
        after = working.rerank(*job)
        assert [hit.refined for hit in after.hits] == [hit.refined for hit in before.hits]
        # A generation that was discarded cannot re-rank: the hits stay as they are.
        other.discard_earlier()
        left = working.rerank(*job)
        assert {hit.id for hit in left.hits} == {hit.id for hit in before.hits}
        working.close()
