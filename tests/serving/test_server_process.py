"""`listwise serve` as a process, as its users and their clients meet it."""

import concurrent.futures
import importlib.util
import io
import shutil
import signal

import httpx
import pytest
from index_examples import texture
from PIL import Image
from serving_examples import HUGE, TOKEN, Process, slowness, wait_for

from listwise.data import read_images
from listwise.search.filling import add_photos
from listwise.search.opening import create_store, header_of


def jpeg(photo):
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=90)
    return file.getvalue()


def search(client, content, **fields):
    files = {"photos": ("photo.jpg", content)}
    return client.post("/api/search", files=files, data=fields)


@pytest.fixture(scope="module")
def start():
    """Start servers that are stopped at the end."""
    started = []

    def run(*arguments, **options):
        started.append(Process(*arguments, **options))
        return started[-1]

    yield run
    for server in started:
        server.client.close()
        if server.popen.poll() is None:
            server.popen.kill()
        server.popen.communicate()


@pytest.fixture(scope="module")
def folder(filled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "index"
    shutil.copytree(filled, folder)
    return folder


@pytest.fixture(scope="module")
def server(folder, start):
    """One with a token, for this machine alone."""
    limits = ("--max-upload", 3, "--max-pixels", 8, "--timeout", 30)
    return start(folder, *limits, token=TOKEN)


def test_it_says_where_it_is(server, folder, photos):
    assert server.said.startswith(f"serving 48 photos of {folder} at http://127.0.0.1:")
    assert server.client.get("/health").json() == {"status": "ok", "entries": 48}
    info = server.client.get("/api/info").json()
    assert info["can_write"] is True
    assert info["token_needed"] is False
    path = photos / "class2" / "1.jpg"
    answer = search(server.client, path.read_bytes(), k=1).json()
    assert answer["results"][0]["id"] == "class2/1.jpg"


def test_many_clients_at_once(server, photos):
    paths = 2 * sorted(photos.rglob("*.jpg"))

    def batches(client):
        text = client.get("/metrics").text
        counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        return (
            float(counted["listwise_batch_size_sum"]),
            float(counted["listwise_batch_size_count"]),
        )

    limits = httpx.Limits(max_connections=40)
    with (
        httpx.Client(verify=False, base_url=server.url, timeout=60, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(40) as pool,
    ):
        before = batches(client)
        answers = pool.map(lambda path: search(client, path.read_bytes(), k=1), paths)
        for path, answer in zip(paths, answers, strict=True):
            assert answer.json()["results"][0]["id"] == f"{path.parent.name}/{path.name}"
        after = batches(client)
    assert after[0] - before[0] == len(paths)
    assert after[1] - before[1] < len(paths) * 0.8, "some went together"


def test_too_much_is_refused(server):
    assert search(server.client, jpeg(Image.new("RGB", (4000, 2100)))).status_code == 413
    assert search(server.client, b"x" * 3_000_001).status_code == 413
    kind = {"Content-Type": "multipart/form-data; boundary=b"}

    def body():
        yield b'--b\r\nContent-Disposition: form-data; name="photos"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 1_000_000

    assert server.client.post("/api/search", content=body(), headers=kind).status_code == 413
    assert server.client.get("/health").status_code == 200


def test_photos_are_added_and_a_running_request_ends_well(server, folder):
    for seed in (4, 5):
        files = {"photos": (f"{seed}.jpg", jpeg(texture(seed)))}
        (key,) = server.client.post("/api/entries", files=files).json()["added"]
    assert server.client.delete(f"/api/entries/{key}").json() == {"removed": 1}
    (stored,) = (folder / "uploads").iterdir()
    assert stored.read_bytes() == jpeg(texture(4))

    slow = jpeg(Image.new("RGB", (2400, 1600), "red"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with httpx.Client(verify=False, base_url=server.url, timeout=60) as other:
            batches = "listwise_batch_size_count"

            def count():
                text = other.get("/metrics").text
                return next(line for line in text.splitlines() if line.startswith(batches))

            before = count()
            answer = pool.submit(search, server.client, slow, k=2)
            wait_for(lambda: count() != before)
        server.popen.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 200
        assert len(answer.result().json()["results"]) == 2
    assert server.popen.wait(40) == 0
    assert server.log() == ""


def test_for_others_and_with_little_room(server, folder, photos, start):
    """The index that the first one left, for all who know the token."""
    server.popen.wait(40)
    small = ["--queue", 1, "--timeout", 1]
    second = start(folder, "--host", "0.0.0.0", *small, token=TOKEN)
    with httpx.Client(verify=False, base_url=second.url) as stranger:
        assert stranger.get("/api/info").status_code == 401
        assert stranger.get("/health").json() == {"status": "ok", "entries": 49}
    best = search(second.client, jpeg(texture(4)), k=1).json()["results"][0]
    assert best["attributes"] == {"name": "4.jpg"}

    content = (photos / "class2" / "1.jpg").read_bytes()
    with concurrent.futures.ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: search(second.client, content, k=1), range(90)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) <= {200, 503, 504}
    assert codes.count(200) > 0
    assert codes.count(503) > 0
    for answer in answers:
        if answer.status_code == 503:
            wait = int(answer.headers["retry-after"])
            when = "a second" if wait == 1 else f"{wait} seconds"
            assert answer.json() == {"error": f"the server is busy: try again in {when}"}
            assert 1 <= wait <= 10
        elif answer.status_code == 200:
            assert answer.json()["results"][0]["id"] == "class2/1.jpg"

    huge = [("photos", ("huge.webp", HUGE))] * 8  # some seconds to decode
    late = second.client.post("/api/search", files=huge)
    assert (late.status_code, late.json()) == (504, {"error": "the request took longer than 1 s"})
    second.client.close()
    second.popen.send_signal(signal.SIGINT)
    assert second.popen.wait(60) == 0


@pytest.mark.skipif(
    not importlib.util.find_spec("milvus_lite"), reason="milvus-lite is not installed"
)
def test_an_index_in_milvus_is_served_the_same_way(model, model_folder, photos, tmp_path, start):
    place = str(tmp_path / "photos.db")
    with create_store(place, header_of(model)) as store:
        add_photos(store, model, read_images(photos), workers=0)
    server = start(place, "--uploads", tmp_path / "uploads", token=TOKEN)
    info = server.client.get("/api/info").json()
    assert (info["engine"], info["entries"], info["can_write"]) == ("milvus", 48, True)
    new = jpeg(texture(4))
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
    photo = jpeg(texture(1, (1200, 800)))
    for number in range(40):
        # Bytes after the end of a JPEG file are ignored, but make it another photo.
        (pictures / f"{number:02}.jpg").write_bytes(photo + bytes([number]))
    with create_store(tmp_path / "index", header_of(model, max_side=64)) as store:
        add_photos(store, model, read_images(pictures), workers=0)
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
