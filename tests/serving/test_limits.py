"""`listwise serve` as a process: its work and its memory have limits."""

import concurrent.futures
import os
import re
import resource
import select
import signal
import time
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import pytest
from index_examples import texture
from PIL import Image
from serving_examples import (
    BEARER,
    HUGE,
    MULTIPART,
    PART,
    TOKEN,
    connect,
    encoded,
    head,
    numbers,
    search,
    serving,
    slowness,
    upload,
    wait_for,
)

from listwise.search import open_index
from listwise.search.entries import entry_key
from listwise.serving.server import Limits
from listwise.serving.upload_folder import LOCK

KEY = entry_key("class0/0.jpg")


def timed(call, *arguments, **fields):
    started = time.monotonic()
    return call(*arguments, **fields), time.monotonic() - started


def memory(server, kind):
    """VmHWM is the peak of the resident memory, VmRSS its present size, in bytes."""
    text = Path(f"/proc/{server.popen.pid}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+) kB", text)[1]) * 1024


@pytest.fixture(scope="module")
def server(shared_folder, start):
    return start(shared_folder, "--timeout", 4)


def client_of(server, address=None, connections=64):
    headers = {"X-Forwarded-For": address} if address else {}
    limits = httpx.Limits(max_connections=connections)
    return httpx.Client(
        verify=False, base_url=server.url, timeout=300, headers=headers, limits=limits
    )


@pytest.mark.slow
def test_huge_photos_neither_stop_the_server_nor_fill_its_memory(server, photos, pool):
    """At the limit of concurrent requests of an address, with the photos that cost most."""
    slow = slowness()
    bound = numbers(server.client)["listwise_maximum_memory_bytes"]
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
    other = {"X-Forwarded-For": "203.0.113.6"}
    with (
        serving(index, headers=other, limits=Limits(per_address=4)) as client,
        ExitStack() as stack,
    ):
        wires = [stack.enter_context(connect(client)) for _ in range(7)]
        for wire in wires:  # none of these requests ever ends
            fields = "Content-Length: 9000", "X-Forwarded-For: 203.0.113.5"
            wire.sendall(head(MULTIPART, *fields) + PART)
        wait_for(lambda: sum(map(is_answered, wires)) == 3)
        for wire in filter(is_answered, wires):
            answer = wire.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 429")
            assert b"retry-after: 1" in answer
        content = (photos / "class2" / "1.jpg").read_bytes()
        assert search(client, content, k=1).status_code == 200


def test_slow_clients_do_not_delay_others(server, photos):
    """They send no header, a part of one, or a body byte by byte; or they do not read."""
    slow = slowness()
    content = (photos / "class2" / "1.jpg").read_bytes()
    search(server.client, content)  # the first one takes longer
    starts = [
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        head(MULTIPART, "Content-Length: 9000", "X-Forwarded-For: 203.0.113.7") + PART,
        b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100,
    ]
    with ExitStack() as stack:
        wires = [stack.enter_context(connect(server.client)) for _ in range(300)]
        for wire, start in zip(wires, cycle(starts), strict=False):
            wire.sendall(start)
        for _ in range(5):
            for wire in wires[1::4] + wires[2::4]:
                wire.sendall(b"x")
            answer, seconds = timed(search, server.client, content, k=1)
            assert answer.status_code == 200
            assert seconds < 3 * slow


def test_a_refused_body_is_read_until_its_sender_sees_why(server):
    """Also if it is sent after the answer: the connection can be used again."""
    body = b"x" * 5_000_000
    with connect(server.client) as wire:
        wire.sendall(head(MULTIPART, f"Content-Length: {10**12}"))
        assert wire.recv(10_000).startswith(b"HTTP/1.1 413")
        wire.sendall(body)
    with connect(server.client) as wire:
        wire.sendall(head(f"Content-Length: {len(body)}") + body)
        assert wire.recv(10_000).startswith(b"HTTP/1.1 400")
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wire.recv(10_000).startswith(b"HTTP/1.1 200")


def is_answered(wire):
    return bool(select.select([wire], [], [], 0)[0])


@pytest.mark.slow
def test_what_a_killed_server_leaves_is_deleted_by_the_next(shared_folder, start):
    uploads = shared_folder / "uploads"
    # Bytes after the end of a JPEG file are ignored, but make it another photo.
    photo = encoded(texture(0, (2400, 1800)), quality=90)
    contents = [photo + bytes([number]) for number in range(6)]
    killed = start(shared_folder, token=TOKEN)
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        # Processes of the killed server keep the connection open: the client must not wait long.
        answer = one.submit(killed.client.post, "/api/entries", **upload(*contents), timeout=30)
        wait_for(lambda: list(uploads.glob("*.jpg")))
        killed.popen.send_signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{killed.popen.pid}/task").iterdir())
        wait_for(lambda: all("State:\tT" in (each / "status").read_text() for each in tasks))
        left = set(os.listdir(uploads))
        assert any(name.endswith(".pending") for name in left)
        # Another server of the same index leaves the files of the stopped one alone.
        with serving_here(shared_folder):
            assert left <= set(os.listdir(uploads))
        killed.popen.kill()
        with pytest.raises(httpx.TransportError):
            answer.result()
    (uploads / "mine.jpg").write_bytes(b"a file of the user")
    with serving_here(shared_folder) as client:
        page = client.get("/api/entries?count=1000").json()["entries"]
        known = {entry["id"] for entry in page if entry["id"].startswith("uploads/")}
        stored = {f"uploads/{name}" for name in os.listdir(uploads) if name != LOCK}
        assert stored == known | {"uploads/mine.jpg"}
        assert client.post("/api/entries", **upload(*contents)).json()["errors"] == []
        assert len(list(uploads.glob("*.jpg"))) == 7


@contextmanager
def serving_here(folder):
    """A server of the index in this process; gives a client that may add photos."""
    with open_index(folder) as index:
        settings = {"token": TOKEN, "uploads": folder / "uploads"}
        with serving(index, headers=BEARER, **settings) as client:
            yield client


def test_the_openapi_document_is_valid(server):
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(server.client.get("/openapi.json").json())
