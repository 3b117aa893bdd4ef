"""The client against a real server."""

import re
import socket
import threading
import time

import pytest
from index_examples import texture
from PIL import Image
from serving_examples import TOKEN, numbers, upload

from listwise import client
from listwise.client import Client, ServerError
from listwise.errors import InputError


@pytest.fixture
def files(photos):
    return sorted(photos.rglob("*.jpg"))


@pytest.fixture
def server(serve, index, tmp_path):
    return serve(index, token=TOKEN, uploads=tmp_path / "uploads")


@pytest.fixture
def shop(server):
    return Client(str(server.base_url), TOKEN)


def test_every_request_of_the_interface_has_a_method(shop, server, files, tmp_path):
    assert shop.info()["entries"] == 48
    first, *others = shop.all_entries()
    keys = [entry["key"] for entry in others]
    assert len(others) == 47
    assert shop.entry(first["key"]) == first
    assert shop.thumbnail(first["key"])[:2] == shop.photo(first["key"])[:2] == b"\xff\xd8"
    found = shop.search(files[0], k=3, min_score=-1.0)
    answer = server.post("/api/search", **upload(files[0], k=3, min_score=-1)).json()
    assert found == answer | {"milliseconds": found["milliseconds"]}
    box = (2, 2, 40, 40)
    several = [files[0], files[1].read_bytes()]
    both = shop.search(several, box=[box, None], like=[first["key"]], average=True)
    assert both["results"]
    each = shop.search(several, k=3, box=[None, box])
    assert each[0]["results"] == shop.search(files[0], 3)["results"]
    assert each[1]["results"] == shop.search(files[1], 3, box=box)["results"]
    with files[0].open("rb") as file, Image.open(files[0]) as image:
        assert shop.search(file, 3)["results"] == each[0]["results"]
        assert shop.search(image, 1)["results"][0]["id"] == each[0]["results"][0]["id"]
        assert shop.search(image.convert("RGBA"), 1)["results"] == each[0]["results"][:1]
    for wrong in (None, 3, {}):
        with pytest.raises(ServerError, match="a photo must be a file, its bytes or a Pillow"):
            shop.search(wrong)
    assert len(shop.similar(first["key"], k=2, expand=True)["results"]) == 2
    assert shop.duplicates(threshold=0.999, mirrored=True)["total"] >= 0
    assert shop.facets()["facets"] == []

    new = tmp_path / 'a "new" photo.jpg'
    texture(3).save(new)
    added = shop.add([new, files[0]])
    assert (len(added["added"]), len(added["unchanged"]), added["errors"]) == (1, 1, [])
    again = shop.add(new.read_bytes())
    assert (again["added"], again["unchanged"]) == ([], added["added"])
    (key,) = added["added"]
    changed = shop.set_attributes(key, {"price": 12.5, "sold": False, "uploaded_as": None})
    assert changed == shop.entry(key)
    assert changed["attributes"] == {"price": "12.5", "sold": "false"}
    assert shop.remove(added["added"][0])
    assert not shop.remove(added["added"][0])
    assert shop.restore(key) == changed
    assert shop.remove(key)

    marks = shop.mark(new, box=box, same=keys[:2], different=[keys[2]], by="Ann")["marks"]
    assert [(mark["same"], mark["by"]) for mark in marks] == [
        (True, "Ann"),
        (True, "Ann"),
        (False, "Ann"),
    ]
    (mark,) = shop.mark(entry=keys[3], same=[keys[4]], ranks={keys[4]: 2})["marks"]
    assert (mark["rank"], mark["by"]) == (2, "")
    assert shop.marks(entry=keys[3])["marks"] == [mark]
    assert shop.query_photo(marks[0]["id"])[:2] == b"\xff\xd8"
    assert shop.unmark(mark["id"])
    assert not shop.unmark(mark["id"])
    assert shop.label("tower", keys[:2]) == 2
    assert shop.classes()["classes"][0]["name"] == "tower"
    assert "tower" in shop.labels()
    assert len(shop.suggestions(3)["suggestions"]) == 3

    requests = re.findall(r'method="(\w+)",route="(/api/[^"]+)"', " ".join(numbers(server)))
    paths = server.get("/openapi.json").json()["paths"]
    offered = {(kind.upper(), path) for path in paths for kind in paths[path] if "/api" in path}
    assert set(requests) == offered


