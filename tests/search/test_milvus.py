"""What only an index in Milvus does: addresses, servers that fail, kills, methods of search."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from listwise.errors import InputError
from listwise.search import exact_search
from listwise.search.entries import Entry, NewEntries, entry_key
from listwise.search.methods import SearchIntent
from listwise.search.milvus import connection
from listwise.search.milvus.connection import Connection, parse_place
from listwise.search.milvus.method import EXACT, fast
from listwise.search.milvus.rows import THUMBNAIL_BYTES
from listwise.search.opening import create_store, open_store, store_exists
from listwise.search.store import IndexHeader

pytest.importorskip("milvus_lite")
HEADER = IndexHeader(model="f" * 64, model_folder="/models/m", whitened=True, dim=8)
PROCESSES = multiprocessing.get_context("forkserver")
SOAK = bool(os.environ.get("LISTWISE_SOAK"))


@pytest.fixture(params=["lite", "server"])
def new_place(request):
    return request.getfixturevalue(f"{request.param}_places")


def run(function, *arguments):
    """Call a function in a process of its own: the exit code of the process."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    process.join(120)
    return process.exitcode


def die_before(moment):
    """Make the call of some method of Milvus's kill this process."""

    def call(self, method, original=Connection.call, **arguments):
        if method == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, method, **arguments)

    Connection.call = call


def some(start, count=40):
    """Entries that can be told from their number alone."""
    numbers = range(start, start + count)
    entries = [Entry(f"photo {number}", "", 1, 1) for number in numbers]
    rows = np.random.default_rng(start).normal(size=(count, 8)).astype(np.float32)
    return NewEntries(entries, rows, [b"thumbnail %d" % number for number in numbers])


