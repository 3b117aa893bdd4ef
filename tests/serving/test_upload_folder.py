"""The folder of added photos after a server was killed."""

import io
import os

import pytest
from index_examples import texture

from listwise.search.mark_log import mark_line
from listwise.search.marks import Mark, MarkedQuery
from listwise.serving.upload_folder import UploadFolder
from listwise.serving.uploads import Upload

NAME = "0123456789abcdef0123456789abcdef.jpg"
MARK = f".{NAME}.12-34.pending"


@pytest.fixture
def uploads(index, tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    (folder / NAME).write_bytes(b"a photo without an entry")
    return UploadFolder(index, folder, lambda: 64)


def left_after_cleaning(uploads, mark):
    (uploads.folder / MARK).write_bytes(mark)
    uploads.clean()
    return set(os.listdir(uploads.folder))


def test_a_photo_that_was_not_added_completely_is_deleted(uploads):
    assert left_after_cleaning(uploads, os.fsencode(uploads.index.uri) + b"\n") == set()


def test_photos_of_another_index_are_kept(uploads):
    assert left_after_cleaning(uploads, b"/another/index\n") == {NAME, MARK}


@pytest.mark.parametrize("mark", [b"", b"/half/of/the/ind", b"/half/of/a/character/\xc3"])
def test_an_unfinished_mark_is_deleted_and_the_photo_kept(uploads, mark):
    """Nothing is changed before the mark is whole."""
    assert left_after_cleaning(uploads, mark) == {NAME}


@pytest.mark.parametrize("killed", [False, True])
def test_a_query_photo_is_kept_if_a_mark_refers_to_its_file(uploads, killed):
    """As in Milvus, which keeps no copies of photos."""
    (uploads.folder / NAME).unlink()
    file = io.BytesIO()
    texture(1, (30, 20)).save(file, "JPEG")
    entry = next(iter(uploads.index)).id
    for marked in (False, True):
        with uploads.query(Upload("mine.jpg", file.getvalue())) as path:
            assert path.read_bytes() == file.getvalue()
            if marked:
                query = MarkedQuery("query:1", str(path), None, "1")
                mark = Mark("0" * 16, query, entry, True, "Ann", "2026-11-16T12:00:00+00:00")
                uploads.index.store.mark_log.append([mark_line(mark)])
        if killed:
            pending = f".{path.name}.12-34.pending"
            (uploads.folder / pending).write_bytes(os.fsencode(uploads.index.uri) + b"\n")
            uploads.clean()
        assert os.listdir(uploads.folder) == ([path.name] if marked else [])
