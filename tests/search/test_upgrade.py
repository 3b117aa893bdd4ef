"""An index is upgraded to another model while it is used, and rolled back."""

import contextlib
import shutil
import sqlite3
import threading

import pytest
import torch
from PIL import Image

from listwise.descriptors import Model, load_model
from listwise.descriptors.extract import PART
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.search import (
    DamagedIndexError,
    IndexUpgradedError,
    check_index,
    open_index,
    upgrading,
)
from listwise.search.methods import SearchIntent
from listwise.search.milvus import store as milvus
from listwise.search.opening import open_store

PHOTOS = 10


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    """Another model, with other weights and another number of dimensions."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("upgrade") / "new"
    RetrievalNet("test_resnet.r160_in1k", weights="random", pooling="mac").save(folder)
    return folder


@pytest.fixture(scope="module")
def new_model(new_folder):
    return load_model(new_folder, "cpu")


@pytest.fixture(scope="module")
def made(photos, model, new_model, tmp_path_factory):
    """A few photos, an index of them, and the index after an upgrade; leave them as they are."""
    folder = tmp_path_factory.mktemp("made")
    few, shop, upgraded = folder / "few", folder / "shop", folder / "upgraded"
    few.mkdir()
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))[: PHOTOS * 3 : 3]):
        shutil.copy(path, few / f"{number}.jpg")
    with open_index(shop, model) as index:
        index.add(few, workers=0)
        shutil.copytree(shop, folder / "before")
        index.upgrade(new_model, workers=0)
    shop.rename(upgraded)
    (folder / "before").rename(shop)
    few.rename(folder / "photos")
    return folder


@pytest.fixture
def few(made):
    """A folder of a few photos that a test may change."""
    shutil.copytree(made / "photos", made / "few")
    yield made / "few"
    shutil.rmtree(made / "few")


@pytest.fixture(params=["embedded", "lite", "server"])
def place(request):
    return request.getfixturevalue(f"{request.param}_places")()


@pytest.fixture
def shop(few, made, tmp_path):
    """The folder of an index of the few photos."""
    return shutil.copytree(made / "shop", tmp_path / "shop")


@pytest.fixture
def upgraded(few, made, tmp_path):
    """The same after an upgrade to the new model."""
    return shutil.copytree(made / "upgraded", tmp_path / "shop")


def contents(index):
    """Entries and descriptors by id, and what else is stored with an entry."""
    entries = sorted(index, key=lambda entry: entry.id)
    keys = [entry.key for entry in entries]
    rows = index.store.vectors(keys)
    small, local = (index.store.contents(kind, keys) for kind in ("thumbnail", "local"))
    return {
        entry.id: (entry, row.round(4).tolist(), small.get(entry.key), local.get(entry.key))
        for entry, row in zip(entries, rows, strict=True)
    }


def built(place, model, photos):
    """What an index of these photos has that was built with a model."""
    with open_index(place, model) as index:
        index.add(photos, workers=0)
        return contents(index)


def rows_of(found):
    return {name: values[1] for name, values in found.items()}


def test_every_engine_upgrades_and_rolls_back(place, few, model, new_model, tmp_path):
    wanted = rows_of(built(tmp_path / "wanted", new_model, few))
    table = tmp_path / "photos.csv"
    table.write_text("path,color\n" + "".join(f"{few}/{n}.jpg,c{n}\n" for n in range(PHOTOS)))
    with open_index(place, model) as index:
        index.add(table, workers=0)
        before = contents(index)
        names = sorted(before)
        notes = []
        done = index.upgrade(new_model, workers=0, on_note=notes.append)
        assert (done.entries, done.described, done.skipped) == (PHOTOS, PHOTOS, [])
        assert f"{PHOTOS} entries to describe" in notes[0]
        after = contents(index)
        assert rows_of(after) == {name: wanted[name.rpartition("/")[2]] for name in names}
        # Attributes, thumbnails and everything else stay.
        assert [after[n][0] for n in names] == [before[n][0] for n in names]
        assert [after[n][2:] for n in names] == [before[n][2:] for n in names]
        assert index.header.model == new_model.fingerprint
        assert index.search(few / "3.jpg", k=1)[0].id == names[3]
        assert index.info()["generations"] == {"current": 1, "previous": 0, "building": None}
        # Photos that are added or removed now are so after a rollback too.
        index.remove([names[0]])
        Image.new("RGB", (64, 48), "red").save(few / "red.jpg")
        index.add(few / "red.jpg", workers=0)
        assert index.rollback(workers=0).described == 1
        assert index.header.model == model.fingerprint
        found = contents(index)
        assert len(found) == PHOTOS
        assert {name: found[name] for name in names[1:]} == {n: before[n] for n in names[1:]}
        assert names[0] not in found
        assert index.search(few / "red.jpg", k=1)[0].score > 0.999
        # And forward again: nothing has to be described.
        assert index.upgrade(new_model).described == 0
        assert index.header.model == new_model.fingerprint
        index.discard_earlier()
        with pytest.raises(InputError, match="no earlier generation"):
            index.rollback()
    with open_index(place, create=False, device="cpu") as index:
        assert index.header.model == new_model.fingerprint
        assert len(index) == PHOTOS
        assert index.check().ok
        # The place of generation 0 is used no more, and the next upgrade does not need it.
        assert index.upgrade(model, workers=0).generation == 2
        assert index.search(few / "3.jpg", k=1)[0].id == names[3]


def test_another_process_notices_at_its_next_change(shop, few, new_model):
    with open_index(shop, device="cpu") as other, open_index(shop) as index:
        stale = other.store
        index.upgrade(new_model, workers=0)
        assert other.header.model != new_model.fingerprint
        with pytest.raises(IndexUpgradedError, match="upgraded or rolled back"):
            stale.remove([next(iter(stale)).key])
        assert len(stale) == PHOTOS
        Image.new("RGB", (64, 48), "red").save(few / "red.jpg")
        assert len(other.add(few / "red.jpg", workers=0).added) == 1
        assert other.header.model == new_model.fingerprint
        index.rollback(workers=0)
        other.refresh()
        assert other.header.model == index.header.model
        assert other.remove(few / "red.jpg") == 1
        assert len(index) == PHOTOS


def test_changes_during_an_upgrade_are_in_both(shop, few, model, new_model, monkeypatch, tmp_path):
    described, original = [], upgrading._Copy._put

    def put(self, entries, descriptors):
        """After the first part, somebody adds a photo, replaces one, and removes one."""
        original(self, entries, descriptors)
        if not described:
            Image.new("RGB", (64, 48), "red").save(few / "red.jpg")
            Image.new("RGB", (64, 48), "blue").save(few / "3.jpg")
            with open_index(shop, model) as other:
                other.add(few, workers=0)
                other.remove(["0.jpg", "9.jpg"])
                other.add_local_features(workers=0)
        described.extend(entry.id for entry in entries)

    monkeypatch.setattr(upgrading._Copy, "_put", put)
    monkeypatch.setitem(PART, "cpu", 4)
    with open_index(shop, model) as index:
        done = index.upgrade(new_model, workers=0)
        assert done.entries == PHOTOS - 1
        after = contents(index)
    (few / "0.jpg").unlink()
    (few / "9.jpg").unlink()
    with open_index(tmp_path / "wanted", new_model) as wanted:
        wanted.add(few, local=True, workers=0)
        assert contents(wanted) == after


def test_photos_that_are_gone_are_refused_or_left_out(shop, few, new_model):
    (few / "2.jpg").unlink()
    with open_index(shop) as index:
        with pytest.raises(InputError, match=r"1 of the 10 photos .*2\.jpg.*`skip_missing`"):
            index.upgrade(new_model, workers=0)
        shutil.copy(few / "3.jpg", few / "2.jpg")  # other content
        with pytest.raises(InputError, match=r"1 photos .*has changed.*`skip_missing`"):
            index.upgrade(new_model, workers=0)
        assert index.header.model != new_model.fingerprint
        done = index.upgrade(new_model, skip_missing=True, workers=0)
        assert (done.entries, done.described) == (PHOTOS - 1, 0)  # the work before was kept
        assert [line.split(":")[0] for line in done.skipped] == ["2.jpg"]
        # They are only left out of the new generation.
        assert index.rollback().entries == PHOTOS
        assert index.entry("2.jpg").path == str(few / "2.jpg")


@pytest.fixture(scope="module")
def third(tmp_path_factory):
    """The folder of a third model."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("third") / "model"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(folder)
    return folder