def clustered(count, dim, seed=0):
    """Unit descriptors in clusters of about fifty, and queries near some of them."""
    generator = np.random.default_rng(seed)
    centers = generator.normal(size=(max(1, count // 50), dim)).astype(np.float32)
    rows = centers[generator.integers(0, len(centers), count)]
    rows += 0.7 * generator.normal(size=rows.shape).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    queries = rows[generator.integers(0, count, 50)]
    queries += 0.5 / dim**0.5 * generator.normal(size=queries.shape).astype(np.float32)
    return rows, queries / np.linalg.norm(queries, axis=1, keepdims=True)


def fill(index, rows):
    entries = [Entry(f"photo {number}", f"/{number}", 1, 1) for number in range(len(rows))]
    index.put(NewEntries(entries, rows, [b""] * len(rows)))
    return np.array([entry.key for entry in entries])


def recall(index, queries, rows, keys):
    _, found = index.search(queries, 10)
    _, places = exact_search(queries, rows, 10)
    return np.mean([np.isin(keys[a], b).mean() for a, b in zip(places, found, strict=True)])


def test_places():
    place = parse_place("milvus://example.org:1234/photos_1")
    assert (place.address, place.collection, place.token) == (
        "http://example.org:1234",
        "photos_1",
        "",
    )
    assert parse_place("milvus://example.org/a").address == "http://example.org:19530"
    assert parse_place("milvus://[::1]:5/a").address == "http://[::1]:5"
    secret = parse_place("milvus://user:p%40ss@example.org:1/a")
    assert secret.token == "user:p@ss"
    assert secret.shown == "milvus://example.org:1/a"
    assert parse_place("some/photos.db").file == Path("some/photos.db").absolute()


@pytest.mark.parametrize(
    "uri",
    [
        "milvus://",
        "milvus://host",
        "milvus://host:1/",
        "milvus:///name",
        "milvus://host:99999999/name",
        "milvus://host:port/name",
        "milvus://user:secret@host:1/a-b",
        "milvus://user:secret@host:1/a/b",
        "milvus://host:1/1a",
        "milvus://host:1/" + "a" * 256,
    ],
)
def test_places_that_are_none_are_refused(uri):
    with pytest.raises(InputError, match="write milvus://host:port/name") as caught:
        open_store(uri)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "module"),
    [
        ("milvus://localhost:1/a", "pymilvus"),
        ("{folder}/a.db", "pymilvus"),
        ("{folder}/a.db", "milvus_lite"),
    ],
)
def test_without_pymilvus_one_line_says_what_to_install(uri, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"pip install 'listwise\[milvus\]'") as caught:
        create_store(uri.format(folder=tmp_path), HEADER)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_does_not_answer_is_one_line(listens):
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        if listens:
            place.listen()  # but never answers
        start = time.monotonic()
        for function in (open_store,) if listens else (open_store, store_exists):
            with pytest.raises(
                InputError, match=f"no Milvus server answers at 127.0.0.1:{port}"
            ) as e:
                function(f"milvus://127.0.0.1:{port}/a")
            assert "\n" not in str(e.value)
        assert time.monotonic() - start < 60


def test_a_file_may_be_named_as_a_shell_completes_it(lite_places):
    place = lite_places()
    create_store(place, HEADER).close()
    assert Path(place).is_dir()
    with open_store(f"{place}/") as index:
        assert len(index) == 0


def test_files_that_are_not_of_milvus_lite(tmp_path):
    (tmp_path / "text.db").write_text("not a folder")
    assert not store_exists(str(tmp_path / "text.db"))
    with pytest.raises(InputError, match="not a folder of milvus-lite"):
        create_store(tmp_path / "text.db", HEADER)
    with pytest.raises(InputError, match="no folder"):
        create_store(tmp_path / "missing" / "a.db", HEADER)
    assert not store_exists(str(tmp_path / "none.db"))
    assert not (tmp_path / "none.db").exists()


def say_what_opening_gives(place, answers):
    try:
        answers.put(len(open_store(place)))
    except InputError as error:
        answers.put(str(error))


def test_a_file_in_use_by_another_process_is_one_line(lite_places):
    place, answers = lite_places(), PROCESSES.SimpleQueue()
    with create_store(place, HEADER):
        run(say_what_opening_gives, place, answers)
        assert answers.get() == (
            f"{place} cannot be opened: it may be open in another process, or not be a file of "
            "milvus-lite"
        )
    run(say_what_opening_gives, place, answers)
    assert answers.get() == 0


def test_a_failed_call_is_one_line(new_place):
    with create_store(new_place(), HEADER) as index:
        index.connection.call("drop_collection")
        with pytest.raises(InputError, match=r"failed: ") as caught:
            len(index)
    assert index.uri in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_collection_of_another_program_is_left_alone(server_places):
    from pymilvus import MilvusClient

    uri = server_places()
    place = parse_place(uri)
    client = MilvusClient(place.address, timeout=5, dedicated=True)
    client.create_collection(place.collection, dimension=4)
    assert not store_exists(uri)
    with pytest.raises(InputError, match="collection of another program"):
        create_store(uri, HEADER)
    assert client.has_collection(place.collection)
    client.close()


def create_and_die(places):
    """Create an index at each place, each in a process that dies at its moment."""
    import pymilvus  # noqa: F401  # which takes long, once for all

    for moment, place in places.items():
        if os.fork() == 0:
            die_before(moment)
            create_store(place, HEADER.model_copy(update={"dim": 5}))
            os._exit(0)
        assert os.WTERMSIG(os.wait()[1]) == signal.SIGKILL


def test_a_kill_while_an_index_is_made_leaves_none(new_place):
    places = {moment: new_place() for moment in ("create_index", "alter_collection_properties")}
    assert run(create_and_die, places) == 0
    for moment, place in places.items():
        assert not store_exists(place), moment
        with create_store(place, HEADER) as index:
            assert index.header == HEADER
            fill(index, clustered(10, 8)[0])
            assert len(index) == 10


def put_and_remove(place, ready):
    with open_store(place) as index:
        ready.put(True)
        while True:
            for start in range(0, 400, 40):
                index.put(some(start))
            index.remove([entry_key(f"photo {number}") for number in range(200)])


def test_kills_while_entries_are_put_and_removed_leave_whole_entries(new_place):
    place = new_place()
    create_store(place, HEADER).close()
    generator = np.random.default_rng(0)
    for _ in range(10 if SOAK else 2):
        ready = PROCESSES.SimpleQueue()
        process = PROCESSES.Process(target=put_and_remove, args=(place, ready))
        process.start()
        assert ready.get()
        time.sleep(generator.uniform(0.05, 1.5))
        process.kill()
        process.join()
        with open_store(place) as index:
            numbers = check_whole(index)
    # The next run goes on.
    with open_store(place) as index:
        for start in range(0, 400, 40):
            index.put(some(start))
        assert check_whole(index) == list(range(400))
        assert set(numbers) <= set(range(400))


def check_whole(index):
    """Make sure that every step was taken whole or not at all: the numbers of the entries."""
    numbers = sorted(int(entry.id.removeprefix("photo ")) for entry in index)
    assert len(index) == len(numbers) == len(set(numbers))
    # Forty come at a time, and two hundred go.
    assert set(np.bincount(np.array(numbers, int) // 40, minlength=10)) <= {0, 40}
    assert len([number for number in numbers if number < 200]) % 40 == 0
    for number in numbers[::37]:
        wanted, place = some(number // 40 * 40), number % 40
        key = wanted.entries[place].key
        np.testing.assert_array_equal(index.vectors([key]), wanted.descriptors[place : place + 1])
        assert index.thumbnail(key) == wanted.thumbnails[place]
    return numbers


def tune_and_die(place):
    index = open_store(place)
    die_before("create_index")
    index.method.tune(SearchIntent(milliseconds=1e-6))


def test_a_kill_between_two_methods_of_search_is_mended(server_places):
    place = server_places()
    rows, queries = clustered(200, 8)
    with create_store(place, HEADER) as index:
        keys = fill(index, rows)
    assert run(tune_and_die, place) == -signal.SIGKILL
    with open_store(place) as index:
        assert index.info()["method"].startswith("HNSW")
        assert recall(index, queries, rows, keys) >= 0.99


def test_what_milvus_cannot_hold_is_refused(lite_places):
    rows = np.eye(1, 8, dtype=np.float32)
    with create_store(lite_places(), HEADER) as index:
        most = os.urandom(THUMBNAIL_BYTES)
        index.put(NewEntries([Entry("a", "", 1, 1)], rows, [most]))
        assert index.thumbnail(Entry("a", "", 1, 1).key) == most
        for entry, thumbnail, reason in [
            (Entry("b", "", 1, 1), most + b"x", f"thumbnail of b has more than {THUMBNAIL_BYTES}"),
            (Entry("ü" * 40_000, "", 1, 1), b"", "the id of"),
            (Entry("b", "", 1, 1, attributes={"a": "x" * 70_000}), b"", "the attributes of b"),
        ]:
            with pytest.raises(InputError, match=reason):
                index.put(NewEntries([entry], rows, [thumbnail]))
        assert len(index) == 1
        with pytest.raises(InputError, match="16384 or less"):
            index.search(rows, 16385)


def test_entries_are_walked_through_where_a_window_holds_too_many(lite_places, monkeypatch):
    monkeypatch.setattr(connection, "MOST", 100)
    with create_store(lite_places(), HEADER) as index:
        keys = fill(index, clustered(300, 8)[0])
        assert sorted(entry.key for entry in index) == sorted(keys.tolist())
        assert [entry.key for entry in index.entries(start=140, count=3)] == sorted(keys.tolist())[
            140:143
        ]


def test_what_does_not_fit_into_memory_is_compressed():
    count, dim = 1_000_000, 2048
    found = []
    for memory in (None, int(9e9), int(3e9), int(1.5e9), int(3e8), int(1e8)):
        method = fast(count, dim, memory, lossy=True)
        assert method is not None
        assert memory is None or method.memory(count, dim) <= memory
        found.append((method.type, method.build.get("m")))
    assert found == [
        ("HNSW", None),
        ("HNSW", None),
        ("IVF_SQ8", None),
        ("IVF_PQ", 1024),
        ("IVF_PQ", 256),
        ("IVF_PQ", 64),
    ]
    assert fast(count, dim, 1000, lossy=True) is None
    assert fast(count, dim, int(3e9), lossy=False) is None
    assert EXACT.memory(count, dim) == 4 * dim * count


def test_searching_harder_ends_with_all_that_there_is():
    lists = fast(50_000, 2048, 50_000 * 3000, lossy=True)
    probed = [harder.search["nprobe"] for harder in lists.efforts()]
    assert probed[0] == 8
    assert probed[-1] == lists.build["nlist"]
    assert probed == sorted(set(probed))
    kept = [harder.search["ef"] for harder in fast(50_000, 2048, None, lossy=False).efforts()]
    assert kept == [32, 64, 128, 256, 512, 1024, 2048]


def test_milvus_lite_stays_exact(lite_places):
    with create_store(lite_places(), HEADER) as index:
        rows, queries = clustered(300, 8)
        keys = fill(index, rows)
        tuned = index.method.tune(SearchIntent(milliseconds=1e-6, memory=1))
        assert tuned.method == "exact"
        assert tuned.recall == 1
        assert recall(index, queries, rows, keys) == 1


@pytest.mark.slow
def test_a_server_searches_as_it_is_asked_to(server_places):
    place, dim = server_places(), 32
    rows, queries = clustered(3000, dim)
    with create_store(place, HEADER.model_copy(update={"dim": dim})) as index:
        keys = fill(index, rows)
        cases = [
            (SearchIntent(), "exact", 1),
            (SearchIntent(milliseconds=1e-6, recall=0.99), "HNSW", 0.99),
            (SearchIntent(memory=3000 * dim * 2), "IVF_SQ8", 0.9),
            (SearchIntent(memory=3000 * dim), "IVF_PQ", 0.3),
            (SearchIntent(milliseconds=1e-6, recall=1), "exact", 1),
        ]
        for intent, method, least in cases:
            if "IVF" in method and index.info()["server"].startswith("v2.3"):
                with pytest.raises(InputError, match=r"Milvus 2\.5"):
                    index.method.tune(intent)
                continue
            tuned = index.method.tune(intent)
            assert tuned.method.startswith(method)
            assert tuned.memory <= (intent.memory or np.inf)
            assert tuned.recall >= least
            # What was measured holds for queries that were not.
            assert recall(index, queries, rows, keys) == pytest.approx(tuned.recall, abs=0.1)
            np.testing.assert_array_equal(index.vectors(keys[:50]), rows[:50])
            new = Entry("new", "", 1, 1)
            index.put(NewEntries([new], rows[:1], [b""]))
            assert new.key in index.search(rows[:1], 20)[1]
            index.remove([new.key])
            assert new.key not in index.search(rows[:1], 20)[1]
            with open_store(place) as again:
                info = again.info()
                assert info["method"] == tuned.method
                assert info["recall"] == tuned.recall
                assert SearchIntent(**info["intent"]) == intent
