"""The client against a real server."""

import importlib.util
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from index_examples import texture
from serving_examples import TOKEN

from listwise.client import Client, ServerError, answers, client, requests
from listwise.errors import InputError

TOOL = Path(__file__).parents[2] / "tools/client_types.py"
METHODS = {
    ("GET", "/api/info"): "info",
    ("POST", "/api/search"): "search",
    ("GET", "/api/entries"): "entries",
    ("POST", "/api/entries"): "add",
    ("GET", "/api/entries/{key}"): "entry",
    ("DELETE", "/api/entries/{key}"): "remove",
    ("GET", "/api/entries/{key}/similar"): "similar",
    ("GET", "/api/entries/{key}/thumbnail"): "thumbnail",
    ("GET", "/api/entries/{key}/photo"): "photo",
    ("GET", "/api/duplicates"): "duplicates",
    ("GET", "/api/facets"): "facets",
    ("POST", "/api/marks"): "mark",
    ("GET", "/api/marks"): "marks",
    ("DELETE", "/api/marks/{id}"): "unmark",
    ("GET", "/api/marks/{id}/photo"): "query_photo",
    ("GET", "/api/marks/labels"): "labels",
    ("POST", "/api/labels"): "label",
    ("GET", "/api/classes"): "classes",
    ("GET", "/api/suggestions"): "suggestions",
}


@pytest.fixture
def files(photos):
    return sorted(photos.rglob("*.jpg"))


@pytest.fixture
def server(serve, index, tmp_path):
    return serve(index, token=TOKEN, uploads=tmp_path / "uploads")


@pytest.fixture
def shop(server):
    return Client(str(server.base_url), TOKEN)


def test_everything_that_the_interface_offers(shop, server, files):
    assert shop.info()["entries"] == 48
    first, *others = shop.all_entries()
    assert len(others) == 47
    assert shop.entry(first["key"]) == first
    assert shop.thumbnail(first["key"])[:2] == shop.photo(first["key"])[:2] == b"\xff\xd8"
    found = shop.search(files[0], k=3, min_score=-1.0)
    assert found == found | server.post(
        "/api/search", data={"k": 3, "min_score": -1}, files={"photos": files[0].read_bytes()}
    ).json() | {"milliseconds": found["milliseconds"]}
    box = (2, 2, 40, 40)
    both = shop.search([files[0], files[1].read_bytes()], boxes=[box, None], keys=[first["key"]])
    assert both["results"]
    assert len(shop.similar(first["key"], k=2, expand=True)["results"]) == 2
    assert shop.duplicates(threshold=0.999)["total"] >= 0
    assert shop.facets()["facets"] == []


def test_photos_are_added_once_and_removed(shop, files, tmp_path):
    new = tmp_path / 'a "new" photo.jpg'
    texture(3).save(new)
    added = shop.add([new, files[0]])
    assert (len(added["added"]), len(added["unchanged"]), added["errors"]) == (1, 1, [])
    again = shop.add(new.read_bytes())
    assert (again["added"], again["unchanged"]) == ([], added["added"])
    assert shop.remove(added["added"][0])
    assert not shop.remove(added["added"][0])
    assert shop.info()["entries"] == 48


def test_errors_are_one_line(shop, server, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no photo")
    with pytest.raises(ServerError, match=r"status 400\)$") as refused:
        shop.search(broken)
    assert refused.value.status == 400
    assert isinstance(refused.value, InputError)
    with pytest.raises(ServerError, match="unknown"):
        shop.similar("1", colour="red")
    with pytest.raises(ServerError, match=r"missing.jpg does not exist"):
        shop.search(tmp_path / "missing.jpg")
    with pytest.raises(ServerError, match="a token is required"):
        Client(str(server.base_url), retries=0).add(broken)
    with pytest.raises(ServerError, match="starts with http"):
        Client("shop")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ServerError, match="cannot be reached") as gone:
        Client(f"http://127.0.0.1:{port}", retries=0).info()
    assert gone.value.status is None


@pytest.fixture
def scripted():
    """A server that gives each connection the next of some responses, as bytes."""
    listening = socket.create_server(("127.0.0.1", 0))
    seen = []

    def answer(responses):
        for response in responses:
            connection, _ = listening.accept()
            with connection:
                seen.append((time.monotonic(), connection.recv(2**16)))
                connection.sendall(response)

    def start(*responses):
        threading.Thread(target=answer, args=[responses], daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}", seen

    yield start
    listening.close()


