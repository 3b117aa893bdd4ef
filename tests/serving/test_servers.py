"""Searches by `listwise search` that a running server answers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import programs
import pytest
from index_examples import texture
from serving_examples import InThread

from listwise import servers
from listwise.servers import RunningServer, announce, find_server
from listwise.serving.settings import Limits, ServeSettings

# Runs the command, and fails if it loaded what makes a start slow.
COMMAND = """
import sys
from listwise.cli.main import main
code = main()
slow = {"torch", "lancedb", "pyarrow"} & set(sys.modules)
sys.exit(code or (f"loaded {slow}" if slow else 0))
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch, tmp_path):
    """The folder in which servers are announced."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / f"listwise-{os.getuid()}"


@pytest.fixture
def server(index):
    settings = ServeSettings(limits=Limits(max_side=512))
    running = InThread(index, settings)
    with announce(index.uri, running.url, settings.instance):
        yield running
    running.stop()


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)], capture_output=True, text=True
    )


def test_the_command_uses_it_and_starts_fast(server, index, photos):
    path = photos / "class2" / "1.jpg"
    found = run("search", index.uri, path, "-k", 3, "--json")
    assert found.returncode == 0, found.stderr
    results = json.loads(found.stdout)["results"]
    hits = index.search(path, 3)
    assert [each["id"] for each in results] == [hit.id for hit in hits]
    assert [each["score"] for each in results] == pytest.approx(
        [hit.score for hit in hits], abs=2e-6
    )
    table = run("search", index.uri, path, "-k", 1, "--box", "0,0,40,40")
    assert table.returncode == 0, table.stderr
    assert index.search(path, 1, box=(0, 0, 40, 40))[0].id in table.stdout


def test_it_knows_what_was_just_added(server, index, tmp_path):
    path = tmp_path / "new" / "new.png"
    path.parent.mkdir()
    texture(77).save(path)
    running = find_server(index.uri)
    assert running.search([path], {"k": "1"})["results"][0]["id"] != "new.png"
    adding = programs.listwise("index", "add", index.uri, path.parent)
    adding.communicate()
    assert adding.returncode == 0, adding.errors()
    assert running.search([path], {"k": "1"})["results"][0]["id"] == "new.png"


def test_photos_that_it_would_reduce_are_not_sent(server, index, tmp_path):
    texture(1, (600, 90)).save(tmp_path / "wide.png")
    assert find_server(index.uri).search([tmp_path / "wide.png"], {}) is None
    texture(1, (512, 90)).save(tmp_path / "wide.png")
    assert find_server(index.uri).search([tmp_path / "wide.png"], {}) is not None


@pytest.mark.parametrize("content", [None, b"", b"not a photo"])
def test_what_it_refuses_is_left_to_the_index(server, index, tmp_path, content):
    if content is not None:
        (tmp_path / "a.jpg").write_bytes(content)
    assert find_server(index.uri).search([tmp_path / "a.jpg"], {}) is None
    texture(1).save(tmp_path / "b.png")
    assert find_server(index.uri).search([tmp_path / "b.png"], {"k": "0"}) is None


def test_another_program_at_its_address_gets_no_photo(server, index, photos):
    running = find_server(index.uri)
    assert replace(running, instance="other").search([photos / "class0" / "0.jpg"], {}) is None
    assert replace(running, url="http://127.0.0.1:9").search([], {}) is None


def test_it_is_found_by_any_path_while_it_runs(index, runtime, monkeypatch):
    place = os.path.relpath(index.uri)
    assert find_server(index.uri) is None
    with announce(index.uri, "http://127.0.0.1:1", "a"):
        assert find_server(place) == RunningServer("http://127.0.0.1:1", "a", os.getpid())
        assert find_server("elsewhere") is None
    assert find_server(index.uri) is None
    assert list(runtime.iterdir()) == []


def test_what_a_killed_server_left_is_deleted(index, runtime):
    ended = subprocess.Popen(["true"])
    ended.wait()
    with announce(index.uri, "http://127.0.0.1:1", "a"):
        (file,) = runtime.iterdir()
        file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {ended.pid}'))
        assert find_server(index.uri) is None
        assert not file.exists()
        file.write_text("damaged")
        assert find_server(index.uri) is None


def test_a_folder_that_others_may_write_to_is_not_used(index, runtime):
    with announce(index.uri, "http://127.0.0.1:1", "a"):
        runtime.chmod(0o777)
        assert find_server(index.uri) is None
        runtime.chmod(0o700)
        assert find_server(index.uri) is not None


@pytest.mark.parametrize(("verified", "used"), [(100, True), (40, False)])
def test_an_answer_counts_if_all_photos_were_verified(monkeypatch, verified, used):
    # Diffusion may put a result first that is not among the verified ones.
    results = [{"id": "a", "inliers": None}, {"id": "b", "inliers": 9}]
    answer = {"results": results, "verified": verified}
    running = SimpleNamespace(search=lambda photos, fields: answer)
    monkeypatch.setattr(servers, "find_server", lambda index: running)
    how = {"k": 2, "refine": "diffusion", "rerank": True, "where": None}
    assert servers.search_by_server("shop", ["a.jpg"], [], how) == (results if used else None)