def test_a_refused_upgrade_keeps_the_earlier_generation(
    upgraded, few, third, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(upgraded)
    with open_index(upgraded) as index:
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
            with pytest.raises(InputError, match=r"needs .* 100 bytes are free: .* index discard"):
                index.upgrade(third, workers=0)
        (few / "2.jpg").rename(tmp_path / "away.jpg")
        with pytest.raises(InputError, match="do not exist any more"):
            index.upgrade(third, workers=0)
        assert index.rollback().entries == PHOTOS


def test_a_discard_waits_for_a_removal(upgraded, monkeypatch):
    """A removal also changes the earlier generation."""
    with open_index(upgraded) as index, open_index(upgraded) as other:
        discard, seen = threading.Thread(target=index.discard_earlier), []
        generations = other.store.generations
        original = generations.open

        def open_generation(number, aside):
            discard.start()
            discard.join(0.5)
            seen.append(generations.record().previous)
            return original(number, aside=aside)

        monkeypatch.setattr(generations, "open", open_generation)
        assert other.remove("2.jpg") == 1
        discard.join()
        assert seen == [0]
        assert index.info()["generations"]["previous"] is None


def test_an_upgrade_to_another_model_replaces_an_unfinished_one(
    shop, few, new_model, third, tmp_path
):
    (few / "2.jpg").rename(tmp_path / "away.jpg")
    with open_index(shop) as index:
        with pytest.raises(InputError, match="do not exist any more"):
            index.upgrade(new_model, workers=0)
        with pytest.raises(InputError, match="do not exist any more"):
            index.upgrade(third, workers=0)
        assert index.info()["generations"]["building"] == 1  # it is kept
        (tmp_path / "away.jpg").rename(few / "2.jpg")
        notes = []
        assert index.upgrade(third, workers=0, on_note=notes.append).generation == 2
        assert "discarding an unfinished upgrade" in notes[0]
        assert not list(shop.glob("*-1[-.]*"))
        # An upgrade to the model that the index has is done already.
        assert index.upgrade(third).described == 0


def test_the_limits_of_search_are_kept(shop, new_model):
    with open_index(shop) as index:
        assert index.info()["recall"] is None
        index.tune(SearchIntent(recall=1))
        index.upgrade(new_model, workers=0)
        assert index.info()["recall"] == 1  # measured again
        assert index.info()["intent"]["recall"] == 1


def test_a_model_must_be_saved(shop, new_folder):
    net = load_model(new_folder, "cpu").net
    with open_index(shop) as index, pytest.raises(InputError, match="save the model first"):
        index.upgrade(Model(net))


def test_rollback_needs_the_earlier_model(few, new_folder, model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "model")
    with open_index(tmp_path / "shop", tmp_path / "model", device="cpu") as index:
        index.add(few, workers=0)
        index.upgrade(new_folder, workers=0)
        (tmp_path / "model").rename(tmp_path / "moved")
        with pytest.raises(InputError, match=r"no model at .*as `model`"):
            index.rollback()
        assert index.info()["generations"]["current"] == 1
        assert index.rollback(tmp_path / "moved").entries == PHOTOS
        assert index.search(few / "3.jpg", k=1)[0].id == "3.jpg"


def test_a_rollback_describes_no_photo_with_a_student(upgraded, model):
    with open_index(upgraded) as index:
        net = RetrievalNet("test_resnet.r160_in1k", weights="random").eval()
        net.config = net.config.model_copy(update={"teacher": model.fingerprint})
        with pytest.raises(InputError, match="holds descriptors of the model"):
            index.rollback(Model(net))
        assert index.rollback().entries == PHOTOS


def test_changes_in_milvus_wait_for_a_switch(lite_places, few, model, new_model, monkeypatch):
    """Milvus has no lock: a pause is marked in the record, and a killed process may leave one."""
    monkeypatch.setattr(milvus, "_PAUSE", 0.2)
    monkeypatch.setattr(milvus, "_POLL", 0.01)
    with open_index(lite_places(), model) as index:
        index.add(few / "0.jpg", workers=0)
        generations = index.store.generations
        left = generations.record().model_copy(update={"paused": "a killed process"})
        generations.save_record(left)
        assert len(index.add(few / "1.jpg", workers=0).added) == 1  # after a while
        assert generations.record().paused == ""

        # Somebody else ends the pause of an upgrade that takes too long: it does not switch.
        with generations.pausing():
            generations.save_record(left.model_copy(update={"paused": ""}))
            with pytest.raises(InputError, match="ended the pause"):
                generations.switch(1)

        # A switch while a change is written: the change is made again, in the new generation.
        upsert, stale = index.store.connection.call, index.store

        def call(method, **arguments):
            found = upsert(method, **arguments)
            if method == "upsert":
                monkeypatch.setattr(stale.connection, "call", upsert)
                with open_index(stale.uri, device="cpu") as other:
                    other.upgrade(new_model, workers=0)
            return found

        monkeypatch.setattr(stale.connection, "call", call)
        assert index.add(few / "2.jpg", workers=0).errors == []
        assert index.header.model == new_model.fingerprint
        assert len(index) == 3


def test_two_upgrades_at_one_time_are_refused(shop, new_model):
    with open_index(shop) as index, open_store(shop) as other, other.generations.upgrading():
        with pytest.raises(InputError, match="another process upgrades"):
            index.upgrade(new_model, workers=0)
        with pytest.raises(InputError, match="another process upgrades"):
            index.rollback()


def change_setting(database, name):
    """As if a byte of a setting had changed."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        query = "UPDATE settings SET value = replace(value, '0', '1') WHERE name = ?"
        assert connection.execute(query, (name,)).rowcount == 1


def test_a_damaged_record_is_refused(upgraded):
    change_setting(upgraded / "index.sqlite", "record")
    with pytest.raises(DamagedIndexError, match=r"its setting record changed"):
        open_index(upgraded)
    with pytest.raises(DamagedIndexError, match="its setting record changed"):
        check_index(upgraded, repair=True)


def test_a_damaged_earlier_generation_can_be_discarded(upgraded):
    with open_index(upgraded) as index:
        change_setting(upgraded / "entries-0.sqlite", "rows")
        for change in (index.rollback, lambda: index.remove("2.jpg")):
            with pytest.raises(DamagedIndexError, match=r"earlier .* index discard"):
                change()
        assert len(index) == PHOTOS
        index.discard_earlier()
        assert index.remove("2.jpg") == 1
