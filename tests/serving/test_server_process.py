"""`listwise serve` as a process, as its users and their clients meet it."""

import concurrent.futures
import importlib.util
import io
import signal

import httpx
import pytest
from index_examples import texture
from PIL import Image
from serving_examples import HUGE, TOKEN, encoded, numbers, search, slowness, upload, wait_for

from listwise.search import open_index


@pytest.fixture(scope="module")
def server(shared_folder, start):
    """One with a token, for this machine alone."""
    limits = ("--max-upload", 3, "--max-pixels", 8, "--timeout", 30)
    return start(shared_folder, *limits, token=TOKEN)


def test_it_says_where_it_is(server, shared_folder, photos):
    assert server.said.startswith(f"serving 48 photos of {shared_folder} at http://127.0.0.1:")
    assert server.client.get("/health").json() == {"status": "ok", "entries": 48}
    info = server.client.get("/api/info").json()
    assert info["can_write"] is True
    assert info["token_needed"] is False
    path = photos / "class2" / "1.jpg"
    answer = search(server.client, path.read_bytes(), k=1).json()
    assert answer["results"][0]["id"] == "class2/1.jpg"


def test_photos_are_added_and_a_running_request_ends_well(server, shared_folder):
    for seed in (4, 5):
        form = upload(encoded(texture(seed)), names=[f"{seed}.jpg"])
        (key,) = server.client.post("/api/entries", **form).json()["added"]
    assert server.client.delete(f"/api/entries/{key}").json() == {"removed": 1}
    (stored,) = (shared_folder / "uploads").glob("*.jpg")
    assert stored.read_bytes() == encoded(texture(4))

    slow = encoded(Image.new("RGB", (2400, 1600), "red"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with httpx.Client(verify=False, base_url=server.url, timeout=60) as other:
            before = numbers(other)["listwise_batch_size_count"]
            answer = pool.submit(search, server.client, slow, k=2)
            wait_for(lambda: numbers(other)["listwise_batch_size_count"] > before)
        server.popen.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 200
        assert len(answer.result().json()["results"]) == 2
    assert server.popen.wait(40) == 0
    assert server.log() == ""


def test_for_others_and_with_little_room(server, shared_folder, photos, start):
    """The index that the first one left, for all who know the token."""
    server.popen.wait(40)
    small = ["--queue", 1, "--timeout", 1]
    second = start(shared_folder, "--host", "0.0.0.0", *small, token=TOKEN)
    with httpx.Client(verify=False, base_url=second.url) as stranger:
        assert stranger.get("/api/info").status_code == 401
        assert stranger.get("/health").json() == {"status": "ok", "entries": 49}
    best = search(second.client, encoded(texture(4)), k=1).json()["results"][0]
    assert best["attributes"] == {"uploaded_as": "4.jpg"}

    content = (photos / "class2" / "1.jpg").read_bytes()
    with concurrent.futures.ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: search(second.client, content, k=1), range(90)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) <= {200, 503, 504}
    assert {200, 503} <= set(codes)
    late = search(second.client, *[HUGE] * 8)  # some seconds to decode
    assert (late.status_code, late.json()) == (504, {"error": "the request took longer than 1 s"})
    second.client.close()
    second.popen.send_signal(signal.SIGINT)
    assert second.popen.wait(60) == 0


@pytest.mark.skipif(
    not importlib.util.find_spec("milvus_lite"), reason="milvus-lite is not installed"
)
def test_an_index_in_milvus_is_served_the_same_way(model, model_folder, photos, tmp_path, start):
    place = str(tmp_path / "photos.db")
    with open_index(place, model) as index:
        index.add(photos, workers=0)
    server = start(place, "--uploads", tmp_path / "uploads", token=TOKEN)
    info = server.client.get("/api/info").json()
    assert (info["engine"], info["entries"], info["can_write"]) == ("milvus", 48, True)
    new = encoded(texture(4))
    (key,) = server.client.post("/api/entries", files={"photos": ("a.jpg", new)}).json()["added"]
    best = search(server.client, new, k=1).json()["results"][0]
    assert best["key"] == key
    assert best["score"] == pytest.approx(1, abs=1e-3)
    thumbnail = server.client.get(f"/api/entries/{key}/thumbnail")
    assert Image.open(io.BytesIO(thumbnail.content)).size == (240, 180)
    page = server.client.get("/api/entries?count=100").json()
    assert page["total"] == len(page["entries"]) == 49
    assert server.client.delete(f"/api/entries/{key}").json() == {"removed": 1}
    assert search(server.client, new, k=1).json()["results"][0]["key"] != key
    similar = server.client.get(f"/api/entries/{best_of(page)}/similar?k=5").json()
    assert len(similar["results"]) == 5
    assert server.stop()[0] == 0


def best_of(page):
    return next(e["key"] for e in page["entries"] if e["id"] == "class0/0.jpg")


def test_reranking_of_slow_photos_ends_in_time(model, tmp_path, start):
    """Verifying all photos takes far longer than the time limit."""
    pictures = tmp_path / "photos"
    pictures.mkdir()
    photo = encoded(texture(1, (1200, 800)))
    for number in range(40):
        # Bytes after the end of a JPEG file are ignored, but make it another photo.
        (pictures / f"{number:02}.jpg").write_bytes(photo + bytes([number]))
    with open_index(tmp_path / "index", model, max_side=64) as index:
        index.add(pictures, workers=0)
    limit = round(2 * slowness())
    server = start(tmp_path / "index", "--timeout", limit)
    verified = []
    for _ in range(2):
        answer = search(server.client, photo, k=5, rerank="true")
        assert answer.status_code == 200, answer.text
        assert answer.elapsed.total_seconds() < 3 * limit
        body = answer.json()
        assert body["reranked"] is (body["verified"] > 0)
        verified.append(body["verified"])
        counted = sum(result["inliers"] is not None for result in body["results"])
        assert min(1, body["verified"]) <= counted <= body["verified"]
    # Features are kept in memory, so that later searches verify more.
    assert verified == sorted(verified)
    assert verified[-1] > 0
