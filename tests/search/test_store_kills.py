"""Real processes that write to an index are killed, many times, at any moment."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from listwise.search.entries import Entry, NewEntries, entry_key
from listwise.search.methods import SearchIntent
from listwise.search.opening import create_store, open_store, store_exists
from listwise.search.store import IndexHeader, Store

DIM = 8
NAMES = 60
KILLS = 100 if os.environ.get("LISTWISE_SOAK") else 12


def row_of(name: str, mark: int) -> np.ndarray:
    """The descriptor that an entry has after a write with this mark."""
    row = np.random.default_rng([entry_key(name), mark]).normal(size=DIM)
    return (row / np.linalg.norm(row)).astype(np.float32)


def write_for_ever(folder: str, log: str, seed: int) -> None:
    """Create, put, remove and tune, and log what is about to be done and what was done."""
    from listwise.search.folder import table

    table._SLACK = 0  # descriptors are copied to another file whenever most were removed
    choices = random.Random(seed)
    with open(log, "a", encoding="ascii", buffering=1) as file:
        file.write("start\n")
        if not store_exists(folder):
            create_store(folder, IndexHeader(model="m", model_folder="m", whitened=False, dim=DIM))
        file.write("open\n")
        index = open_store(folder)
        for number in range(10**6):
            mark = seed * 10**6 + number
            chosen = choices.sample(range(NAMES), choices.randint(1, 8))
            kind = choices.choice(["put", "put", "put", "remove", "search", "tune"])
            file.write(f"will {kind} {mark} {','.join(map(str, chosen))}\n")
            if kind == "put":
                names = [f"n{i}" for i in chosen]
                rows = np.array([row_of(name, mark) for name in names])
                made = [Entry(name, "", 1, 1, attributes={"mark": str(mark)}) for name in names]
                index.put(NewEntries(made, rows, [b"jpeg"] * len(names)))
            elif kind == "remove":
                index.remove([entry_key(f"n{i}") for i in chosen])
            elif kind == "search":
                index.search(np.ones((1, DIM)), 5)
            else:
                index.method.tune(SearchIntent(memory=1 if mark % 2 else None))
            file.write(f"done {mark}\n")


def states(log: Path, known: dict[str, int]) -> list[dict[str, int]]:
    """What the index may hold by the log: all that was done, and perhaps what was begun last."""
    now, perhaps = dict(known), dict(known)
    for line in log.read_text(encoding="ascii").splitlines():
        words = line.split()
        if words[0] == "will" and len(words) == 4:
            perhaps = dict(now)
            names = [f"n{i}" for i in words[3].split(",")]
            if words[1] == "put":
                perhaps.update(dict.fromkeys(names, int(words[2])))
            elif words[1] == "remove":
                perhaps = {name: mark for name, mark in perhaps.items() if name not in names}
        elif words[0] == "done":
            now = perhaps
    return [now, perhaps]


def held(index: Store) -> dict[str, int]:
    """What an index holds, once everything in it agrees."""
    marks = {entry.id: int(entry.attributes["mark"]) for entry in index}
    assert len(index) == len(marks)
    keys = [entry_key(name) for name in marks]
    expected = np.array([row_of(name, mark) for name, mark in marks.items()]).reshape(-1, DIM)
    np.testing.assert_array_equal(index.vectors(keys), expected)
    assert set(index.get(keys)) == set(keys)
    query = row_of("query", 0)
    scores, found = index.search(query[None], NAMES)
    products = dict(zip(keys, (expected @ query).tolist(), strict=True))
    assert set(found[0].tolist()) - {-1} <= set(keys)
    for score, key in zip(scores[0].tolist(), found[0].tolist(), strict=True):
        assert key == -1 or score == pytest.approx(products[key], abs=1e-5)
    assert (found >= 0).sum() >= min(10, len(keys)) / 2  # compressed search may miss some
    return marks


def test_a_kill_at_any_moment_leaves_the_last_commit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    choices = random.Random(1)
    folder, known = tmp_path / "index", dict[str, int]()
    done = 0
    for number in range(KILLS):
        log = tmp_path / f"log{number}"
        writer = context.Process(
            target=write_for_ever, args=(str(folder), str(log), number), daemon=True
        )
        writer.start()
        begun = time.monotonic()
        # The first ones are killed early; the others after some changes, however slow they are.
        changes = 0 if number < KILLS // 3 else choices.randint(2, 5)
        while time.monotonic() < begun + 60:
            if log.exists() and log.read_text(encoding="ascii").count("done") >= changes:
                break
            time.sleep(0.002)
        time.sleep(choices.uniform(0, 0.1))
        assert writer.pid is not None
        assert writer.is_alive(), "the writer ended by itself"
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        allowed = states(log, known)
        done += log.read_text(encoding="ascii").count("done")
        if store_exists(str(folder)):
            with open_store(folder) as index:
                known = held(index)
        assert known in allowed
    assert done > KILLS  # it got somewhere between the kills
    with open_store(folder) as index:
        index.put(NewEntries([Entry("last", "", 1, 1)], np.ones((1, DIM), np.float32), [b""]))
        assert entry_key("last") in index.search(np.ones((1, DIM)), 3)[1]
