"""The server through real connections, in this process so that a test can hold it still."""

import concurrent.futures
import io
import json
import re
import socket
import struct
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from index_examples import texture
from PIL import Image
from serving_examples import TOKEN, InThread, wait_for

from listwise.data import Images, load_image, read_images
from listwise.descriptors.tuned import Expansion, TunedSettings
from listwise.errors import InputError
from listwise.search.entries import entry_key
from listwise.search.filling import add_photos
from listwise.search.hits import entry_vectors
from listwise.search.index import Index
from listwise.search.opening import create_store, header_of, open_store
from listwise.serving import service as service_module
from listwise.serving.batching import Batcher, QueueFullError
from listwise.serving.connections import SHORT_BODY
from listwise.serving.settings import Limits, ServeSettings

BEARER = {"Authorization": f"Bearer {TOKEN}"}


def png(photo):
    file = io.BytesIO()
    photo.save(file, "PNG")
    return file.getvalue()


def upload(*photos, names=None, **fields):
    """The files and fields of a form; photos are images, paths or bytes."""
    contents = [
        p if isinstance(p, bytes) else p.read_bytes() if isinstance(p, Path) else png(p)
        for p in photos
    ]
    names = names or [f"{number}.png" for number in range(len(photos))]
    files = [("photos", each) for each in zip(names, contents, strict=True)]
    return (
        {"files": files, "data": fields}
        if files
        else {"files": {k: (None, v) for k, v in fields.items()}}
    )


def found(answer):
    assert answer.status_code == 200, answer.text
    return [(result["key"], result["score"]) for result in answer.json()["results"]]


def expected(hits):
    return [(str(hit.entry.key), pytest.approx(hit.score, abs=2e-6)) for hit in hits]


def numbers(client):
    """The values of /metrics by name and labels."""
    text = client.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", text, re.M)}


class Gated(Index):
    """Describes nothing while its gate is closed, and counts what it describes at once."""

    def __init__(self, index):
        super().__init__(index.store, index.model)
        self.gate = threading.Event()
        self.calls = []
        self.plain = self.generation.describe
        self.generation.describe = lambda photos, boxes=None: self.describe(photos, boxes)

    def describe(self, photos, boxes=None):
        self.calls.append(len(photos))
        assert self.gate.wait(20)
        return self.plain(photos, boxes)


@pytest.fixture(scope="module")
def module_index(filled, model):
    """An index that is only read from."""
    with open_store(filled) as store:
        yield Index(store, model)


@contextmanager
def serving(index, **settings):
    """A server for several tests; gives a client."""
    running = InThread(index, ServeSettings(**settings))
    with httpx.Client(verify=False, base_url=running.url, timeout=120) as client:
        yield client
    running.stop()


@pytest.fixture(scope="module")
def server(module_index):
    """A server that is only read from, with small limits."""
    limits = Limits(upload_bytes=200_000, pixels=100_000, upload_seconds=1.0)
    with serving(module_index, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def reader(module_index):
    """A server that is only read from, with the usual limits, but time for a busy machine."""
    with serving(module_index, limits=Limits(seconds=60)) as client:
        yield client


@pytest.fixture
def gated(index):
    found = Gated(index)
    yield found
    found.gate.set()


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


# Searching


def test_a_photo_finds_what_the_index_finds(module_index, reader, photos):
    path = photos / "class3" / "2.jpg"
    answer = reader.post("/api/search", **upload(path, k="6"))
    hits = module_index.search(module_index.describe([load_image(path)]), 6)
    assert found(answer) == expected(hits)
    body = answer.json()
    fields = {"milliseconds", "expanded", "refined", "reranked", "verified", "more", "results"}
    assert set(body) == fields
    assert body["milliseconds"] > 0
    assert body["expanded"] is body["refined"] is body["reranked"] is False
    assert body["verified"] == 0
    assert body["results"][0] == {
        "key": str(entry_key("class3/2.jpg")),
        "id": "class3/2.jpg",
        "score": pytest.approx(1, abs=1e-5),
        "width": 64,
        "height": 64,
        "box": None,
        "attributes": {},
        "inliers": None,
        "photo": None,
        "matches": None,
        "probability": None,
        "refined": None,
    }


def test_a_box_finds_what_the_part_alone_finds(reader, photos):
    photo = load_image(photos / "class5" / "1.jpg")
    boxed = reader.post("/api/search", **upload(photo, boxes="[[10, 5, 52, 48]]", k="10"))
    cut = reader.post("/api/search", **upload(photo.crop((10, 5, 52, 48)), k="10"))
    whole = reader.post("/api/search", **upload(photo, k="10", boxes="[null]"))
    assert found(boxed) == found(cut)
    assert found(boxed) != found(whole)


def test_photos_are_turned_upright(reader, photos):
    photo = load_image(photos / "class5" / "1.jpg")
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif)
    box = "[[0, 10, 72, 56]]"  # inside the upright photo only
    answers = [
        reader.post("/api/search", **upload(content, boxes=box, k="5"))
        for content in (turned.getvalue(), png(photo))
    ]
    assert found(answers[0]) == found(answers[1])


def test_several_photos_and_entries_are_one_query(module_index, reader, photos):
    loaded = [load_image(photos / "class1" / "0.jpg"), texture(5)]
    keys = [entry_key("class6/2.jpg"), entry_key("class0/1.jpg")]
    form = upload(
        *loaded, k="48", keys=json.dumps([str(key) for key in keys]), boxes="[null, [0,0,99,99]]"
    )
    vectors = module_index.describe([loaded[0], loaded[1].crop((0, 0, 99, 99))])
    together = np.concatenate([vectors, entry_vectors(module_index.store, keys)])
    answer = reader.post("/api/search", **form)
    assert found(answer) == expected(module_index.search(together, 48, exclude=keys))
    assert len(answer.json()["results"]) == 46


def test_entries_alone_are_examples_too(module_index, reader):
    key = entry_key("class6/2.jpg")
    searched = reader.post("/api/search", **upload(keys=f'["{key}"]', expand="true"))
    similar = reader.get(f"/api/entries/{key}/similar", params={"expand": True})
    plain = reader.get(f"/api/entries/{key}/similar")
    hits = module_index.search(
        entry_vectors(module_index.store, [key]), 60, expand=True, exclude=[key]
    )
    assert found(searched) == found(similar) == expected(hits)
    assert len(hits) == 47
    assert found(plain) != found(similar)
    assert similar.json()["expanded"] is True
    assert len(found(reader.get(f"/api/entries/{key}/similar?k=3"))) == 3


