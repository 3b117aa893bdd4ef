"""`listwise serve` as a process: its work, its connections and its memory have limits."""

import concurrent.futures
import io
import os
import re
import resource
import select
import shutil
import signal
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import pytest
from index_examples import texture
from PIL import Image
from serving_examples import HUGE, TOKEN, InThread, Process, slowness, wait_for

from listwise.search import open_index
from listwise.search.entries import entry_key
from listwise.serving import connections as connections_module
from listwise.serving.settings import Limits, ServeSettings

KEY = entry_key("class0/0.jpg")


def encoded(photo, kind="JPEG", **options):
    file = io.BytesIO()
    photo.save(file, kind, **options)
    return file.getvalue()


def search(client, *contents, **fields):
    files = [("photos", (f"{number}.jpg", each)) for number, each in enumerate(contents)]
    return client.post("/api/search", files=files, data=fields)


def timed(call, *arguments, **fields):
    started = time.monotonic()
    return call(*arguments, **fields), time.monotonic() - started


def memory(server, kind):
    """VmHWM is the peak of the resident memory, VmRSS its present size, in bytes."""
    text = Path(f"/proc/{server.popen.pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+) kB", text)[1]) * 1024


@pytest.fixture(scope="module")
def folder(filled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits") / "index"
    shutil.copytree(filled, folder)
    return folder


@pytest.fixture(scope="module")
def start():
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
def server(folder, start):
    return start(folder, "--timeout", 4)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


def client_of(server, address=None, connections=64):
    headers = {"X-Forwarded-For": address} if address else {}
    limits = httpx.Limits(max_connections=connections)
    return httpx.Client(
        verify=False, base_url=server.url, timeout=300, headers=headers, limits=limits
    )


def connect(server):
    url = httpx.URL(server.url)
    wire = socket.create_connection((url.host, url.port), 20)
    wire.settimeout(20)
    return wire


def is_closed(wire):
    """Whether the server has closed a connection on which nothing else is to be read."""
    wire.setblocking(False)
    try:
        return wire.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def head(*headers):
    return "\r\n".join(["POST /api/search HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


MULTIPART = "Content-Type: multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="photos"; filename="a"\r\n\r\n'


@pytest.mark.slow
def test_huge_photos_neither_stop_the_server_nor_fill_its_memory(server, photos, pool):
    """At the limit of concurrent requests of an address, with the photos that cost most."""
    slow = slowness()
    bound = float(re.search(r"up to ([\d.]+) GB of memory", server.said)[1]) * 1e9
    # An allocation beyond what was announced fails; libraries and stacks are mapped already.
    space = int(memory(server, "VmSize") + bound)
    resource.prlimit(server.popen.pid, resource.RLIMIT_AS, (space, space))
    gray = np.zeros((7000, 7000), np.uint8)
    deep = encoded(Image.fromarray(gray.astype(np.uint16)), "PNG", compress_level=1)
    scans = encoded(Image.fromarray(gray), progressive=True, quality=5)
    with client_of(server, "203.0.113.1") as attacker, client_of(server) as other:
        attacks = [pool.submit(timed, search, attacker, HUGE, rerank="true") for _ in range(16)]
        attacks += [pool.submit(timed, search, attacker, *[HUGE] * 8) for _ in range(16)]
        attacks += [pool.submit(timed, search, attacker, deep, scans) for _ in range(16)]
        waited = []
        while not all(attack.done() for attack in attacks):
            for path in (f"/api/entries/{KEY}/similar", "/health", "/metrics"):
                answer, seconds = timed(other.get, path)
                assert answer.status_code == 200
                waited.append(seconds)
            time.sleep(0.2)
        slow = max(slow, slowness())
        # A server that computes in the thread of its connections answers after the attack.
        assert median(waited) < 3 * slow
        assert max(waited) < 15 * slow
        for attack in attacks:
            answer, seconds = attack.result()
            assert answer.status_code in (200, 413, 429, 503, 504)
            assert seconds < 60 * slow
        assert {attack.result()[0].status_code for attack in attacks} & {200, 504}
        path = photos / "class2" / "1.jpg"
        wait_for(lambda: search(other, path.read_bytes(), k=1).status_code == 200)
    assert memory(server, "VmHWM") < bound < 4.6e9


def test_a_jpeg_file_with_many_scans_is_refused(server, photos):
    content = (photos / "class2" / "1.jpg").read_bytes()
    bomb = content[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" * 200 + b"\xff\xd9"
    answer = search(server.client, bomb)
    assert answer.status_code == 400
    assert "201 scans" in answer.json()["error"]


@pytest.mark.slow
def test_overload_is_refused_quickly(server, pool):
    slow = slowness()
    photos = [HUGE] * 4
    with client_of(server) as client:
        search(client, HUGE)  # from now on the server knows how long such photos take
        answers = [pool.submit(timed, search, client, *photos) for _ in range(30)]
        answers = [answer.result() for answer in answers]
    codes = [answer.status_code for answer, _ in answers]
    assert codes.count(503) > 15
    refused = [(answer, seconds) for answer, seconds in answers if answer.status_code == 503]
    waits = [int(answer.headers["retry-after"]) for answer, _ in refused]
    assert 1 <= min(waits) < max(waits) <= 10  # they do not come back together
    assert median(seconds for _, seconds in refused) < 5 * slow  # long before the time limit


def test_one_address_has_a_limit_of_requests(index, photos):
    server = InThread(index, ServeSettings(limits=Limits(per_address=4)))
    try:
        with ExitStack() as stack:
            wires = [stack.enter_context(connect(server)) for _ in range(7)]
            for wire in wires:  # none of these requests ever ends
                fields = "Content-Length: 9000", "X-Forwarded-For: 203.0.113.5"
                wire.sendall(head(MULTIPART, *fields) + PART)
            wait_for(lambda: sum(map(is_answered, wires)) == 3)
            for wire in filter(is_answered, wires):
                answer = wire.recv(10_000)
                assert answer.startswith(b"HTTP/1.1 429")
                assert b"retry-after: 1" in answer
            with client_of(server, "203.0.113.6") as other:
                content = (photos / "class2" / "1.jpg").read_bytes()
                assert search(other, content, k=1).status_code == 200
    finally:
        server.stop()


@pytest.mark.slow
def test_connections_without_a_request_are_closed(server):
    slow = slowness()
    with ExitStack() as stack:
        wires = [stack.enter_context(connect(server)) for _ in range(1000)]
        for wire in wires[::2]:
            try:
                wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            except OSError:
                continue  # closed already, for the newer ones
        answer, seconds = timed(server.client.get, "/health")
        assert answer.status_code == 200
        assert seconds < 15 * slow
        left = [wire for wire in wires if not is_closed(wire)]
        assert len(left) <= 128
        for wire in left:
            wait_for(lambda wire=wire: is_closed(wire))


@pytest.mark.slow
def test_a_header_that_comes_byte_by_byte_is_cut_off(server):
    started = time.monotonic()
    with connect(server) as wire:
        while not is_closed(wire):
            wire.setblocking(True)
            wire.sendall(b"X")
            time.sleep(0.2)
            assert time.monotonic() - started < 120
    assert time.monotonic() - started > 5


def test_a_client_that_does_not_read_is_disconnected(index):
    server = InThread(index, ServeSettings(limits=Limits(read_seconds=0.5)))
    try:
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(server.address)
            started = time.monotonic()
            wire.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            connections = server.server.server_state.connections
            wait_for(lambda: connections)
            wait_for(lambda: not connections)
            assert time.monotonic() - started > 0.5
        # Others have the time that they need for each answer.
        with httpx.Client(verify=False, base_url=server.url, timeout=60) as client:
            assert client.get("/health").status_code == 200
            time.sleep(1)
            assert client.get("/health").status_code == 200
    finally:
        server.stop()


def test_a_refused_body_is_not_read_further(server):
    piece = b"186a0\r\n" + b"x" * 100_000 + b"\r\n"
    with connect(server) as wire:
        wire.sendall(head(MULTIPART, "Transfer-Encoding: chunked"))
        wire.sendall(f"{len(PART):x}\r\n".encode() + PART + b"\r\n")
        while not is_answered(wire):
            wire.sendall(piece)
        wire.settimeout(20)
        assert wire.recv(10_000).startswith(b"HTTP/1.1 413")
        answered = time.monotonic()
        send_until_closed(wire, piece)
        assert time.monotonic() - answered < 50


def test_refused_connections_count_until_they_are_closed(index, monkeypatch):
    monkeypatch.setattr(connections_module, "LINGER_SECONDS", 60)
    server = InThread(index, ServeSettings(limits=Limits(connections_per_address=10)))
    try:
        with ExitStack() as stack:
            for _ in range(60):
                wire = stack.enter_context(connect(server))
                wire.sendall(head(MULTIPART, f"Content-Length: {10**12}"))
                assert wire.recv(10_000).startswith(b"HTTP/1.1 413")
            open_now = server.server.server_state.connections
            wait_for(lambda: len(open_now) <= 10, 30)
    finally:
        server.stop()


def test_a_body_that_is_malformed_is_refused_once(server):
    """Also where the header alone is refused: that answer is not sent after the first."""
    bad = head("Transfer-Encoding: chunked").replace(b"localhost", b"example.org") + b"zz\r\n"
    with connect(server) as wire:
        wire.sendall(bad)
        received = b"".join(iter(lambda: wire.recv(10_000), b""))
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1
    assert "Traceback" not in server.log()


def is_answered(wire):
    return bool(select.select([wire], [], [], 0)[0])


def send_until_closed(wire, piece):
    """Send until the server has closed the connection."""
    end = time.monotonic() + 60
    with suppress(ConnectionResetError, BrokenPipeError):
        while time.monotonic() < end:
            wire.sendall(piece)


@pytest.mark.slow
def test_what_a_killed_server_leaves_is_deleted_by_the_next(folder, start):
    uploads = folder / "uploads"
    # Bytes after the end of a JPEG file are ignored, but make it another photo.
    photo = encoded(texture(0, (2400, 1800)), quality=90)
    contents = [photo + bytes([number]) for number in range(6)]
    files = [("photos", (f"{number}.jpg", each)) for number, each in enumerate(contents)]
    killed = start(folder, token=TOKEN)
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        # Processes of the killed server keep the connection open: the client must not wait long.
        answer = one.submit(killed.client.post, "/api/entries", files=files, timeout=30)
        wait_for(lambda: list(uploads.glob("*.jpg")))
        killed.popen.send_signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{killed.popen.pid}/task").iterdir())
        wait_for(lambda: all("State:\tT" in (each / "status").read_text() for each in tasks))
        left = set(os.listdir(uploads))
        assert any(name.endswith(".pending") for name in left)
        # Another server of the same index leaves the files of the stopped one alone.
        with serving_here(folder):
            assert left <= set(os.listdir(uploads))
        killed.popen.kill()
        with pytest.raises(httpx.TransportError):
            answer.result()
    (uploads / "mine.jpg").write_bytes(b"a file of the user")
    with serving_here(folder) as client:
        page = client.get("/api/entries?count=1000").json()["entries"]
        known = {entry["id"] for entry in page if entry["id"].startswith("uploads/")}
        assert {f"uploads/{name}" for name in os.listdir(uploads)} == known | {"uploads/mine.jpg"}
        assert len(client.post("/api/entries", files=files).json()["errors"]) == 0
        assert len(list(uploads.iterdir())) == 7


@contextmanager
def serving_here(folder):
    """A server of the index in this process; gives a client that may add photos."""
    with open_index(folder) as index:
        server = InThread(index, ServeSettings(token=TOKEN, uploads=folder / "uploads"))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(
            verify=False, base_url=server.url, timeout=120, headers=headers
        ) as client:
            yield client
        server.stop()


def test_the_openapi_document_is_valid(server):
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(server.client.get("/openapi.json").json())