def test_errors_are_one_line(shop, server, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no photo")
    with pytest.raises(ServerError, match=r"status 400\)$") as refused:
        shop.search(broken)
    assert refused.value.status == 400
    assert isinstance(refused.value, InputError)
    with pytest.raises(ServerError, match="unknown"):
        shop.similar("1", colour="red")
    with pytest.raises(ServerError, match="a token is required"):
        Client(str(server.base_url), retries=0).add(broken)
    with pytest.raises(ServerError, match="expected http"):
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
    monkeypatch.setattr(client, "PAUSE", 60.0)  # a retry would take longer than the test may
    shop = Client("http://127.0.0.1:9")
    for photo, reason in {
        tmp_path: "cannot be read: Is a directory",
        tmp_path / "missing.jpg": "does not exist",
        "with\0zero.jpg": "cannot be read",
        tmp_path / ("n" * 300): "cannot be read: File name too long",
    }.items():
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


@pytest.mark.parametrize("token", ["two\nlines", "caf\u00e9", "tab\t"])
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


def test_a_refused_upload_tells_the_reason(serve, index, tmp_path):
    server = serve(index, limits={"upload_bytes": 2**20})
    large = tmp_path / "large.jpg"
    large.write_bytes(bytes(64 * 2**20))
    with pytest.raises(ServerError) as error:
        Client(str(server.base_url), retries=0).search(large)
    assert error.value.status == 413


def test_photos_come_with_attributes_and_what_the_camera_wrote(shop, files, tmp_path):
    one, other = tmp_path / "one.jpg", tmp_path / "other.png"
    exif = Image.Exif()
    exif[0x010F], exif[0x0110] = "Canon", "Canon EOS R5"
    exif.get_ifd(0x8769)[0x9003] = "2024:05:01 18:30:00"
    place = {1: "S", 2: (33.0, 51.0, 24.4), 3: "E", 4: (151.0, 12.0, 34.0)}
    exif.get_ifd(0x8825).update(place)
    texture(5).save(one, exif=exif)
    texture(6).save(other)
    priced = [{"color": "red", "price": 9, "camera": "mine"}, None]
    added = shop.add([one, other], priced, exif=True)["added"]
    first, second = (shop.entry(key)["attributes"] for key in added)
    assert first == {
        "uploaded_as": "one.jpg",
        "date": "2024-05-01T18:30:00",
        "latitude": "-33.856778",
        "longitude": "151.209444",
        "camera": "mine",
        "color": "red",
        "price": "9",
    }
    assert second == {"uploaded_as": "other.png"}
    # Added again, a photo keeps what it does not come with.
    again = shop.add([one], {"price": 8, "color": None, "size": None})
    assert again["unchanged"] == added[:1]
    del first["color"]
    assert shop.entry(added[0])["attributes"] == first | {"price": "8"}
    where = "date >= '2024-05-01' and date < '2024-05-02' and latitude < -33.8"
    assert [each["key"] for each in shop.entries(where=where)["entries"]] == added[:1]
    known = {facet["name"]: facet["kind"] for facet in shop.facets()["facets"]}
    assert known.pop("date") == "date"
    assert known == {"camera": "text"} | dict.fromkeys(["latitude", "longitude", "price"], "number")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ([{}], "attributes of 1 photos for 2 photos"),
        ({"a": [1]}, "a value must be a text, a number"),
        ({"a": float("nan")}, "attributes"),
        ({"a": "x" * 10_000}, "more than 10000 bytes"),
        ({"": "x"}, "a name is empty"),
        ({"label": "=1+1"}, "must not begin with ="),
        ("price", "attributes"),
    ],
)
def test_attributes_that_cannot_be_stored_are_refused(shop, files, attributes, reason):
    with pytest.raises(ServerError, match=re.escape(reason)) as error:
        shop.add(files[:2], attributes)
    assert error.value.status == 400
    if not isinstance(attributes, list):
        with pytest.raises(ServerError, match=re.escape(reason)):
            shop.set_attributes(shop.entries(count=1)["entries"][0]["key"], attributes)