@pytest.mark.parametrize("method", ["superglobal", "diffusion"])
def test_results_are_refined(module_index, reader, method):
    key = entry_key("class6/2.jpg")
    searched = reader.post("/api/search", **upload(keys=f'["{key}"]', refine=method))
    similar = reader.get(f"/api/entries/{key}/similar", params={"refine": method})
    hits = module_index.search(
        entry_vectors(module_index.store, [key]), 60, refine=method, exclude=[key]
    )
    plain = module_index.search(entry_vectors(module_index.store, [key]), 60, exclude=[key])
    assert [hit.id for hit in hits] != [hit.id for hit in plain]
    for answer in (searched, similar):
        assert found(answer) == expected(hits)
        assert answer.json()["refined"] is True
        values = [each["refined"] for each in answer.json()["results"]]
        assert values == pytest.approx([hit.refined for hit in hits], rel=1e-5)
    second = reader.get(f"/api/entries/{key}/similar?refine={method}&start=10&k=10")
    assert found(second) == expected(hits[10:20])
    refused = reader.get(f"/api/entries/{key}/similar?refine=best")
    assert refused.status_code in (400, 422)
    assert "refine" in refused.json()["error"]


def test_verified_results_are_refined_last(module_index, reader, photos):
    path = photos / "class6" / "2.jpg"
    answer = reader.post(
        "/api/search", **upload(path, refine="diffusion", rerank="true", k="5")
    ).json()
    hits = module_index.search(path, 5, quality="best")
    assert [each["id"] for each in answer["results"]] == [hit.id for hit in hits]
    assert [each["inliers"] for each in answer["results"]] == [hit.inliers for hit in hits]
    values = [each["refined"] for each in answer["results"]]
    assert values == pytest.approx([hit.refined for hit in hits], rel=1e-4)
    assert answer["refined"] is answer["reranked"] is True


def test_geometry_shows_which_example_matched(reader, photos):
    path = photos / "class3" / "2.jpg"
    key = entry_key("class6/2.jpg")
    form = upload(texture(5), path, keys=f'["{key}"]', rerank="true", k="3")
    results = reader.post("/api/search", **form).json()
    assert results["reranked"] is True
    assert 1 <= results["verified"] <= 47
    assert len(results["results"]) == 3
    best = results["results"][0]
    assert best["id"] == "class3/2.jpg"
    assert best["photo"] == 1
    assert best["inliers"] == len(best["matches"]) >= 6
    for qx, qy, x, y in best["matches"]:
        assert qx == pytest.approx(x, abs=1)
        assert qy == pytest.approx(y, abs=1)
    similar = reader.get(f"/api/entries/{key}/similar?rerank=true&k=2").json()
    assert similar["reranked"] is True
    assert all(result["inliers"] is not None for result in similar["results"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"boxes": "[[1,2,3"}, "boxes is not JSON"),
        ({"boxes": "[" * 50_000}, "boxes is not JSON"),
        ({"boxes": "[null, null]"}, "for each of the 1 photos"),
        ({"boxes": "{}"}, "for each of the 1 photos"),
        ({"boxes": "[[1,2,3]]"}, "a box is"),
        ({"boxes": "[[1,2,3,true]]"}, "a box is"),
        ({"boxes": "[[1,2,NaN,4]]"}, "a box is"),
        ({"boxes": "[[1,2,1e999,4]]"}, "a box is"),
        ({"boxes": "[[5,5,5,9]]"}, "is empty"),
        ({"boxes": "[[500,0,600,9]]"}, "outside the image of 64 × 64"),
        ({"keys": "12"}, "keys must be a JSON list"),
        ({"keys": "[12]"}, "keys must be a JSON list"),
        ({"keys": '["-1"]'}, "keys must be a JSON list"),
        ({"keys": '["1","2","3","4","5","6","7","8"]'}, "9 examples are more than the 8"),
        ({"k": "0"}, "k must be a number from 1 to 1000"),
        ({"k": "1001"}, "k must be a number from 1 to 1000"),
        ({"k": "many"}, "k must be a number from 1 to 1000"),
        ({"expand": "perhaps"}, "expand must be true or false"),
        ({"rerank": "2"}, "rerank must be true or false"),
        ({"refine": "true"}, "refine must be superglobal or diffusion, not 'true'"),
        ({"color": "red"}, "unknown field 'color'"),
        ({"photos": "text"}, "photos are files"),
    ],
)
def test_a_bad_field_is_named(server, photos, fields, says):
    answer = server.post("/api/search", **upload(photos / "class0" / "0.jpg", **fields))
    assert answer.status_code == 400
    assert says in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_unknown_keys_and_forms_without_examples(server):
    nothing = server.post("/api/search", **upload(k="4"))
    assert (nothing.status_code, nothing.json()["error"]) == (
        400,
        "nothing to search for: send photos, or keys of entries",
    )
    unknown = server.post("/api/search", **upload(keys='["12"]'))
    assert (unknown.status_code, unknown.json()["error"]) == (
        404,
        "the index has no entry 12",
    )
    for path in ("12", "12/similar", "12/thumbnail", "12/photo", "x", "x/photo", "9" * 30, "-1"):
        assert server.get(f"/api/entries/{path}").status_code == 404, path
    assert server.get("/api/entries/1/similar?k=0").status_code == 400


# Uploads


