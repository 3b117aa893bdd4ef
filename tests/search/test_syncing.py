"""An index follows the folders of its photos."""

import shutil
import sys
import threading
from contextlib import closing

import pytest
from index_examples import texture

from listwise.errors import InputError
from listwise.search import Index
from listwise.search.filling import Added
from listwise.search.opening import create_store, header_of
from listwise.search.syncing import Synced, watch_folders


@pytest.fixture(params=["embedded", "lite"])
def index(request, model):
    place = request.getfixturevalue(f"{request.param}_places")()
    with create_store(place, header_of(model)) as store:
        yield Index(store, model)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos" / "new").mkdir(parents=True)
    for number in range(6):
        texture(number, (64, 48)).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


def add(index, *sources):
    return index.add(list(sources), workers=0, progress=False)


def sync(index, *folders, **options):
    found = index.sync(list(folders) or None, workers=0, progress=False, **options)
    return {name: names for name, names in vars(found).items() if names}


def names(index):
    return sorted(entry.id for entry in index)


def change(folder):
    """Add, change, move, copy and delete a photo."""
    texture(10, (64, 48)).save(folder / "new" / "10.png")
    texture(11, (64, 48)).save(folder / "1.png")
    (folder / "2.png").rename(folder / "new" / "moved.png")
    shutil.copy(folder / "3.png", folder / "copy.png")
    (folder / "4.png").unlink()


def test_all_changes_of_a_folder_are_followed(index, folder):
    add(index, folder)
    index.label("2.png", "tower")
    before = index.store.vectors([index.entry("2.png").key])
    change(folder)
    expected = {
        "added": ["new/10.png"],
        "replaced": ["1.png"],
        "moved": [("2.png", "new/moved.png")],
        "unchanged": ["0.png", "3.png", "5.png"],
        "copies": [(str(folder / "copy.png"), "3.png")],
    }
    known = list(index)
    assert sync(index, dry_run=True, prune=True) == expected | {"removed": ["4.png"]}
    assert list(index) == known
    assert sync(index) == expected | {"missing": ["4.png"]}
    assert "4.png" in names(index)
    settled = sync(index, prune=True)
    assert settled.pop("removed") == ["4.png"]
    assert settled == sync(index, prune=True)
    assert names(index) == ["0.png", "1.png", "3.png", "5.png", "new/10.png", "new/moved.png"]
    moved = index.entry("new/moved.png")
    assert moved.attributes == {"label": "tower"}
    assert (index.store.vectors([moved.key]) == before).all()
    assert index.entry("3.png").copies == (str(folder / "copy.png"),)
    assert all(index.store.thumbnail(entry.key) for entry in index)
    assert index.check(photos=True).ok