def http(status, content=b"{}", headers=b""):
    return b"HTTP/1.1 %d x\r\n%sContent-Length: %d\r\n\r\n%s" % (
        status,
        headers,
        len(content),
        content,
    )


def test_a_busy_server_is_asked_again_when_it_says(scripted):
    busy = http(503, b'{"error": "busy"}', b"Retry-After: 1\r\n")
    url, seen = scripted(busy, b"", http(200, b'{"facets": []}'))
    assert Client(url, retries=2).facets() == {"facets": []}
    times = [when for when, _ in seen]
    assert len(times) == 3
    assert times[1] - times[0] >= 0.9
    url, _ = scripted(busy)
    with pytest.raises(ServerError, match="busy") as error:
        Client(url, retries=0).facets()
    assert error.value.status == 503


def test_photos_that_cannot_be_read_are_refused_before_a_request(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    monkeypatch.setattr(client, "PAUSE", 60.0)  # a retry would take longer than the test may
    shop = Client(f"http://127.0.0.1:{port}")
    locked = tmp_path / "locked.jpg"
    locked.touch(0o000)
    cases = {
        tmp_path: "cannot be read: Is a directory",
        tmp_path / "missing.jpg": "does not exist",
        "with\0zero.jpg": "cannot be read",
        tmp_path / ("n" * 300): "cannot be read: File name too long",
    }
    if os.geteuid() != 0:
        cases[locked] = "cannot be read: Permission denied"
    for photo, reason in cases.items():
        with pytest.raises(ServerError, match=reason) as error:
            shop.search([photo])
        assert error.value.status is None
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://h:abc", "http://h:99999", "http://", "http://[::1", "http://a b", "http://ü.de"]
)
def test_an_address_that_cannot_be_used_is_refused(url):
    with pytest.raises(ServerError, match="is not an address"):
        Client(url)


@pytest.mark.parametrize("token", ["two\nlines", "caf\u00e9", "\u4f60", "a\r", "tab\t"])
def test_a_token_that_no_header_can_hold_is_refused(token):
    with pytest.raises(ServerError, match="`token`") as error:
        Client("http://127.0.0.1:8000", token)
    assert token not in str(error.value)


def test_a_response_that_is_not_json_is_an_error(scripted):
    url, _ = scripted(http(200, b"<html>a proxy</html>"), http(200, b"\xff\xfe\xff"))
    for _ in range(2):
        with pytest.raises(ServerError, match="/api/info did not return JSON"):
            Client(url, retries=0).info()


def test_a_slow_request_is_not_repeated():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        shop = Client(f"http://127.0.0.1:{listening.getsockname()[1]}", seconds=0.2)
        with pytest.raises(ServerError, match=r"did not respond within 0.2 seconds") as error:
            shop.search(b"photo")
        assert error.value.status is None
        listening.settimeout(0.5)
        listening.accept()[0].close()
        with pytest.raises(TimeoutError):  # no second connection
            listening.accept()


def test_a_large_photo_is_not_held_in_memory(shop, tmp_path, monkeypatch):
    sizes = []
    blocks = requests.Upload.blocks

    def watched(upload):
        for block in blocks(upload):
            sizes.append(len(block))
            yield block

    monkeypatch.setattr(requests.Upload, "blocks", watched)
    large = tmp_path / "large.jpg"
    large.write_bytes(b"\xff\xd8" + bytes(5 * 2**20))
    with pytest.raises(ServerError):
        shop.search(large)
    assert len(sizes) > 10
    assert max(sizes) <= requests.BLOCK


def test_a_refused_upload_tells_the_reason(serve, index, tmp_path):
    server = serve(index, limits={"upload_bytes": 2**20})
    large = tmp_path / "large.jpg"
    large.write_bytes(bytes(64 * 2**20))
    with pytest.raises(ServerError) as error:
        Client(str(server.base_url), retries=0).search(large)
    assert error.value.status == 413


def test_types_are_those_of_the_interface(server):
    spec = importlib.util.spec_from_file_location("client_types", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    document = server.get("/openapi.json").json()
    assert Path(answers.__file__).read_text() == tool.source(document)


def test_every_request_of_the_interface_has_a_method(server):
    paths = server.get("/openapi.json").json()["paths"]
    offered = {
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/api/")
    }
    assert offered == METHODS.keys()
    # The other methods build on these.
    named = {name for name in vars(Client) if not name.startswith("_")}
    assert named == {*METHODS.values(), "all_entries"}