def declaring(width, height):
    """A PNG file of 100 bytes whose header declares a size."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"no image at all", 400, "evil.png: not a JPEG, PNG, WebP, TIFF or GIF image"),
        (b"", 400, "evil.png: empty file"),
        (b"\xff\xd8\xff\xe0 and then nothing", 400, "evil.png: broken or truncated"),
        (png(texture(0))[:5000], 400, "evil.png: broken or truncated"),
        (b"RIFF\x10\x00\x00\x00WEBPVP8 ", 400, "evil.png: broken or truncated"),
        (declaring(400, 300), 413, "evil.png: has 400 × 300 pixels, more than the 0.1 million"),
        (declaring(60_000, 60_000), 413, "evil.png: declares 60000 × 60000 pixels"),
        (b"\xff" * 200_001, 413, "evil.png has more than the 0.2 MB allowed"),
    ],
)
def test_a_bad_photo_is_refused(server, content, status, says):
    form = upload(content, names=["/etc/evil.png"])
    started = time.perf_counter()
    answer = server.post("/api/search", **form)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(says)
    assert time.perf_counter() - started < 30
    assert server.get("/health").status_code == 200


def test_many_photos_and_parts_are_refused(server):
    answer = server.post("/api/search", **upload(*[b"x"] * 9))
    assert (answer.status_code, answer.json()["error"]) == (
        413,
        "the request has more than the 8 photos allowed",
    )
    fields = {f"f{number}": (None, "x") for number in range(60)}
    assert "too many parts" in server.post("/api/search", files=fields).json()["error"]
    other = {"other": ("a.jpg", b"x")}
    assert "send files as photos" in server.post("/api/search", files=other).json()["error"]
    long = {"k": (None, "1" * 200_000)}
    assert server.post("/api/search", files=long).status_code == 413


BOUNDARY = "----boundary"
PART = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="photos"; filename="a.jpg"\r\n\r\n'
).encode()
MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({"Content-Type": "application/json"}, b"{}", "multipart/form-data"),
        ({}, b"", "multipart/form-data"),
        ({"Content-Type": "multipart/form-data"}, b"", "multipart/form-data"),
        (
            {"Content-Type": f"multipart/form-data; boundary={'x' * 300}"},
            b"",
            "multipart/form-data",
        ),
        (MULTIPART, b"", "ends before its last boundary"),
        (MULTIPART, PART + b"half a photo", "ends before its last boundary"),
        (MULTIPART, b"something else entirely", "the form cannot be read"),
    ],
)
def test_a_broken_form_is_refused(server, headers, body, says):
    answer = server.post("/api/search", content=body, headers=headers)
    assert answer.status_code == 400
    assert says in answer.json()["error"]


def connection(client):
    found = socket.create_connection((client.base_url.host, client.base_url.port), 20)
    found.settimeout(20)
    return found


def request_head(path, *headers):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def test_an_endless_body_is_refused_while_it_comes(server):
    """No Content-Length says how much is to come."""
    with connection(server) as wire:
        kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        wire.sendall(request_head("/api/search", kind, "Transfer-Encoding: chunked"))
        piece = b"a" * 10_000
        wire.sendall(f"{len(PART):x}\r\n".encode() + PART + b"\r\n")
        wire.setblocking(False)
        answer, sent = b"", 0
        while not answer and sent < 100_000_000:
            try:
                wire.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                sent += len(piece)
            except BlockingIOError:
                time.sleep(0.001)
            try:
                answer = wire.recv(10_000)
            except BlockingIOError:
                continue
    assert answer.startswith(b"HTTP/1.1 413")
    assert sent < 50_000_000
    wait_for(lambda: numbers(server)["listwise_held_bytes"] == 0)


def test_a_body_said_to_be_too_long_is_not_read(server):
    with connection(server) as wire:
        kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        wire.sendall(request_head("/api/search", kind, "Content-Length: 99000000"))
        assert wire.recv(10_000).startswith(b"HTTP/1.1 413")


def test_a_refused_client_that_sends_on_sees_why(server):
    """It reads its answer only when it has sent all."""
    content = PART + b"x" * 5_000_000 + f"\r\n--{BOUNDARY}--\r\n".encode()
    answer = server.post("/api/search", content=content, headers=MULTIPART)
    assert answer.status_code == 413
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("length", [2_000, 60_000, 70_000, 2_000_000])
def test_a_client_that_is_refused_before_its_body_knows_whether_it_can_go_on(server, length):
    """The header and the body come one after the other."""
    head = request_head("/api/entries", f"Content-Length: {length}")
    with connection(server) as wire:
        wire.sendall(head)
        answer = b""
        while not answer.endswith(b"}"):
            answer += wire.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 403")
        wire.sendall(b"x" * length)
        if b"connection: close" in answer.lower():
            assert length > SHORT_BODY
            assert wire.recv(10_000) == b""
        else:
            assert length <= SHORT_BODY
            wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wire.recv(10_000).startswith(b"HTTP/1.1 200")


def test_a_slow_upload_ends(server):
    with connection(server) as wire:
        kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        wire.sendall(request_head("/api/search", kind, "Content-Length: 5000"))
        wire.sendall(PART)
        assert wire.recv(10_000).startswith(b"HTTP/1.1 408")


def test_uploads_together_have_a_limit(index, serve):
    client = serve(index, limits=Limits(held_bytes=300_000))
    with connection(client) as wire:
        kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        wire.sendall(request_head("/api/search", kind, "Content-Length: 900000"))
        wire.sendall(PART + b"x" * 250_000)
        wait_for(lambda: numbers(client)["listwise_held_bytes"] > 240_000)
        answer = client.post("/api/search", **upload(b"x" * 100_000))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert client.post("/api/search", **upload(texture(0, (64, 64)))).status_code == 200
    wait_for(lambda: numbers(client)["listwise_held_bytes"] == 0)


# The queue


def test_a_full_queue_refuses_and_the_waiting_go_together(gated, serve, photos, pool):
    client = serve(gated, limits=Limits(waiting=3))
    paths = [photos / f"class{number}" / "0.jpg" for number in range(5)]

    def ask(path):
        return pool.submit(client.post, "/api/search", **upload(path, k="1"))

    first = ask(paths[0])
    wait_for(lambda: gated.calls == [1])
    waiting = [ask(path) for path in paths[1:4]]
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 3)
    refused = [ask(paths[4]).result() for _ in range(4)]
    assert {answer.status_code for answer in refused} == {503}
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}
    assert "busy" in refused[0].json()["error"]
    gated.gate.set()
    for path, answer in zip(paths, [first, *waiting], strict=False):
        best = answer.result().json()["results"][0]
        assert best["id"] == f"{path.parent.name}/0.jpg"
    assert gated.calls == [1, 3]
    counted = numbers(client)
    assert counted["listwise_batch_size_count"] == 2
    assert counted["listwise_batch_size_sum"] == 4
    assert counted['listwise_rejected_total{reason="queue_full"}'] == 4
    assert counted["listwise_queue_length"] == 0


def test_a_full_queue_refuses_before_the_photo_is_sent(gated, serve, photos, pool):
    client = serve(gated, limits=Limits(waiting=0))
    first = pool.submit(client.post, "/api/search", **upload(photos / "class0" / "0.jpg"))
    wait_for(lambda: gated.calls == [1])
    for sent in (b"", PART):  # the header alone is enough
        with connection(client) as wire:
            kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
            wire.sendall(request_head("/api/search", kind, "Content-Length: 900000"))
            wire.sendall(sent)
            answer = wire.recv(10_000).lower()
        assert answer.startswith(b"http/1.1 503")
        assert re.search(rb"retry-after: [12]\r\n", answer)
    refused = 'listwise_requests_total{method="POST",route="/api/search",status="503"}'
    wait_for(lambda: numbers(client).get(refused) == 2)
    # A search by key has a queue of its own.
    key = entry_key("class6/2.jpg")
    assert client.post("/api/search", **upload(keys=f'["{key}"]')).status_code == 200
    # So has one with many marks; the index does not have these entries.
    marks = ",".join(str(10**18 + number) for number in range(1000))
    assert client.post("/api/search", **upload(keys=f'["{key}"]', same=marks)).status_code == 404
    gated.gate.set()
    assert first.result().status_code == 200


def test_the_time_of_a_photo_is_known_before_the_first_search():
    gate = threading.Event()

    def work(batch):
        gate.wait(20)
        return list(batch)

    slow = Batcher(work, Limits(seconds=10), seconds_per_cost=5)
    try:
        first = slow.submit("one", owner="a")  # an idle worker takes it in any case
        wait_for(lambda: not len(slow))
        with pytest.raises(QueueFullError):
            slow.submit("two", owner="b")
        gate.set()
        assert first.future.result(20) == "one"
        slow.submit("three", owner="b")
    finally:
        gate.set()
        slow.close()


def test_refused_clients_are_told_to_come_back_one_after_the_other():
    gate = threading.Event()
    gate.set()
    queue = Batcher(lambda batch: [gate.wait(20)] * len(batch), Limits(waiting=0))
    try:
        queue.submit("first").future.result(20)
        wait_for(lambda: queue._seconds_per_job)
        queue._seconds_per_job = 0.75  # as if this job had taken so long
        gate.clear()
        running = queue.submit("second")
        wait_for(lambda: not len(queue))
        waits = []
        for _ in range(40):
            with pytest.raises(QueueFullError) as refused:
                queue.check_room("a")
            waits.append(refused.value.seconds)
        assert waits[:4] == [1, 2, 3, 3]
        assert max(waits) == 10  # no one waits longer
        assert len(set(waits[20:])) > 1
        gate.set()
        running.future.result(20)
    finally:
        gate.set()
        queue.close()


def test_answers_are_sent_without_delay(index):
    """Header and body of an answer are two pieces; the second does not wait for the client."""
    server = InThread(index, ServeSettings())
    try:
        with httpx.Client(verify=False, base_url=server.url) as client:
            client.get("/health")
            (connected,) = server.server.server_state.connections
            wire = connected.transport.get_extra_info("socket")
            assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        server.stop()


def test_batches_have_a_size(gated, serve, photos, pool):
    client = serve(gated, limits=Limits(batch=4))
    pair = [photos / "class0" / "0.jpg", photos / "class0" / "1.jpg"]
    answers = [pool.submit(client.post, "/api/search", **upload(pair[0]))]
    wait_for(lambda: gated.calls == [1])
    answers += [pool.submit(client.post, "/api/search", **upload(*pair)) for _ in range(5)]
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 5)
    gated.gate.set()
    assert {answer.result().status_code for answer in answers} == {200}
    assert gated.calls == [1, 4, 4, 2]


def test_photos_of_a_batch_are_not_all_in_memory_at_once(gated, serve, pool):
    client = serve(gated, limits=Limits(pixels=100 * 100))
    photo = texture(0, (70, 70))
    first = pool.submit(client.post, "/api/search", **upload(photo))
    wait_for(lambda: gated.calls == [1])
    answers = [pool.submit(client.post, "/api/search", **upload(photo, k="2")) for _ in range(5)]
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 5)
    gated.gate.set()
    assert len({str(found(answer.result())) for answer in answers}) == 1
    assert first.result().status_code == 200
    assert gated.calls == [1, 2, 2, 1]


def test_what_takes_too_long_is_not_waited_for(gated, serve, photos, pool):
    client = serve(gated, limits=Limits(seconds=0.3))
    started = time.monotonic()
    form = upload(photos / "class0" / "0.jpg")
    answers = [pool.submit(client.post, "/api/search", **form)]
    wait_for(lambda: gated.calls == [1])
    answers += [pool.submit(client.post, "/api/search", **form) for _ in range(3)]
    for answer in answers:
        assert answer.result().status_code == 504
        assert answer.result().json()["error"] == "the request took longer than 0.3 s"
    assert time.monotonic() - started < 60
    assert numbers(client)["listwise_queue_length"] == 0
    gated.gate.set()
    wait_for(lambda: client.post("/api/search", **form).status_code == 200)
    assert set(gated.calls) == {1}, "those that were given up are not described"


def test_the_photos_of_a_request_that_is_over_are_dropped(gated, serve, pool):
    """Each photo has as many pixels as are decoded at one time."""
    client = serve(gated, limits=Limits(pixels=70 * 70, seconds=0.5))
    photos = [texture(seed, (70, 70)) for seed in range(4)]
    late = pool.submit(client.post, "/api/search", **upload(*photos))
    wait_for(lambda: gated.calls == [1])
    assert late.result().status_code == 504
    gated.gate.set()
    wait_for(lambda: client.post("/api/search", **upload(photos[0])).status_code == 200)
    assert gated.calls == [1, 1]


def test_searches_by_key_do_not_wait_for_photos(gated, serve, photos, pool):
    client = serve(gated)
    first = pool.submit(client.post, "/api/search", **upload(photos / "class0" / "0.jpg"))
    wait_for(lambda: gated.calls == [1])
    key = entry_key("class6/2.jpg")
    assert client.get(f"/api/entries/{key}/similar").status_code == 200
    assert client.post("/api/search", **upload(keys=f'["{key}"]')).status_code == 200
    assert not first.done()
    gated.gate.set()
    assert first.result().status_code == 200


def test_clients_take_turns(gated, serve, photos, pool):
    client = serve(gated, limits=Limits(batch=1, seconds=60))
    done = []

    def ask(address):
        headers = {"X-Forwarded-For": address}
        form = upload(photos / "class0" / "0.jpg", k="1")
        assert client.post("/api/search", headers=headers, **form).status_code == 200
        done.append(address)

    answers = [pool.submit(ask, "203.0.113.1") for _ in range(6)]
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 5)
    answers.append(pool.submit(ask, "203.0.113.2"))
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 6)
    gated.gate.set()
    for answer in answers:
        answer.result()
    # It came last, and would be the seventh. On a busy machine clients notice their answers late.
    assert "203.0.113.2" in done[:5]


def test_large_photos_are_reduced_for_the_network(index, serve, monkeypatch):
    sizes, plain = [], index.generation.describe

    def describe(photos, boxes=None):
        sizes.extend(photo.size for photo in photos)
        return plain(photos, boxes)

    monkeypatch.setattr(index.generation, "describe", describe)
    client = serve(index, limits=Limits(max_side=100))
    large = io.BytesIO()
    texture(0, (1600, 800)).save(large, "JPEG")
    assert client.post("/api/search", **upload(large.getvalue())).status_code == 200
    boxed = upload(large.getvalue(), boxes="[[800, 0, 1600, 800]]")
    assert client.post("/api/search", **boxed).status_code == 200
    assert client.post("/api/search", **upload(texture(0, (90, 60)))).status_code == 200
    assert sizes == [(100, 50), (100, 100), (90, 60)]


def test_reranking_that_is_too_slow_leaves_the_results(index, serve, photos, monkeypatch):
    from listwise.serving import engine

    real = engine.rerank_hits

    def slow(*arguments, **limits):
        time.sleep(8)
        return real(*arguments, **limits)

    client = serve(index, limits=Limits(seconds=4))
    path = photos / "class3" / "2.jpg"
    plain = client.post("/api/search", **upload(path, k="5"))
    monkeypatch.setattr(engine, "rerank_hits", slow)
    late = client.post("/api/search", **upload(path, k="5", rerank="true"))
    assert found(late) == found(plain)
    assert late.json()["reranked"] is False


def test_a_client_that_leaves_frees_its_place(gated, serve, photos, pool):
    client = serve(gated, limits=Limits(waiting=1))
    form = upload(photos / "class0" / "0.jpg")
    first = pool.submit(client.post, "/api/search", **form)
    wait_for(lambda: gated.calls == [1])
    body = client.build_request("POST", "/api/search", **form)
    with connection(client) as wire:
        kind = f"Content-Type: {body.headers['content-type']}"
        content = body.read()
        wire.sendall(request_head("/api/search", kind, f"Content-Length: {len(content)}"))
        wire.sendall(content)
        wait_for(lambda: numbers(client)["listwise_queue_length"] == 1)
        assert client.post("/api/search", **form).status_code == 503
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 0)
    second = pool.submit(client.post, "/api/search", **form)
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 1)
    gated.gate.set()
    assert first.result().status_code == second.result().status_code == 200
    left = 'listwise_requests_total{method="POST",route="/api/search",status="499"}'
    assert numbers(client)[left] == 1


def test_a_client_that_leaves_in_the_middle_of_its_upload(serve, index):
    client = serve(index)
    with connection(client) as wire:
        kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        wire.sendall(request_head("/api/search", kind, "Content-Length: 900000"))
        wire.sendall(PART + b"x" * 1000)
        wait_for(lambda: numbers(client)["listwise_held_bytes"] > 1000)
    wait_for(lambda: numbers(client)["listwise_held_bytes"] == 0)
    assert client.post("/api/search", **upload(texture(0))).status_code == 200


def test_a_client_that_sends_slowly_holds_no_place(index, serve, photos):
    client = serve(index, limits=Limits(waiting=0))
    with connection(client) as wire:
        kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
        wire.sendall(request_head("/api/search", kind, "Content-Length: 900000"))
        wire.sendall(PART)
        for _ in range(3):
            answer = client.post("/api/search", **upload(photos / "class0" / "0.jpg"))
            assert answer.status_code == 200


def test_one_bad_photo_does_not_spoil_its_batch(gated, serve, photos, pool):
    client = serve(gated)
    good = photos / "class1" / "3.jpg"
    broken = (photos / "class0" / "0.jpg").read_bytes()[:-300]  # whole in its header only
    ask = [good, good, broken, good]
    answers = []
    for path in ask:
        answers.append(pool.submit(client.post, "/api/search", **upload(path, k="1")))
        wait_for(lambda: gated.calls == [1])
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 3)
    gated.gate.set()
    codes = [answer.result().status_code for answer in answers]
    assert codes == [200, 200, 400, 200]
    assert gated.calls == [1, 2]
    assert "broken or truncated" in answers[2].result().json()["error"]
    assert found(answers[0].result()) == found(answers[3].result())


def test_a_failure_is_one_requests_own(gated, serve, photos, pool, caplog):
    """As of a network that runs out of memory for some photos."""
    wide = Gated.describe

    def describe(photos, boxes=None):
        rows = wide(gated, photos, boxes)
        if any(photo.size == (72, 56) for photo in photos):
            raise RuntimeError("cannot be described")
        return rows

    gated.describe = describe
    client = serve(gated)
    answers = []
    for number in (0, 2, 1, 4):  # even ones are square
        form = upload(photos / "class1" / f"{number}.jpg", k="1")
        answers.append(pool.submit(client.post, "/api/search", **form))
        wait_for(lambda: gated.calls == [1])
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 3)
    gated.gate.set()
    assert [answer.result().status_code for answer in answers] == [200, 200, 500, 200]
    assert gated.calls == [1, 3, 1, 1, 1]
    assert answers[2].result().json() == {"error": "the server failed: its log has the reason"}
    assert answers[2].result().headers["x-content-type-options"] == "nosniff"
    assert "cannot be described" in caplog.text


def test_an_index_that_fails_is_the_servers_fault(index, serve, photos, monkeypatch):
    client = serve(index)

    def search(queries, k):
        raise InputError("the index /secret/place cannot be used")

    monkeypatch.setattr(index.store, "search", search)
    answer = client.post("/api/search", **upload(photos / "class0" / "0.jpg"))
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_many_clients_each_get_their_own_answer(reader, photos, pool):
    paths = sorted(photos.rglob("*.jpg"))
    answers = [
        (path, pool.submit(reader.post, "/api/search", **upload(path, k="1"))) for path in paths
    ]
    for path, answer in answers:
        assert answer.result().status_code == 200, answer.result().text
        (best,) = answer.result().json()["results"]
        assert best["id"] == f"{path.parent.name}/{path.name}"


# Filters


@pytest.fixture(scope="module")
def priced(model, photos, tmp_path_factory):
    """A server of an index whose entries have attributes; nothing is written."""
    folder = tmp_path_factory.mktemp("priced")
    lines = [
        f"{path},{i},{'red' if i % 3 else 'blue'}" for i, path in enumerate(image_paths(photos))
    ]
    (folder / "t.csv").write_text("\n".join(["path,price,color", *lines]))
    with create_store(folder / "index", header_of(model)) as store:
        add_photos(store, model, read_images(folder / "t.csv"), workers=0)
        with serving(Index(store, model), token=TOKEN) as client:
            yield client


def image_paths(photos):
    return sorted(photos.rglob("*.jpg"))


def test_results_and_entries_are_filtered(priced, photos):
    photo = image_paths(photos)[0]
    where = "price < 10 and color = 'red'"
    wanted = {str(i) for i in range(10) if i % 3}
    results = priced.post("/api/search", **upload(photo, k=48, where=where)).json()["results"]
    assert {result["attributes"]["price"] for result in results} == wanted
    page = priced.get("/api/entries", params={"where": where, "count": 4, "start": 4}).json()
    assert (len(page["entries"]), page["total"]) == (2, 6)
    key = page["entries"][0]["key"]
    similar = priced.get(f"/api/entries/{key}/similar", params={"where": where}).json()
    assert len(similar["results"]) == 5
    facets = priced.get("/api/facets").json()["facets"]
    values = [{"value": "red", "count": 32}, {"value": "blue", "count": 16}]
    assert facets == [{"name": "color", "values": values}]  # prices have too many values


def test_a_wrong_filter_concerns_its_request_alone(priced, photos):
    photo = image_paths(photos)[0]
    for where, reason in [
        ("prise < 3", "no entry has the attribute prise; known attributes: color, price"),
        ("price <", "`where` cannot be read at the end"),
    ]:
        for answer in (
            priced.post("/api/search", **upload(photo, where=where)),
            priced.get("/api/entries", params={"where": where}),
        ):
            assert answer.status_code == 400
            assert reason in answer.json()["error"]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        forms = [upload(photo, where=f"{name} = 3") for name in ("price", "prise") * 3]
        answers = list(pool.map(lambda form: priced.post("/api/search", **form), forms))
    assert [answer.status_code for answer in answers] == [200, 400] * 3


def test_what_a_route_does_not_know_is_an_error(priced, photos):
    """No parameter or field is ignored."""
    key = priced.get("/api/entries?count=1").json()["entries"][0]["key"]
    checked = 0
    for path, methods in priced.get("/openapi.json").json()["paths"].items():
        if not path.startswith("/api/"):
            assert priced.get(path, params={"label": "x"}).status_code == 200, path
            continue
        for method in set(methods) & {"get", "delete"}:
            answer = priced.request(
                method, path.format(key=key, id="0123"), params={"label": "x"}, headers=BEARER
            )
            assert answer.status_code == 400, path
            assert "unknown parameter 'label'" in answer.json()["error"]
            checked += 1
    assert checked >= 15
    for path in ("/", "/docs"):
        assert priced.get(f"{path}?utm_source=mail").status_code == 200
    assert "use start, count, where" in priced.get("/api/entries?label=x").json()["error"]
    photo = image_paths(photos)[0]
    for path in ("/api/search", "/api/entries", "/api/marks", "/api/labels"):
        answer = priced.post(path, **upload(photo, label="x"), headers=BEARER)
        assert (answer.status_code, "unknown field 'label'" in answer.text) == (400, True)
        answer = priced.post(f"{path}?label=x", **upload(photo), headers=BEARER)
        assert (answer.status_code, "unknown parameter" in answer.text) == (400, True)


# Duplicates


def test_duplicates_are_listed_in_pages(serve, index, photos, tmp_path):
    originals = image_paths(photos)[:3]
    for number, path in enumerate(originals):
        with Image.open(path) as photo:
            photo.save(tmp_path / f"copy{number}.png")
    index.add(sorted(tmp_path.glob("copy*.png")), workers=0, progress=False)
    client = serve(index, token=TOKEN)
    first = client.get("/api/duplicates?threshold=0.9999&count=2").json()
    assert (len(first["groups"]), first["total"]) == (2, 3)
    rest = client.get("/api/duplicates?threshold=0.9999&start=2").json()["groups"]
    names = {entry["id"] for group in first["groups"] + rest for entry in group["entries"]}
    assert len(names) == 6
    assert sum("copy" in name for name in names) == 3
    key = rest[0]["entries"][1]["key"]
    assert client.delete(f"/api/entries/{key}", headers=BEARER).status_code == 200
    assert client.get("/api/duplicates?threshold=0.9999").json()["total"] == 2
    for threshold in (0.4, 3):
        assert client.get(f"/api/duplicates?threshold={threshold}").status_code == 400


def test_near_duplicates_are_verified_as_the_command_does(reader, module_index):
    """With so low a threshold, descriptors alone would join different photos."""
    answer = reader.get("/api/duplicates?threshold=0.5").json()
    shown = [{entry["id"] for entry in group["entries"]} for group in answer["groups"]]
    groups = module_index.duplicates(threshold=0.5, verify=True, progress=False)
    assert shown == [{entry.id for entry in group.entries} for group in groups]
    assert len(groups) != len(module_index.duplicates(threshold=0.5, verify=False, progress=False))


def test_large_groups_of_duplicates_are_cut(serve, index, photos, tmp_path):
    with Image.open(image_paths(photos)[0]) as photo:
        for number in range(3):
            photo.save(tmp_path / f"copy{number}.png", compress_level=number)
    index.add(sorted(tmp_path.glob("copy*.png")), workers=0, progress=False)
    client = serve(index, limits=Limits(results=2))
    [group] = client.get("/api/duplicates?threshold=0.9999").json()["groups"]
    assert (len(group["entries"]), group["size"]) == (2, 4)


def test_clients_that_wait_for_duplicates_do_not_stop_the_server(serve, index, monkeypatch, pool):
    ready = threading.Event()
    monkeypatch.setattr(
        service_module, "find_duplicates", lambda *arguments, **options: ready.wait(200) and []
    )
    client = serve(index, limits=Limits(seconds=100))
    waiting = [pool.submit(client.get, "/api/duplicates", timeout=200) for _ in range(44)]
    time.sleep(1.5)
    started = time.monotonic()
    # These use the threads that all requests share.
    assert client.get("/api/facets").status_code == 200
    assert client.get("/health").status_code == 200
    seconds = time.monotonic() - started
    ready.set()
    assert seconds < 60
    assert {answer.result().status_code for answer in waiting} == {200}


def test_a_long_comparison_is_answered_later(serve, index, monkeypatch):
    ready, begun = threading.Event(), []

    def slow(store, threshold, reranker, on_progress):
        begun.append(threshold)
        while not ready.wait(0.02):
            on_progress(1)
        return []

    monkeypatch.setattr(service_module, "find_duplicates", slow)
    client = serve(index, limits=Limits(seconds=0.5))
    answer = client.get("/api/duplicates")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "still being compared" in answer.json()["error"]
    # Another threshold ends the comparison, so that they do not pile up.
    for number in range(3):
        assert client.get(f"/api/duplicates?threshold=0.{number + 5}").status_code == 503
    wait_for(lambda: begun[-1] == 0.7)
    ready.set()
    wait_for(lambda: client.get("/api/duplicates").status_code == 200)


# Probabilities and pages


def test_results_have_pages(server, photos):
    photo = image_paths(photos)[0]
    everything = server.post("/api/search", **upload(photo, k=48)).json()
    assert (len(everything["results"]), everything["more"]) == (48, False)
    parts = [
        server.post("/api/search", **upload(photo, k=20, start=start)).json()
        for start in (0, 20, 40, 60)
    ]
    assert [part["more"] for part in parts] == [True, True, False, False]
    assert [r["key"] for part in parts for r in part["results"]] == [
        r["key"] for r in everything["results"]
    ]
    key = everything["results"][0]["key"]
    similar = server.get(f"/api/entries/{key}/similar?start=40&k=20").json()
    assert (len(similar["results"]), similar["more"]) == (7, False)
    for start in ("-1", "x", "100000"):
        answer = server.post("/api/search", **upload(photo, start=start))
        assert (answer.status_code, "start" in answer.text) == (400, True)


def test_results_have_a_minimum(reader, serve, module_index, photos):
    photo = image_paths(photos)[0]
    scores = [score for _, score in found(reader.post("/api/search", **upload(photo, k=10)))]
    some = found(reader.post("/api/search", **upload(photo, k=10, min_score=scores[3] - 1e-5)))
    assert len(some) == 4
    answer = reader.post("/api/search", **upload(photo, min_probability=0.5))
    assert (answer.status_code, "needs a calibrated model" in answer.text) == (400, True)
    answer = reader.post("/api/search", **upload(photo, min_score="high"))
    assert (answer.status_code, "must be a number" in answer.text) == (400, True)
    assert reader.get("/api/info").json()["calibrated"] is False
    fitted = module_index.model.calibrate(photos, workers=0)
    client = serve(Index(module_index.store, fitted))
    assert client.get("/api/info").json()["calibrated"] is True
    results = client.post("/api/search", **upload(photo)).json()["results"]
    expected = fitted.calibration.probability([result["score"] for result in results])
    assert [r["probability"] for r in results] == pytest.approx(expected.tolist(), abs=1e-3)
    limit = results[3]["probability"] - 1e-4
    fewer = client.post("/api/search", **upload(photo, min_probability=limit)).json()["results"]
    assert len(fewer) == sum(result["probability"] >= limit for result in results)
    assert client.post("/api/search", **upload(photo, min_probability=2)).status_code == 400


# Entries


def test_entries_are_listed_and_shown(server, photos):
    total, seen = 48, []
    for start in range(0, 60, 20):
        page = server.get("/api/entries", params={"start": start, "count": 20}).json()
        assert page["total"] == total
        seen += page["entries"]
    assert len({entry["key"] for entry in seen}) == total
    assert server.get("/api/entries?count=0").status_code == 400
    assert server.get("/api/entries?count=5000").status_code == 400
    assert "start" in server.get("/api/entries?start=-1").json()["error"]
    assert server.get(f"/api/entries?start={2**31}").json()["entries"] == []
    assert server.get(f"/api/entries?start={2**60}").status_code == 400
    entry = seen[7]
    assert server.get(f"/api/entries/{entry['key']}").json() == entry
    assert set(entry) == {"key", "id", "width", "height", "box", "attributes"}
    for kind in ("thumbnail", "photo"):
        answer = server.get(f"/api/entries/{entry['key']}/{kind}")
        assert answer.headers["content-type"] == "image/jpeg"
        assert answer.headers["cache-control"] == "private, no-cache"
        picture = np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB"), float)
        assert abs(picture - np.asarray(load_image(photos / entry["id"]), float)).mean() < 12
        again = server.get(
            f"/api/entries/{entry['key']}/{kind}",
            headers={"If-None-Match": answer.headers["etag"]},
        )
        assert (again.status_code, again.content) == (304, b"")


def test_large_photos_are_reduced_and_lost_ones_told(index, serve, tmp_path, model):
    client = serve(index)
    paths = (str(tmp_path / "large.jpg"), str(tmp_path / "lost.jpg"))
    texture(1, (2400, 800)).save(paths[0])
    texture(2, (90, 80)).save(paths[1])
    add_photos(index.store, model, Images(paths, ("large", "lost"), None), workers=0)
    Path(paths[1]).unlink()
    answer = client.get(f"/api/entries/{entry_key('large')}/photo")
    assert Image.open(io.BytesIO(answer.content)).size == (1600, 533)
    lost = client.get(f"/api/entries/{entry_key('lost')}/photo")
    assert (lost.status_code, lost.json()) == (
        404,
        {"error": "the photo lost cannot be shown: no such file"},
    )
    assert client.get(f"/api/entries/{entry_key('lost')}/thumbnail").status_code == 200


def test_photos_are_added_found_and_removed(index, serve, photos, tmp_path):
    store = tmp_path / "uploads"
    client = serve(index, token=TOKEN, uploads=store)
    new, known = texture(1), photos / "class0" / "0.jpg"
    broken = known.read_bytes()[:-300]
    form = upload(
        new, known, broken, texture(2), names=["my new.png", "known.jpg", "broken.jpg", "two.png"]
    )
    answer = client.post("/api/entries", headers=BEARER, **form)
    assert answer.status_code == 200
    body = answer.json()
    assert len(body["added"]) == 2
    assert body["unchanged"] == [str(entry_key("class0/0.jpg"))]
    (error,) = body["errors"]
    assert error.startswith("broken.jpg: broken or truncated")
    assert str(tmp_path) not in answer.text
    files = sorted(store.iterdir())
    assert [file.suffix for file in files] == [".png", ".png"]
    assert {file.read_bytes() for file in files} == {png(new), png(texture(2))}

    best = client.post("/api/search", **upload(new, k="1")).json()["results"][0]
    assert best["key"] in body["added"]
    assert best["attributes"] == {"name": "my new.png"}
    assert re.fullmatch(r"uploads/[0-9a-f]{32}\.png", best["id"])
    shown = client.get(f"/api/entries/{best['key']}/photo")
    assert Image.open(io.BytesIO(shown.content)).size == new.size

    again = client.post("/api/entries", headers=BEARER, **upload(new, names=["my new.png"]))
    assert again.json() == {"added": [], "unchanged": [best["key"]], "errors": []}
    assert client.get("/api/entries").json()["total"] == 50

    removed = client.delete(f"/api/entries/{best['key']}", headers=BEARER)
    assert removed.json() == {"removed": 1}
    assert client.delete(f"/api/entries/{best['key']}", headers=BEARER).status_code == 404
    assert best["key"] not in dict(found(client.post("/api/search", **upload(new, k="60"))))
    assert client.get(f"/api/entries/{best['key']}/thumbnail").status_code == 404
    assert len(list(store.iterdir())) == 1

    assert client.delete(f"/api/entries/{entry_key('class0/0.jpg')}", headers=BEARER).json() == {
        "removed": 1
    }
    assert known.exists(), "only what was uploaded is the server's"


def test_the_same_photo_from_many_clients_is_one_entry(index, serve, tmp_path, pool):
    client = serve(index, token=TOKEN, uploads=tmp_path / "uploads")
    form = upload(texture(1), texture(1), names=["a.png", "b.png"])
    answers = [pool.submit(client.post, "/api/entries", headers=BEARER, **form) for _ in range(6)]
    bodies = [answer.result().json() for answer in answers]
    assert sum(len(body["added"]) for body in bodies) == 1
    assert len({key for body in bodies for key in body["added"] + body["unchanged"]}) == 1
    assert client.get("/health").json() == {"status": "ok", "entries": 49}
    assert len(list((tmp_path / "uploads").iterdir())) == 1


def test_what_another_process_writes_is_found(index, serve, folder, model, tmp_path):
    client = serve(index)
    texture(1).save(tmp_path / "new.png")
    assert client.post("/api/search", **upload(texture(1))).status_code == 200
    with open_store(folder) as other:
        images = Images((str(tmp_path / "new.png"),), ("new",), None)
        add_photos(other, model, images, workers=0)

    def first():
        return client.post("/api/search", **upload(texture(1), k="1")).json()["results"][0]["id"]

    wait_for(lambda: first() == "new", 5)
    with open_store(folder) as other:
        other.remove([entry_key("new")])
    wait_for(lambda: first() != "new", 5)


def test_without_a_folder_nothing_can_be_added(index, serve):
    client = serve(index, token=TOKEN)
    answer = client.post("/api/entries", headers=BEARER, **upload(texture(0)))
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "no folder for added photos: start listwise serve with --uploads FOLDER",
    )
    assert client.get("/api/info").json()["can_write"] is False


# Who may do what


def test_without_a_token_nothing_can_be_written(server):
    key = entry_key("class0/0.jpg")
    for answer in (
        server.post("/api/entries", **upload(texture(0))),
        server.post("/api/entries", headers=BEARER, **upload(texture(0))),
        server.delete(f"/api/entries/{key}"),
    ):
        assert answer.status_code == 403
        assert "--token" in answer.json()["error"]
    assert server.get(f"/api/entries/{key}").status_code == 200
    info = server.get("/api/info").json()
    assert info["can_write"] is info["token_needed"] is False


def test_writing_needs_the_token(index, serve, tmp_path):
    client = serve(index, token=TOKEN, uploads=tmp_path / "uploads")
    wrong = ["Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"]
    for headers in ({}, *({"Authorization": given} for given in wrong)):
        for answer in (
            client.post("/api/entries", headers=headers, **upload(texture(0, (60, 40)))),
            client.delete(f"/api/entries/{entry_key('class0/0.jpg')}", headers=headers),
        ):
            assert answer.status_code == 401, headers
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/api/info", headers=headers).json()["entries"] == 48
    assert not (tmp_path / "uploads").exists()


def test_from_elsewhere_everything_but_the_page_needs_the_token(index, serve):
    client = serve(index, host="0.0.0.0", token=TOKEN)
    key = entry_key("class0/0.jpg")
    private = ["/api/info", "/api/entries", f"/api/entries/{key}/thumbnail", "/metrics"]
    for path in private:
        assert client.get(path).status_code == 401, path
        assert client.get(path, headers=BEARER).status_code == 200, path
    assert client.post("/api/search", **upload(texture(0))).status_code == 401
    assert client.post("/api/search", headers=BEARER, **upload(texture(0))).status_code == 200
    for path in ("/", "/health", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 200, path
    named = client.get("/api/info", headers={**BEARER, "Host": "photos.example.org"})
    assert named.json()["token_needed"] is True


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "10.0.0.1:80",
        "[::1].evil.example",
        "[::1]evil",
        "localhost:80:80",
        "localhost:evil",
        "localhost@evil.example",
        "localhost/evil",
        "::1",
    ],
)
def test_other_names_do_not_lead_here(server, host):
    """As they would if an attacker's name server said so."""
    assert server.get("/api/info", headers={"Host": host}).status_code == 403
    assert server.get("/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:8000", "[::1]:80"])
