"""The server through real connections, in this process so that a test can hold it still."""

import errno
import io
import itertools
import json
import os
import re
import shutil
import struct
import threading
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from index_examples import texture
from PIL import Image
from serving_examples import (
    BEARER,
    FORM,
    MULTIPART,
    PART,
    TOKEN,
    connect,
    encoded,
    head,
    numbers,
    serving,
    upload,
    wait_for,
)

from listwise.data import Images, load_image
from listwise.errors import InputError
from listwise.search.entries import entry_key
from listwise.search.filling import add_photos
from listwise.search.index import Index
from listwise.search.opening import open_index, open_store
from listwise.serving import service as service_module
from listwise.serving.server import Limits


def png(photo):
    return encoded(photo, "PNG")


def found(answer):
    assert answer.status_code == 200, answer.text
    return [(result["key"], result["score"]) for result in answer.json()["results"]]


def expected(hits):
    return [(str(hit.entry.key), pytest.approx(hit.score, abs=2e-6)) for hit in hits]


class Gated(Index):
    """Describes nothing while its gate is closed, and counts what it describes at once."""

    def __init__(self, index):
        super().__init__(index.store, index.model)
        self.gate = threading.Event()
        self.calls = []
        self.plain = self.generation.describe
        self.generation.describe = lambda photos: self.describe(photos)

    def describe(self, photos):
        self.calls.append(len(photos))
        assert self.gate.wait(20)
        return self.plain(photos)


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
def new_photos(photos, tmp_path):
    """The same photos in other files, which are not in the index."""
    shutil.copytree(photos, tmp_path / "new")
    for path in (tmp_path / "new").rglob("*.*"):
        path.write_bytes(path.read_bytes() + b"\0")
    return tmp_path / "new"


@pytest.fixture
def gated(index):
    found = Gated(index)
    yield found
    found.gate.set()


# Searching


def test_a_photo_finds_what_the_index_finds(module_index, reader, photos):
    path = photos / "class3" / "2.jpg"
    answer = reader.post("/api/search", **upload(path, k="6", boxes="null"))
    hits = module_index.search(module_index.describe([load_image(path)])[0], 6)
    assert found(answer) == expected(hits)
    body = answer.json()
    fields = {"milliseconds", "expanded", "refined", "reranked", "verified", "more", "results"}
    assert set(body) == fields | {"matching"}
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


def test_several_photos_and_entries_are_one_query(module_index, reader, photos):
    loaded = [load_image(photos / "class1" / "0.jpg"), texture(5)]
    keys = [entry_key("class6/2.jpg"), entry_key("class0/1.jpg")]
    form = upload(
        *loaded, k="48", keys=json.dumps([str(key) for key in keys]), boxes="[null, [0,0,99,99]]"
    )
    vectors = module_index.describe([loaded[0], loaded[1].crop((0, 0, 99, 99))])
    together = np.concatenate([vectors, module_index.store.vectors(np.array(keys))])
    answer = reader.post("/api/search", **form)
    assert found(answer) == expected(module_index.search(together, 48, exclude=keys, average=True))
    assert len(answer.json()["results"]) == 46


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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"boxes": "[[1,2,3"}, "`boxes`: Invalid JSON"),
        ({"boxes": "[null, null]"}, "2 boxes for 1 photos"),
        ({"boxes": "{}"}, "`boxes` must be a valid list"),
        ({"boxes": "[[1,2,3]]"}, "a box is"),
        ({"boxes": "[[1,2,3,{}]]"}, "`boxes` must be a valid number"),
        ({"boxes": "[[1,2,1e999,4]]"}, "`boxes` must be a finite number"),
        ({"boxes": "[[5,5,5,9]]"}, "is empty"),
        ({"boxes": "[[500,0,600,9]]"}, "outside the image of 64 × 64"),
        ({"keys": "12"}, "`keys`"),
        ({"keys": '["x"]'}, "`keys`"),
        ({"keys": '["1","2","3","4","5","6","7","8"]'}, "9 examples are more than the 8"),
        ({"k": "0"}, "`k`"),
        ({"k": "1001"}, "`k`"),
        ({"expand": "perhaps"}, "`expand` must be a valid boolean"),
        ({"refine": "true"}, "`refine` must be 'superglobal' or 'diffusion', not 'true'"),
        ({"color": "red"}, "unknown setting 'color'"),
        ({"photos": "text"}, "send files, and only files, as photos"),
    ],
)
def test_a_bad_field_is_named(server, photos, fields, says):
    answer = server.post("/api/search", **upload(photos / "class0" / "0.jpg", **fields))
    assert answer.status_code == 400
    assert says in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_unknown_keys_and_forms_without_examples(server):
    nothing = server.post("/api/search", **upload(k="4"))
    assert nothing.status_code == 400
    assert "nothing to search for" in nothing.json()["error"]
    unknown = server.post("/api/search", **upload(keys='["12"]'))
    assert unknown.status_code == 404
    assert "the index has no entry 12" in unknown.json()["error"]
    for path in ("12", "12/similar", "12/thumbnail", "12/photo", "9" * 30, "-1"):
        assert server.get(f"/api/entries/{path}").status_code == 404, path
    for path in ("x", "x/photo", "1/similar?k=0"):
        assert server.get(f"/api/entries/{path}").status_code == 400, path