def test_an_empty_folder_that_was_never_added_is_an_error(index, folder, tmp_path):
    add(index, folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no photo in this folder"):
        sync(index, tmp_path / "empty")


def test_only_photos_below_the_folders_are_removed(index, folder, tmp_path):
    other = tmp_path / "photos2"
    shutil.copytree(folder, other / "deep")
    for path in other.glob("deep/*.png"):
        texture(100 + int(path.stem), (64, 48)).save(path)
    add(index, folder, other, other / "deep" / "5.png")
    (folder / "0.png").unlink()
    (other / "deep" / "0.png").unlink()
    assert sync(index, folder, prune=True)["removed"] == ["0.png"]
    assert sync(index, dry_run=True)["missing"] == ["deep/0.png"]
    assert sync(index, prune=True)["removed"] == ["deep/0.png"]


def test_an_entry_whose_file_is_gone_continues_with_a_copy(index, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "backup")
    add(index, folder, tmp_path / "backup")
    (folder / "0.png").unlink()
    shutil.copy(folder / "1.png", folder / "2.png")  # what 2.png was is only in the backup
    found = sync(index, folder, prune=True)
    assert "removed" not in found
    copies = {name: str(tmp_path / "backup" / name) for name in ("0.png", "2.png")}
    assert found["moved"] == list(copies.items())
    assert all(index.entry(path).path == path for path in copies.values())
    assert index.check(photos=True).ok
    texture(10, (64, 48)).save(folder / "0.png")  # the earlier name is free
    assert sync(index, folder)["added"] == ["0.png"]
    assert sync(index, tmp_path / "backup")["unchanged"]
    assert len(index) == 7


def test_a_folder_that_cannot_be_read_removes_nothing(index, folder, tmp_path):
    with pytest.raises(InputError, match=r"no folder was added to .*`folders`"):
        index.sync()
    add(index, folder)
    folder.rename(tmp_path / "elsewhere")
    for given in (None, folder):
        with pytest.raises(InputError, match="no such folder; nothing was changed"):
            index.sync(given, prune=True)
    folder.mkdir()
    found = sync(index, prune=True)
    assert found["missing"] == names(index)
    assert "no photo in this folder" in found["errors"][0]
    assert len(index) == 6
    folder.rmdir()
    # Its photos have moved: the former folder is not followed any more.
    assert len(sync(index, tmp_path / "elsewhere")["moved"]) == 6
    assert len(sync(index, prune=True)["unchanged"]) == 6


@pytest.mark.parametrize("emptied", [False, True])
def test_a_folder_that_is_gone_does_not_block_the_others(index, folder, tmp_path, emptied):
    other = tmp_path / "other"
    other.mkdir()
    for number in (20, 21):
        texture(number, (64, 48)).save(other / f"{number}.png")
    add(index, folder, other)
    shutil.rmtree(other)
    if emptied:
        other.mkdir()
    texture(30, (64, 48)).save(folder / "new.png")
    for given in ([], [folder, other]):
        found = sync(index, *given, prune=True, dry_run=True)
        assert (found["added"], found["missing"]) == (["new.png"], ["20.png", "21.png"])
    found = sync(index, prune=True)
    assert found["added"] == ["new.png"]
    (line,) = found["errors"]
    assert line.startswith(f"{other}: no ")
    assert "nothing was changed; if photos were deleted, give their ids to" in line
    assert len(index) == 9
    assert index.remove(found["missing"]) == 2
    shutil.rmtree(other, ignore_errors=True)
    assert "errors" not in sync(index, prune=True)


@pytest.mark.parametrize("part", ["", "disk"])
@pytest.mark.parametrize("stray", [False, True])
def test_a_disk_that_is_not_connected_removes_nothing(index, folder, tmp_path, part, stray):
    disk = folder / part
    if part:
        (tmp_path / "disk").mkdir()
        for number in range(20, 23):
            texture(number, (64, 48)).save(tmp_path / "disk" / f"{number}.png")
        disk.symlink_to(tmp_path / "disk")
    add(index, folder)
    known = names(index)
    disk.resolve().rename(tmp_path / "away")  # of a part, the link is left
    (folder / "new").mkdir(parents=True, exist_ok=True)
    if stray or not part:
        disk.resolve().mkdir(exist_ok=True)
        texture(40, (64, 48)).save(disk / "stray.png")
    for dry_run in (True, False):
        found = sync(index, prune=True, dry_run=dry_run)
        (line,) = found["errors"]
        assert line.startswith(f"{disk}: {3 if part else 6} photos are missing and ")
        assert "removed" not in found
    assert set(known) <= set(names(index))
    assert index.remove(found["missing"]) == (3 if part else 6)
    assert "errors" not in sync(index, prune=True)


def test_the_photos_of_a_deleted_folder_are_removed(index, folder):
    (folder / "class").mkdir()
    for number in range(20, 23):
        texture(number, (64, 48)).save(folder / "class" / f"{number}.png")
    add(index, folder)
    known = names(index)
    shutil.rmtree(folder / "class")
    found = sync(index, prune=True)
    assert "errors" not in found
    assert sorted(found["removed"]) == [f"class/{number}.png" for number in range(20, 23)]
    assert len(names(index)) == len(known) - 3


def test_a_changed_photo_keeps_the_id_that_its_file_has(index, folder):
    add(index, folder / "0.png", folder)
    index.label(str(folder / "0.png"), "tower")
    texture(10, (64, 48)).save(folder / "0.png")
    assert sync(index)["replaced"] == [str(folder / "0.png")]
    assert len(index) == 6
    assert index.entry(str(folder / "0.png")).attributes == {"label": "tower"}


def test_two_processes_change_the_header(index, folder, tmp_path):
    (tmp_path / "other").mkdir()
    texture(20, (64, 48)).save(tmp_path / "other" / "20.png")
    add(index, folder)
    with closing(index.store.generations.open(index.store.generation)) as second:
        index.store.change_header(folders=(str(folder), str(tmp_path / "other")))
        second.change_header(model_name="other")
        assert second.header.folders == (str(folder), str(tmp_path / "other"))


def test_only_the_given_photos_are_read(index, folder):
    add(index, folder)
    texture(20, (64, 48)).save(folder / "0.png")
    texture(21, (64, 48)).save(folder / "1.png")
    assert sync(index, only={str(folder / "1.png")}) == {"replaced": ["1.png"]}
    assert sync(index, only=set()) == {}
    assert sync(index)["replaced"] == ["0.png"]


@pytest.mark.parametrize("step", ["put", "remove"])
def test_a_kill_during_a_sync_is_resumed(index, folder, monkeypatch, step):
    add(index, folder)
    index.label("2.png", "tower")
    change(folder)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(index.store), step, killed)
        with pytest.raises(KeyboardInterrupt):
            sync(index, prune=True)
    sync(index, prune=True)
    assert names(index) == ["0.png", "1.png", "3.png", "5.png", "new/10.png", "new/moved.png"]
    assert index.entry("new/moved.png").attributes == {"label": "tower"}


def test_an_upgrade_remembers_folders_and_copies(index, folder, tmp_path):
    from listwise.descriptors import load_model
    from listwise.models import RetrievalNet

    shutil.copy(folder / "3.png", folder / "copy.png")
    add(index, folder)
    RetrievalNet("test_resnet.r160_in1k", projection=8, weights="random").save(tmp_path / "other")
    index.upgrade(load_model(tmp_path / "other", "cpu"), workers=0, progress=False)
    assert index.header.folders == (str(folder),)
    assert index.entry("3.png").copies == (str(folder / "copy.png"),)


def test_changes_of_folders_are_watched(folder):
    pytest.importorskip("watchdog")
    batches = watch_folders([str(folder)])
    assert next(batches) is None
    threading.Timer(0.2, change, [folder]).start()
    seen = set()
    wanted = {"1.png", "2.png", "4.png", "copy.png", "new/10.png", "new/moved.png"}
    while not seen.issuperset(str(folder / name) for name in wanted):
        seen |= next(batches)
    assert str(folder / "0.png") not in seen
    batches.close()


def test_watching_names_the_missing_extra(folder, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "watchdog"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "watchdog", None)
    with pytest.raises(InputError, match=r"watchdog: pip install 'listwise\[watch\]'"):
        next(watch_folders([str(folder)]))


def test_changed_tells_whether_there_is_news():
    assert not Synced(unchanged=["a"]).changed
    assert Synced(missing=["a"]).changed
    assert {*vars(Added())} < {*vars(Synced())}