def test_this_machines_own_names_do(server, host):
    assert server.get("/api/info", headers={"Host": host}).status_code == 200


def test_other_sites_pages_cannot_use_it(server):
    elsewhere = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert server.get("/api/info", headers=elsewhere).status_code == 403
    assert server.post("/api/search", headers=elsewhere, **upload(texture(0))).status_code == 403
    assert server.get("/", headers=elsewhere).status_code == 200, "a link leads here"
    for answer in (
        server.options("/api/search", headers=elsewhere),
        server.get("/api/info", headers={"Origin": "https://evil.example"}),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_browsers_are_told_to_be_careful(server):
    for path in ("/", "/api/info", "/api/entries/1", "/nowhere", "/static/nothing"):
        headers = server.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; img-src 'self' blob: data:;")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e%2f%2e%2e%2f__init__.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/",
        "/api/entries/../../app.py",
        "/api/entries/%2e%2e%2fapp.py/photo",
        "/api/entries/%2fetc%2fpasswd/photo",
        "/api/entries/class0%2f0.jpg/photo",
        "/photos/class0/0.jpg",
        "/index.json",
        "/uploads/",
    ],
)
def test_no_other_file_is_served(server, path):
    with connection(server) as wire:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        wire.sendall(head.encode())
        answer = b"".join(iter(lambda: wire.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404"), answer[:200]
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}


# What it says of itself


def test_the_description_is_complete_and_from_here(server):
    schema = server.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/api/search",
        "/api/info",
        "/api/duplicates",
        "/api/facets",
        "/api/entries",
        "/api/entries/{key}",
        "/api/entries/{key}/similar",
        "/api/entries/{key}/thumbnail",
        "/api/entries/{key}/photo",
        "/api/marks",
        "/api/marks/labels",
        "/api/marks/{id}",
        "/api/marks/{id}/photo",
        "/api/labels",
        "/api/classes",
        "/api/suggestions",
        "/health",
        "/metrics",
    }
    form = schema["paths"]["/api/search"]["post"]["requestBody"]["content"]["multipart/form-data"]
    searched = {"photos", "boxes", "keys", "k", "start", "expand", "refine", "rerank", "where"}
    searched |= {"min_score", "min_probability", "same", "different"}
    assert set(form["schema"]["properties"]) == searched
    page = server.get("/docs")
    for path in schema["paths"]:
        assert path in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    style = re.search("<style>(.*?)</style>", page.text)[1]
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.headers["content-security-policy"]


