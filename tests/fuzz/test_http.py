"""A server gets requests that no client should send: it answers, stays up, and keeps its data.

Bounded in time by default; long with LISTWISE_SOAK=1 (`make soak`).
"""

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from mutations import encoded_photos, mutate
from serving_examples import TOKEN, Process, numbers

from listwise.search.entries import entry_key
from listwise.serving.upload_folder import LOCK

HERE = Path(__file__).parent
SOAK = bool(os.environ.get("LISTWISE_SOAK"))
PHOTOS = 3_000 if SOAK else 30
EXAMPLES = 1_000 if SOAK else 2  # of each operation, in the phases of schemathesis that are random
# Random requests take long to generate.
PHASES = ["Examples", "Coverage", *(["Fuzzing", "Stateful"] if SOAK else [])]
REFUSED = {400, 413, 415, 422, 429, 503}


@pytest.fixture(scope="module")
def server(shared_folder):
    # On a busy machine an answer may take long, which is not what is tested here.
    server = Process(shared_folder, "--timeout", 120, token=TOKEN)
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
    bound = numbers(server.client)["listwise_maximum_memory_bytes"]
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


def test_a_malformed_body_is_refused(server):
    """The log must have no traceback for what a client did wrong."""
    address = urlsplit(server.url)
    request = "POST /api/search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno"
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(f"{request}\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_damaged_photos_are_searched_and_added_or_refused(server, shared_folder):
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
    left = set(os.listdir(shared_folder / "uploads")) - {LOCK}
    assert {f"uploads/{name}" for name in left} == uploaded