# Uploads


def declaring(width, height):
    """A PNG file of 100 bytes whose header declares a size."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"no image at all", 400, "evil.png: not a JPEG"),
        (b"", 400, "evil.png: empty file"),
        (b"\xff\xd8\xff\xe0 and then nothing", 400, "evil.png: broken or truncated"),
        (png(texture(0))[:5000], 400, "evil.png: broken or truncated"),
        (b"RIFF\x10\x00\x00\x00WEBPVP8 ", 400, "evil.png: broken or truncated"),
        (declaring(400, 300), 413, "evil.png: takes as much memory"),
        (declaring(60_000, 60_000), 413, "evil.png: declares 60000 × 60000 pixels"),
        (encoded(texture(0))[:-2] + 200 * SCAN, 400, "evil.png: has 201 scans"),
        (
            b"\xff" * 200_001,
            413,
            "evil.png has more than the 0.2 MB allowed; listwise serve --max-u",
        ),
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


A_FORM = {"Content-Type": FORM}


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        ({"files": upload(*[b"x"] * 9)["files"]}, "Maximum number of files is 8"),
        ({"files": {f"f{i}": (None, "x") for i in range(60)}}, "Maximum number of fields is 32"),
        ({"files": {"other": ("a.jpg", b"x")}}, "send files, and only files, as photos"),
        ({"files": {"k": (None, "1" * 200_000)}}, "Part exceeded maximum size"),
        ({"json": {}}, "multipart/form-data"),
        ({"content": b""}, "multipart/form-data"),
        ({"content": b"", "headers": A_FORM}, "nothing to search for"),
        ({"content": PART + b"half a photo", "headers": A_FORM}, "nothing to search for"),
        ({"content": b"something else", "headers": A_FORM}, "the form cannot be read"),
        ({"content": iter([PART]), "headers": A_FORM}, "the header Content-Length is required"),
    ],
)
def test_a_wrong_form_is_refused(server, request_of, says):
    answer = server.post("/api/search", **request_of)
    assert answer.status_code == (411 if "Content-Length" in says else 400)
    assert says in answer.json()["error"]


def test_a_slow_upload_ends(server):
    with connect(server) as wire:
        wire.sendall(head(MULTIPART, "Content-Length: 5000"))
        wire.sendall(PART)
        assert wire.recv(10_000).startswith(b"HTTP/1.1 408")


def test_uploads_together_have_a_limit(index, serve):
    client = serve(index, limits=Limits(held_bytes=300_000))
    with connect(client) as wire:
        wire.sendall(head(MULTIPART, "Content-Length: 250000"))
        wire.sendall(PART)
        wait_for(lambda: numbers(client)["listwise_held_bytes"] == 250_000)
        answer = client.post("/api/search", **upload(b"x" * 100_000))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert client.post("/api/search", **upload(texture(0, (64, 64)))).status_code == 200
    wait_for(lambda: numbers(client)["listwise_held_bytes"] == 0)


# The queue


def test_a_full_queue_refuses_and_the_waiting_go_together(gated, serve, new_photos, pool):
    client = serve(gated, limits=Limits(waiting=3))
    paths = [new_photos / f"class{number}" / "0.jpg" for number in range(5)]

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


def test_a_full_queue_refuses_before_the_photo_is_sent(gated, serve, new_photos, pool):
    client = serve(gated, limits=Limits(waiting=0))
    first = pool.submit(client.post, "/api/search", **upload(new_photos / "class0" / "0.jpg"))
    wait_for(lambda: gated.calls == [1])
    for sent in (b"", PART):  # the header alone is enough
        with connect(client) as wire:
            wire.sendall(head(MULTIPART, "Content-Length: 900000"))
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


def test_what_takes_too_long_is_not_waited_for(gated, serve, new_photos, pool):
    client = serve(gated, limits=Limits(seconds=0.3))
    started = time.monotonic()
    form = upload(new_photos / "class0" / "0.jpg")
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


def test_clients_take_turns(gated, serve, new_photos, pool):
    client = serve(gated, limits=Limits(batch=1, seconds=60))
    done = []

    def ask(address):
        headers = {"X-Forwarded-For": address}
        form = upload(new_photos / "class0" / "0.jpg", k="1")
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


def test_a_client_that_leaves_frees_its_place(gated, serve, new_photos, pool):
    client = serve(gated, limits=Limits(waiting=1))
    form = upload(new_photos / "class0" / "0.jpg")
    first = pool.submit(client.post, "/api/search", **form)
    wait_for(lambda: gated.calls == [1])
    body = client.build_request("POST", "/api/search", **form)
    with connect(client) as wire:
        kind = f"Content-Type: {body.headers['content-type']}"
        content = body.read()
        wire.sendall(head(kind, f"Content-Length: {len(content)}"))
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


def test_a_failure_is_one_requests_own(gated, serve, new_photos, pool, caplog):
    """A photo that is broken, and one for which a network may run out of memory."""
    wide = Gated.describe

    def describe(photos):
        rows = wide(gated, photos)
        if any(photo.size == (72, 56) for photo in photos):
            raise RuntimeError("cannot be described")
        return rows

    gated.describe = describe
    client = serve(gated)
    paths = [new_photos / "class1" / f"{number}.jpg" for number in (0, 2, 1, 4)]  # 1 is not square
    broken = paths[0].read_bytes()[:-300]  # whole in its header only
    answers = []
    for photo in (*paths, broken):
        answers.append(pool.submit(client.post, "/api/search", **upload(photo, k=1)))
        wait_for(lambda: gated.calls == [1])
    wait_for(lambda: numbers(client)["listwise_queue_length"] == 4)
    gated.gate.set()
    answers = [answer.result() for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200, 400]
    assert sorted(gated.calls) == [1, 1, 1, 1, 3]
    assert answers[2].json() == {"error": "the server failed: its log has the reason"}
    assert answers[2].headers["x-content-type-options"] == "nosniff"
    assert "cannot be described" in caplog.text
    assert "broken or truncated" in answers[4].json()["error"]


def test_an_index_that_fails_is_the_servers_fault(index, serve, photos, monkeypatch):
    client = serve(index)

    def search(queries, k):
        raise InputError("the index /secret/place cannot be used")

    monkeypatch.setattr(index.store, "search", search)
    answer = client.post("/api/search", **upload(photos / "class0" / "0.jpg"))
    assert answer.status_code == 500
    assert "secret" not in answer.text


# Filters


@pytest.fixture(scope="module")
def priced(model, photos, tmp_path_factory):
    """A server of an index whose entries have attributes; nothing is written."""
    folder = tmp_path_factory.mktemp("priced")
    lines = [
        f"{path},{i},{'red' if i % 3 else 'blue'}" for i, path in enumerate(image_paths(photos))
    ]
    (folder / "t.csv").write_text("\n".join(["path,price,color", *lines]))
    with open_index(folder / "index", model) as index:
        index.add(folder / "t.csv", workers=0)
        with serving(index, token=TOKEN) as client:
            yield client


def image_paths(photos):
    return sorted(photos.rglob("*.jpg"))


def test_results_and_entries_are_filtered(priced, photos):
    photo = image_paths(photos)[0]
    where = "price < 10 and color = 'red'"
    wanted = {str(i) for i in range(10) if i % 3}
    answer = priced.post("/api/search", **upload(photo, k=48, where=where)).json()
    results = answer["results"]
    assert answer["matching"] == len(results)
    assert priced.post("/api/search", **upload(photo, k=1)).json()["matching"] == 48
    assert {result["attributes"]["price"] for result in results} == wanted
    page = priced.get("/api/entries", params={"where": where, "count": 4, "start": 4}).json()
    assert (len(page["entries"]), page["total"]) == (2, 6)
    key = page["entries"][0]["key"]
    similar = priced.get(f"/api/entries/{key}/similar", params={"where": where}).json()
    assert len(similar["results"]) == 5
    facets = priced.get("/api/facets").json()["facets"]
    values = [{"value": "red", "count": 32}, {"value": "blue", "count": 16}]
    text = {"name": "color", "kind": "text", "lowest": "", "highest": "", "values": values}
    numbers = {"name": "price", "kind": "number", "lowest": "0", "highest": "47", "values": []}
    assert facets == [text, numbers]


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
        assert (answer.status_code, "unknown" in answer.text) == (400, True)
        answer = priced.post(f"{path}?label=x", **upload(photo), headers=BEARER)
        assert (answer.status_code, "unknown parameter" in answer.text) == (400, True)


# Duplicates


def test_duplicates_are_listed_in_pages(serve, index, photos, tmp_path):
    """With at most as many entries of a group as a search may have results."""
    for number, path in enumerate([*image_paths(photos)[:3], image_paths(photos)[0]]):
        with Image.open(path) as photo:
            photo.save(tmp_path / f"copy{number}.png", compress_level=number)
    index.add(sorted(tmp_path.glob("copy*.png")), workers=0, progress=False)
    client = serve(index, token=TOKEN, limits=Limits(results=2))
    first = client.get("/api/duplicates?threshold=0.99&count=2").json()
    assert (len(first["groups"]), first["total"]) == (2, 3)
    rest = client.get("/api/duplicates?threshold=0.99&start=2").json()["groups"]
    groups = first["groups"] + rest
    assert [(len(group["entries"]), group["size"]) for group in groups] == [(2, 3), (2, 2), (2, 2)]
    assert len({entry["id"] for group in groups for entry in group["entries"]}) == 6
    key = rest[0]["entries"][1]["key"]
    assert client.delete(f"/api/entries/{key}", headers=BEARER).status_code == 200
    assert client.get("/api/duplicates?threshold=0.99").json()["total"] == 2
    for threshold in (0.4, 3):
        assert client.get(f"/api/duplicates?threshold={threshold}").status_code == 400


def test_duplicates_are_those_of_the_command(reader, module_index):
    answer = reader.get("/api/duplicates?threshold=0.5&mirrored=true").json()
    shown = [[entry["id"] for entry in group["entries"]] for group in answer["groups"]]
    groups = module_index.duplicates(threshold=0.5, mirrored=True, progress=False)
    assert shown == [[entry.id for entry in group.entries] for group in groups]
    assert [group["reason"] for group in answer["groups"]] == [group.reason for group in groups]


def test_files_with_the_same_content_are_listed_without_their_folder(serve, index, tmp_path):
    (entry, *_) = index
    shutil.copy(entry.path, tmp_path / "same.jpg")
    index.add(tmp_path / "same.jpg", workers=0, progress=False)
    answer = serve(index).get("/api/duplicates?threshold=1").json()
    (group,) = [group for group in answer["groups"] if group["exact"]]
    assert (group["size"], group["score"], group["reason"]) == (1, 1, "same content")
    assert [(each["id"], each["copies"]) for each in group["entries"]] == [(entry.id, ["same.jpg"])]
    assert str(tmp_path) not in json.dumps(answer)


def test_a_removal_is_undone(serve, index, tmp_path):
    """The entry is what it was; the file of an added photo is deleted and restored."""
    client = serve(index, token=TOKEN, uploads=tmp_path / "uploads")
    (first, *_) = index
    index.label(first.id, "tower")
    texture(5).save(tmp_path / "new.png")
    given = {"photos": (tmp_path / "new.png").read_bytes()}
    (added,) = client.post("/api/entries", files=given, headers=BEARER).json()["added"]
    for key, uploaded in ((str(first.key), False), (added, True)):
        entry = index.entry(int(key))
        vector, content = index.store.vectors([entry.key]), Path(entry.path).read_bytes()
        restore = partial(client.post, f"/api/entries/{key}/restore")
        assert client.delete(f"/api/entries/{key}", headers=BEARER).status_code == 200
        assert Path(entry.path).exists() is not uploaded
        assert restore().status_code == 401
        assert restore(headers=BEARER).json()["id"] == entry.id
        assert index.entry(int(key)) == entry
        assert (index.store.vectors([entry.key]) == vector).all()
        assert Path(entry.path).read_bytes() == content
        assert client.get(f"/api/entries/{key}/thumbnail").status_code == 200
        assert restore(headers=BEARER).json()["id"] == entry.id  # a repeated request
    assert client.post("/api/entries/1/restore", headers=BEARER).status_code == 404
    assert index.check().ok


def test_a_removal_can_be_undone_after_the_disk_was_full(serve, index, monkeypatch):
    client = serve(index, token=TOKEN)
    (first, *_) = index
    assert client.delete(f"/api/entries/{first.key}", headers=BEARER).status_code == 200
    restore = partial(client.post, f"/api/entries/{first.key}/restore", headers=BEARER)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(type(index.store), "put", full)
        assert restore().status_code == 507
    assert restore().json()["id"] == first.id


def test_the_limits_of_attributes_hold_for_all_of_a_photo(serve, index):
    client = serve(index, token=TOKEN)
    (first, *_) = index

    def change(**values):
        given = {"attributes": (None, json.dumps(values))}
        return client.patch(f"/api/entries/{first.key}", files=given, headers=BEARER)

    assert change(a="x" * 9000).status_code == 200
    refused = change(b="x" * 9000)
    assert refused.status_code == 400
    assert "more than 10000 bytes" in refused.json()["error"]
    for label in ("a\nb", " =1+1", "\t=1", "=1"):
        assert change(label=label).status_code == 400
    assert change(a=None, b="x" * 9000, label="tower").status_code == 200


def test_a_long_comparison_of_duplicates_is_answered_later(serve, index, monkeypatch, pool):
    """Meanwhile the server answers other requests, in the threads that all of them share."""
    ready, begun = threading.Event(), []

    def slow(store, threshold, mirrored, on_progress):
        begun.append(threshold)
        while not ready.wait(0.02):
            on_progress(1)
        return []

    monkeypatch.setattr(service_module, "find_duplicates", slow)
    client = serve(index, limits=Limits(seconds=1))
    waiting = [pool.submit(client.get, "/api/duplicates", timeout=200) for _ in range(44)]
    wait_for(lambda: begun)
    for path in ("/api/facets", "/health"):
        assert client.get(path).status_code == 200
    assert not any(answer.done() for answer in waiting)
    for answer in waiting:
        assert (answer.result().status_code, answer.result().headers["retry-after"]) == (503, "10")
        assert "still being compared" in answer.result().json()["error"]
    # Another threshold ends the comparison, so that they do not pile up.
    for number in (5, 6):
        assert client.get(f"/api/duplicates?threshold=0.{number}").status_code == 503
    wait_for(lambda: begun[-1] == 0.6)
    ready.set()
    wait_for(lambda: client.get("/api/duplicates").status_code == 200)


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
    files = sorted(store.glob("*.png"))
    assert [file.suffix for file in files] == [".png", ".png"]
    assert {file.read_bytes() for file in files} == {png(new), png(texture(2))}

    best = client.post("/api/search", **upload(new, k="1")).json()["results"][0]
    assert best["key"] in body["added"]
    assert best["attributes"] == {"uploaded_as": "my new.png"}
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
    assert len(list(store.glob("*.png"))) == 1

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
    assert len(list((tmp_path / "uploads").glob("*.*g"))) == 1


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


# Who may do what


CHANGES = [("POST", "/api/entries"), ("DELETE", f"/api/entries/{entry_key('class0/0.jpg')}")]
CHANGES += [("POST", "/api/marks"), ("DELETE", "/api/marks/0123"), ("POST", "/api/labels")]


@pytest.mark.parametrize("token", [None, TOKEN])
def test_changes_need_the_token(index, serve, tmp_path, token):
    """Labels too: they have paths of the server."""
    client = serve(index, token=token, uploads=tmp_path / "uploads")
    wrong = ["Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"]
    for headers in ({}, *({"Authorization": given} for given in wrong)):
        for method, path in [*CHANGES, ("GET", "/api/marks/labels")]:
            answer = client.request(method, path, headers=headers)
            reason = "a token is required" if token else "--token"
            assert (answer.status_code, reason in answer.text) == (401 if token else 403, True)
            assert answer.headers.get("www-authenticate") == ("Bearer" if token else None)
        for path in ("info", "marks", "classes", "suggestions"):
            assert client.get(f"/api/{path}", headers=headers).status_code == 200
    info = client.get("/api/info").json()
    assert info["can_write"] is info["can_mark"] is (token is not None)
    assert info["token_needed"] is False
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
    ("hosts", "status"),
    [
        (["localhost", "LOCALHOST:99", "127.0.0.1:8000", "[::1]:80"], 200),
        (["", "evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "::1"], 403),
        (["[::1].evil.example", "[::1]evil", "localhost:80:80", "localhost:evil"], 403),
        (["localhost@evil.example", "localhost/evil"], 403),
    ],
)
def test_only_names_of_this_machine_lead_here(server, hosts, status):
    """Another name would if an attacker's name server said so."""
    for host, path in itertools.product(hosts, ("/", "/api/info")):
        assert server.get(path, headers={"Host": host}).status_code == status, host


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
        "/static/%2e%2e%2f%2e%2e%2f__init__.py",
        "/static//etc/passwd",
        "/static/",
        "/api/entries/../../app.py",
        "/api/entries/%2fetc%2fpasswd/photo",
        "/photos/class0/0.jpg",
        "/uploads/",
    ],
)
def test_no_other_file_is_served(server, path):
    with connect(server) as wire:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        wire.sendall(request.encode())
        answer = b"".join(iter(lambda: wire.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404"), answer[:200]
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])) == {"error"}


# What it says of itself


def test_info_tells_the_limits(server, model):
    info = server.get("/api/info").json()
    assert re.fullmatch("[0-9a-f]{16}", info["instance"])
    known = {"name": "index", "entries": 48, "dim": model.dim, "model": model.fingerprint}
    known |= {"engine": "embedded", "max_side": 512}
    known |= dict.fromkeys(("whitened", "calibrated", "expands"), False)
    known |= dict.fromkeys(("can_write", "can_mark", "token_needed"), False)
    known["limits"] = {"upload_bytes": 200_000, "pixels": 100_000, "photos": 8, "results": 1000}
    assert info == known | {"instance": info["instance"]}


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
