"""A full disk, a read-only folder or a lost permission while clients change the index of a server.

The disk fills up at a few moments by default, at all of them with LISTWISE_SOAK=1 (`make soak`).
"""

import errno
import io
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from index_examples import texture
from serving_examples import TOKEN, Process, wait_for

from listwise.serving.upload_folder import LOCK

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
SQLITE_REASONS = (
    "database or disk is full",
    "disk I/O error",
    "attempt to write a readonly database",
    "unable to open database file",
)
# Of the server.
LOG_LINE = re.compile(r"\[?\d{4}-\d\d-\d\d[ T][\d:,]+Z? (ERROR|WARN)")
# The number of calls that succeed before the fault.
FULL = range(120) if SOAK else (0, 24)
MOMENTS = {errno.ENOSPC: FULL, errno.EROFS: (0,), errno.EACCES: (0,)}


@pytest.fixture
def server(folder, crash_point, tmp_path):
    """A server of an index in the folder `index`, whose disk the test can make fail."""
    program = [Path(__file__).with_name("served_with_faults.py"), tmp_path / "fault", folder]
    server = Process(folder, token=TOKEN, program=program, preload=crash_point)
    yield server
    if server.popen.poll() is None:
        server.stop()


def photo(seed):
    file = io.BytesIO()
    texture(seed, (60, 40)).save(file, "JPEG")
    return {"photos": ("photo.jpg", file.getvalue())}


def test_a_change_that_cannot_be_stored_is_refused_and_works_later(server, folder, tmp_path):
    uploads, refused, tried = folder / "uploads", [], 0

    def disturb(calls, error=0):
        (tmp_path / "fault").write_text(f"{calls} {error}")
        server.popen.send_signal(signal.SIGUSR1)
        wait_for(lambda: not (tmp_path / "fault").exists())

    def state():
        """The ids of entries and marks; each file in the folder of uploads belongs to an entry."""
        page = server.client.get("/api/entries?count=1000").json()
        ids = {entry["id"] for entry in page["entries"]}
        files = (
            {f"uploads/{name}" for name in os.listdir(uploads) if name != LOCK}
            if uploads.exists()
            else set()
        )
        assert files == {name for name in ids if name.startswith("uploads/")}
        return ids | {mark["id"] for mark in server.client.get("/api/marks").json()["marks"]}

    def change(calls, error, method, *arguments, **options):
        """Change the index while the disk fails; whether the change was made."""
        before, log = state(), server.log()
        disturb(calls, error)
        answer = getattr(server.client, method)(*arguments, **options)
        disturb(-1)
        lines = server.log()[len(log) :].splitlines()
        if answer.status_code != 200:
            refused.append(method)
            assert answer.status_code == 507, answer.text
            reason = answer.json()["error"].removeprefix("the server cannot store the change: ")
            assert reason in (os.strerror(error), *SQLITE_REASONS)
            assert sum("ERROR a change of the index failed: " in line for line in lines) == 1
        assert all(LOG_LINE.match(line) for line in lines), lines
        changed = state() != before
        assert changed or answer.status_code == 507
        return changed

    entries = state()
    known = server.client.get("/api/entries?count=1").json()["entries"][0]["key"]
    for error, moments in MOMENTS.items():
        for calls in moments:
            tried += 1
            changed = change(calls, error, "post", "/api/entries", files=photo(tried))
            added = server.client.post("/api/entries", files=photo(tried))
            assert added.status_code == 200, added.text
            (key,) = added.json()["unchanged" if changed else "added"]
            assert len(state() - entries) == 1
            changed = change(calls, error, "delete", f"/api/entries/{key}")
            again = server.client.delete(f"/api/entries/{key}")
            assert again.status_code == (404 if changed else 200), again.text
            assert state() == entries
            query = photo(100 + tried) | {"same": (None, known)}
            change(calls, error, "post", "/api/marks", files=query)
            assert server.client.post("/api/marks", files=query).status_code == 200
            # Without the later mark of a pair, the earlier one counts.
            while marks := server.client.get("/api/marks").json()["marks"]:
                undone = server.client.delete(f"/api/marks/{marks[0]['id']}")
                assert undone.json() == {"undone": 1}
            assert state() == entries
    print(f"{3 * tried} changes, refused: {Counter(refused)}")
    assert refused.count("post") > tried  # of photos and of marks
    assert refused.count("delete") > tried / 3
    assert server.stop()[0] == 0
    assert "Traceback" not in server.log()
