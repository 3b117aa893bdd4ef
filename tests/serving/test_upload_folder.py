"""The folder of added photos after a server was killed."""

import os

import pytest

from listwise.serving.upload_folder import UploadFolder

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