def test_the_page_and_its_files_are_served(server):
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert server.get("/static/index.html").content == page.content


def test_info_tells_the_limits(server, model):
    info = server.get("/api/info").json()
    assert re.fullmatch("[0-9a-f]{16}", info.pop("instance"))
    assert info == {
        "name": "index",
        "entries": 48,
        "dim": model.dim,
        "model": model.fingerprint,
        "whitened": False,
        "calibrated": False,
        "expands": False,
        "engine": "embedded",
        "can_write": False,
        "can_mark": False,
        "token_needed": False,
        "limits": {
            "upload_bytes": 200_000,
            "pixels": 100_000,
            "photos": 8,
            "results": 1000,
            "max_side": 1024,
        },
    }


def test_metrics_count_by_route(index, serve):
    client = serve(index)
    keys = [entry_key(f"class0/{number}.jpg") for number in range(3)]
    for key in keys:
        client.get(f"/api/entries/{key}")
    client.get("/api/entries/1")
    client.get("/wp-login.php")
    client.request("BREW", "/api/info")
    client.post("/api/search", **upload(texture(0)))
    counted = numbers(client)
    get = 'listwise_requests_total{method="GET",route="%s",status="%s"}'
    assert counted[get % ("/api/entries/{key}", 200)] == 3
    assert counted[get % ("/api/entries/{key}", 404)] == 1
    assert counted[get % ("other", 404)] == 1
    assert counted["listwise_entries"] == 48
    assert counted['listwise_request_seconds_count{route="/api/search"}'] == 1
    assert 0 < counted['listwise_request_seconds_sum{route="/api/search"}'] < 10
    assert counted["listwise_batch_size_sum"] == 1
    assert "wp-login" not in str(counted)
    assert "BREW" not in str(counted)


