"""A server gets requests that no client should send: it answers, stays up, and keeps its data.

Bounded in time by default; long with LISTWISE_SOAK=1 (`make soak`).
"""

import concurrent.futures
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from http_mutations import damage, valid_requests
from mutations import encoded_photos, mutate
from serving_examples import TOKEN, Process, wait_for

from listwise.search.entries import entry_key

HERE = Path(__file__).parent
SOAK = bool(os.environ.get("LISTWISE_SOAK"))
REQUESTS = 100_000 if SOAK else 300
PHOTOS = 3_000 if SOAK else 30
EXAMPLES = 1_000 if SOAK else 2  # of each operation, in the phases of schemathesis that are random
# Random requests are long to generate; damaged ones are sent by another test, too.
PHASES = ["Examples", "Coverage", *(["Fuzzing", "Stateful"] if SOAK else [])]
BATCH = 100
WIRES = 20  # connections at one time; an address has 48 requests at one time at most
# Every part of an answer before its body.
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
REFUSED = {400, 413, 415, 422, 429, 503}


@pytest.fixture(scope="module")
def index_folder(filled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "index"
    shutil.copytree(filled, folder)
    return folder


@pytest.fixture(scope="module")
def server(index_folder):
    # On a busy machine an answer may take long, which is not what is tested here.
    server = Process(index_folder, "--timeout", 120, token=TOKEN)
    server.client.timeout = 120
    yield server
    code, log = server.stop()
    assert code == 0
    assert "Traceback" not in log, log


@pytest.fixture(autouse=True)
def healthy_and_within_its_memory(server):
    """After each test the server answers, and has used no more memory than it announced."""
    yield
    assert server.client.get("/health").status_code == 200
    bound = float(re.search(r"up to ([\d.]+) GB of memory", server.said)[1]) * 1e9
    status = Path(f"/proc/{server.popen.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 < bound


def test_every_answer_is_as_documented(server, tmp_path):
    """schemathesis reads /openapi.json and generates requests from it, valid and invalid."""
    pytest.importorskip("schemathesis")
    program = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    checks = ["not_a_server_error", "status_code_conformance"]
    checks += ["content_type_conformance", "response_schema_conformance"]
    options = ["--checks", ",".join(checks), "--phases", ",".join(PHASES).lower()]
    options += ["--header", f"Authorization: Bearer {TOKEN}", "--max-examples", EXAMPLES]
    options += ["--seed", 1, "--generation-database", "none", "--no-color"]
    options += ["--suppress-health-check", "all", "--request-timeout", 120]
    command = [*program, "run", f"{server.url}/openapi.json", *map(str, options)]
    search_path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    hooks = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": search_path}
    hooks["ENTRY_KEYS"] = " ".join(str(entry_key(f"class0/{number}.jpg")) for number in (0, 1))
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **hooks}, capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"(?m)^  ✅ (\w+)$", done.stdout) == PHASES


def exchange(server, content, patience=60):
    """Send bytes; return all that the server answers until it closes the connection.

    After `patience` seconds without an answer the client sends no more, and the server must close.
    """
    url, received = httpx.URL(server.url), b""
    # The server may close before it has read everything.
    with socket.create_connection((url.host, url.port), 60) as wire, suppress(ConnectionError):
        wire.sendall(content)
        wire.settimeout(patience)
        with suppress(TimeoutError):
            while piece := wire.recv(65536):
                received += piece
            return received
        wire.settimeout(60)
        wire.shutdown(socket.SHUT_WR)
        while piece := wire.recv(65536):
            received += piece
    return received


def connections(server):
    """The number of sockets that the server's process has open."""
    count = 0
    for file in Path(f"/proc/{server.popen.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(file).startswith("socket:")
    return count


def test_damaged_requests_are_answered_or_refused(server):
    key = server.client.get("/api/entries?count=1").json()["entries"][0]["key"]
    valid = valid_requests(encoded_photos(0), key, TOKEN)
    for request in valid:
        ((status, _),) = ANSWER.findall(exchange(server, request))
        assert status == (b"404" if request.startswith(b"DELETE") else b"200"), request[:80]
    generator = np.random.default_rng(0)
    before, statuses = connections(server), Counter()
    with concurrent.futures.ThreadPoolExecutor(WIRES) as pool:
        for _ in range(0, REQUESTS, BATCH):
            requests = [damage(valid, generator) for _ in range(BATCH)]
            answers = pool.map(lambda request: exchange(server, request, patience=1), requests)
            for request, received in zip(requests, answers, strict=True):
                heads = ANSWER.findall(received)
                assert bool(heads) == bool(received), request[:1000]
                for status, headers in heads:
                    statuses[int(status)] += 1
                    busy = status == b"503" and b"retry-after: 1" in headers.lower()
                    assert status < b"500" or busy, request[:1000]
                    assert b"x-injected" not in headers.lower(), request[:1000]
            assert server.client.get("/health").status_code == 200
    print(f"{REQUESTS} damaged requests, answers: {sorted(statuses.items())}")
    assert {200, 400, 404} <= set(statuses)
    wait_for(lambda: connections(server) <= before)


def test_damaged_photos_are_searched_and_added_or_refused(server, index_folder):
    def send(path, photo, **fields):
        return server.client.post(path, files={"photos": ("photo", photo)}, data=fields)

    generator = np.random.default_rng(0)
    before = server.client.get("/health").json()["entries"]
    added: dict[str, bytes] = {}
    statuses = Counter()
    for number in range(PHOTOS):
        if number % 100 == 0:
            originals = encoded_photos(1 + number)
        original = originals[number % len(originals)]
        photo = original if number % 10 == 0 else mutate(original, generator)
        searched, sent = send("/api/search", photo), send("/api/entries", photo)
        for answer in (searched, sent):
            assert answer.status_code in {200, *REFUSED}, answer.text
            statuses[answer.status_code] += 1
        if sent.status_code == 200:
            assert searched.status_code == 200 or sent.json()["errors"], searched.text
            added |= dict.fromkeys(sent.json()["added"], photo)
    print(f"{PHOTOS} photos, answers: {sorted(statuses.items())}, {len(added)} entries added")
    assert len(added) > PHOTOS / 10
    assert server.client.get("/health").json()["entries"] == before + len(added)
    for key, photo in added.items():
        results = send("/api/search", photo, k=1000).json()["results"]
        scores = {result["key"]: result["score"] for result in results}
        assert scores[key] == pytest.approx(1, abs=1e-3)
    # Every photo that was added has its file, and nothing else was left in the folder.
    entries = []
    while page := server.client.get(f"/api/entries?start={len(entries)}").json()["entries"]:
        entries += page
    uploaded = {entry["id"] for entry in entries if entry["id"].startswith("uploads/")}
    assert len(uploaded) >= len(added)
    assert {f"uploads/{name}" for name in os.listdir(index_folder / "uploads")} == uploaded
