"""Searches by `listwise search` that a running server answers."""

import json
import os
import subprocess
import sys

import programs
import pytest
from index_examples import texture
from serving_examples import InThread

from listwise.client import Client
from listwise.search.options import SearchOptions
from listwise.servers import RunningServer, announce, find_server, search_by_server
from listwise.serving.server import ServeSettings

ONE, TOO_MANY = (SearchOptions(k=k).model_dump() for k in (1, 10_000))

# Runs the command, and fails if it loaded what makes a start slow.
COMMAND = """
import sys
from listwise.cli.main import main
code = main()
slow = {"torch", "faiss", "pyarrow"} & set(sys.modules)
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
    settings = ServeSettings()
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
    assert search_by_server(index.uri, [path], [], ONE)["results"][0]["id"] != "new.png"
    adding = programs.listwise("index", "add", index.uri, path.parent)
    adding.communicate()
    assert adding.returncode == 0, adding.errors()
    assert search_by_server(index.uri, [path], [], ONE)["results"][0]["id"] == "new.png"


def test_what_it_cannot_answer_is_left_to_the_index(server, index, tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(b"not a photo")
    texture(1).save(tmp_path / "b.png")
    for name, options in [("missing.jpg", ONE), ("a.jpg", ONE), ("b.png", TOO_MANY)]:
        assert search_by_server(index.uri, [tmp_path / name], [], options) is None
    assert search_by_server(index.uri, [tmp_path / "b.png"], [None, None], ONE) is None
    # Diffusion may put a result first that is not among those that were verified in time.
    results = [{"id": "a", "inliers": None}, {"id": "b", "inliers": 9}]
    how = SearchOptions(k=2, quality="best").model_dump()
    for verified, used in [(100, True), (40, False)]:
        answer = {"results": results, "verified": verified}
        monkeypatch.setattr(Client, "search", lambda *_, found=answer, **__: found)
        given = search_by_server(index.uri, [tmp_path / "b.png"], [], how)
        assert given == (answer if used else None)


@pytest.mark.parametrize("place", ["server", "http://127.0.0.1:9"])
def test_another_program_at_its_address_gets_no_photo(server, index, photos, runtime, place):
    for file in runtime.iterdir():
        file.unlink()
    url = server.url if place == "server" else place
    with announce(index.uri, url, "another one"):
        assert search_by_server(index.uri, [photos / "class0" / "0.jpg"], [], ONE) is None


def test_it_is_found_by_any_path_while_it_runs(index, runtime):
    place = os.path.relpath(index.uri)
    assert find_server(index.uri) is None
    with announce(index.uri, "http://127.0.0.1:1", "a"):
        assert find_server(place) == RunningServer("http://127.0.0.1:1", "a", os.getpid())
        assert find_server("elsewhere") is None
        runtime.chmod(0o777)  # others may have written there
        assert find_server(index.uri) is None
        runtime.chmod(0o700)
        # What a killed server left is deleted.
        ended = subprocess.Popen(["true"])
        ended.wait()
        (file,) = runtime.iterdir()
        file.write_text(file.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {ended.pid}'))
        assert find_server(index.uri) is None
        assert not file.exists()
        file.write_text("damaged")
        assert find_server(index.uri) is None
    assert list(runtime.iterdir()) == []