def test_a_tuned_index_expands_queries_by_default(serve, model, photos, tmp_path):
    settings = TunedSettings(
        network=model.net.fingerprint(), scales=(1.0, 1.5), expansion=Expansion(k=3, alpha=1.0)
    )
    tuned = replace(model, tuned=settings)
    photo = photos / "class2" / "3.jpg"
    with Index(create_store(tmp_path / "tuned", header_of(tuned)), tuned) as index:
        index.add(photos, workers=0, progress=False)
        client = serve(index)
        expected = {
            expand: [hit.score for hit in index.search(photo, 6, expand=expand)]
            for expand in (True, False)
        }
        assert expected[True] != pytest.approx(expected[False], abs=1e-4)
        for given, expanded in (({}, True), ({"expand": "true"}, True), ({"expand": "0"}, False)):
            answer = client.post("/api/search", **upload(photo, k="6", **given)).json()
            assert answer["expanded"] is expanded
            found = [hit["score"] for hit in answer["results"]]
            assert found == pytest.approx(expected[expanded], abs=1e-4)
        key = index.search(photo, 1)[0].entry.key
        similar = f"/api/entries/{key}/similar"
        assert client.get(similar).json()["expanded"] is True
        assert client.get(similar, params={"expand": False}).json()["expanded"] is False
        assert client.get(similar, params={"refine": "diffusion"}).json()["expanded"] is False
