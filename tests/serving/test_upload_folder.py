"""The folder of added photos after a server was killed."""

import io
import os
import shutil
from contextlib import contextmanager

import pytest
from index_examples import texture

from listwise.search.index import Index
from listwise.search.marks import Mark, MarkedQuery
from listwise.search.opening import open_store
from listwise.serving.forms import Upload
from listwise.serving.upload_folder import LOCK, UploadFolder


@pytest.fixture
def uploads(index, tmp_path):
    uploads = UploadFolder(index, tmp_path / "uploads")
    uploads.folder.mkdir()
    (uploads.folder / "mine.jpg").write_bytes(b"a file of the user")
    return uploads


@contextmanager
def storing(uploads, killed=True):
    """Store a query photo; afterwards the folder is as if the server had been killed."""
    file = io.BytesIO()
    texture(1, (30, 20)).save(file, "JPEG")
    copy = uploads.folder.with_name("copy")
    with uploads.query(Upload("a.jpg", file.getvalue())) as path:
        assert path.read_bytes() == file.getvalue()
        path.with_name(f"{path.name}.tmp").write_bytes(b"a part of the photo")
        yield path
        shutil.copytree(uploads.folder, copy)
    if killed:
        shutil.rmtree(uploads.folder)
        copy.rename(uploads.folder)


def left(uploads):
    found = set(os.listdir(uploads.folder)) - {LOCK}
    assert "mine.jpg" in found
    return found - {"mine.jpg"}


def test_what_was_not_added_completely_is_deleted_by_a_server_of_this_index(uploads, filled):
    with storing(uploads):
        pass
    found = left(uploads)
    assert len(found) == 3  # the photo, a part of it, and their name
    with open_store(filled) as store:
        UploadFolder(Index(store), uploads.folder).clean()
    assert left(uploads) == found
    uploads.clean()
    assert left(uploads) == set()


def test_a_server_also_cleans_up_before_a_change(uploads):
    with storing(uploads):
        pass
    with uploads.query(Upload("b.jpg", b"\xff\xd8 another photo")) as path:
        assert {name for name in left(uploads) if name[0] != "."} == {path.name}
    assert left(uploads) == set()


@pytest.mark.parametrize("killed", [False, True])
def test_a_query_photo_is_kept_if_a_mark_refers_to_its_file(uploads, killed):
    """As in Milvus, which keeps no copies of photos."""
    entry = next(iter(uploads.index)).id
    with storing(uploads, killed) as path:
        query = MarkedQuery("query:1", str(path), None, "1")
        mark = Mark("0" * 16, query, entry, True, "Ann", "2026-11-16T12:00:00+00:00")
        uploads.index.store.mark_log.append([mark])
    uploads.clean()
    assert left(uploads) == {path.name}
