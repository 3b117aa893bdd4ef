"""Disturbs one operation at each of its writes in turn, then repeats it and compares the results.

It needs a process with crash_point.c preloaded. Faults, at one of the calls that change files:
    kill      the process is killed
    full      the disk is full from there on, and has space again afterwards
    readonly  the file system is read-only from there on, and can be written to again afterwards
    denied    the permission to write is lost, and granted again afterwards
    power     the process is killed, and only what was synchronized with the disk is left
    clock     the clock goes back by an hour: while the operation runs, and again between a kill at
              that call and the repetition
Each step runs in a forked process, so that the imports are paid for once.
"""

import ctypes
import errno
import functools
import hashlib
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401
import torch
import torch.fx.experimental.symbolic_shapes  # a backward pass imports it
import torch.utils.tensorboard
from starlette.testclient import TestClient

import listwise
import listwise.search.filling
import listwise.search.folder.table
import listwise.search.upgrading
from listwise.data import read_images
from listwise.descriptors import Model, Whitening, extract, learn_whitening, load_model
from listwise.descriptors.storage import DescriptorFile
from listwise.errors import InputError
from listwise.evaluation import Gain
from listwise.models import RetrievalNet
from listwise.search import SearchIntent, open_index
from listwise.search.opening import store_exists
from listwise.serving.app import create_app
from listwise.serving.server import ServeSettings
from listwise.training import resume

MODEL = "test_resnet.r160_in1k"
ERRORS = {"full": errno.ENOSPC, "readonly": errno.EROFS, "denied": errno.EACCES}
HOUR = 3600


def sha(data: np.ndarray | bytes) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.tobytes()).hexdigest()


class Row:
    """A descriptor of an index, equal up to rounding.

    The last digits depend on which photos were encoded together, and a killed command has encoded
    some of them before.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values = np.array(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and np.allclose(self.values, other.values, rtol=0, atol=1e-5)

    def __hash__(self) -> int:
        return 0


def rows_of(index: listwise.search.Index) -> dict[str, Row]:
    """The descriptors of an index by the ids of their entries."""
    entries = list(index)
    rows = index.store.vectors([entry.key for entry in entries])
    assert len(index) == len({entry.id for entry in entries}) == len(rows)
    return {entry.id: Row(row) for entry, row in zip(entries, rows, strict=True)}


def names(folder: Path) -> list[str]:
    """Files below a folder, whose number and names must not grow with crashes."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    RetrievalNet(MODEL, weights="random").save(folder)


@functools.cache
def loaded(folder: Path) -> Model:
    """A model that no operation changes, loaded once by each process."""
    return load_model(folder, "cpu")


def model_in(folder: Path) -> Any:
    """Everything that a model folder holds: weights and whitening by their values, and settings."""
    info, weights, whitening = load_model(folder, "cpu").content()
    state = {name: sha(value.numpy()) for name, value in weights.items()}
    return info.model_dump(), state, whitening and [(part.shape, sha(part)) for part in whitening]


class IndexOperation:
    """What is done to an index of photos; the model lies beside it."""

    first = 0  # photos that the index has before

    def __init__(self, work: Path, photos: Path) -> None:
        self.index, self.model = work / "shop", work / "model"
        self.photos = sorted(map(str, photos.rglob("*.jpg")))[:9]

    def prepare(self) -> None:
        save_model(self.model)
        if self.first:
            with open_index(self.index, loaded(self.model)) as index:
                index.add(self.photos[: self.first], workers=0)

    def run(self) -> None:
        listwise.search.filling.COMMITTED["cpu"] = 4  # several commits
        with open_index(self.index, loaded(self.model)) as index:
            index.add(self.photos, workers=0)

    def observe(self) -> Any:
        with open_index(self.index, loaded(self.model)) as index:
            entries = {entry.id: [entry.digest, entry.width, entry.path] for entry in index}
            found = [hit.id for hit in index.search(self.photos[0], k=3)]
            return {"entries": entries, "vectors": rows_of(index), "found": found}

    def check_interrupted(self, expected: Any) -> None:
        """After a crash, every entry that is there is whole."""
        if store_exists(str(self.index)):
            with open_index(self.index, loaded(self.model)) as index:
                for name, row in rows_of(index).items():
                    assert expected["vectors"].get(name, row) == row, f"{name} is damaged"
                if len(index):
                    index.search(self.photos[0], k=3)


class Build(IndexOperation):
    """`listwise index build`."""


class Add(IndexOperation):
    """`listwise index add` to an index that has some of the photos."""

    first = 4


class Remove(IndexOperation):
    """`listwise index remove`."""

    first = 9

    def run(self) -> None:
        with open_index(self.index) as index:
            present = {entry.path for entry in index}
            index.remove([path for path in self.photos[:3] if path in present])

    def observe(self) -> Any:
        with open_index(self.index, loaded(self.model)) as index:
            return {"vectors": rows_of(index)}


class Tidy(IndexOperation):
    """Photos added and removed one by one; the descriptors in use are copied to another file."""

    first = 2

    def run(self) -> None:
        listwise.search.folder.table._SLACK = 0
        with open_index(self.index, loaded(self.model)) as index:
            for path in self.photos[:4]:
                index.add(path, workers=0)
            index.remove(self.photos[0])
            index.remove([entry.id for entry in index if entry.path != self.photos[1]])


class Limits(IndexOperation):
    """`listwise index limits` with a memory budget, and back."""

    first = 9

    def run(self) -> None:
        with open_index(self.index) as index:
            index.tune(SearchIntent(memory=1))


class Local(IndexOperation):
    """`listwise index local`, in several commits."""

    first = 9

    def run(self) -> None:
        listwise.search.filling.LOCAL_PART = 4
        with open_index(self.index) as index:
            index.add_local_features(workers=0)

    def observe(self) -> Any:
        with open_index(self.index) as index:
            names = {entry.key: entry.id for entry in index}
            codes = index.store.contents("local", list(names))
        return super().observe() | {"local": {names[key]: sha(codes[key]) for key in names}}

    def check_interrupted(self, expected: Any) -> None:
        """The local features that are there are whole."""
        super().check_interrupted(expected)
        with open_index(self.index) as index:
            for entry in index:
                for code in index.store.contents("local", [entry.key]).values():
                    assert sha(code) == expected["local"][entry.id], f"{entry.id} is damaged"


class Upgrade(IndexOperation):
    """`listwise index upgrade`, in several commits, then `rollback` and `upgrade` again."""

    first = 9

    def __init__(self, work: Path, photos: Path) -> None:
        super().__init__(work, photos)
        self.new = work / "new"

    def prepare(self) -> None:
        super().prepare()
        torch.manual_seed(1)
        RetrievalNet(MODEL, weights="random", pooling="mac").save(self.new)

    def run(self) -> None:
        listwise.search.filling.COMMITTED["cpu"] = 4
        new = loaded(self.new)
        with open_index(self.index, device="cpu") as index:
            index.upgrade(new, workers=0)
            if index.info()["generations"]["previous"] is not None:
                index.rollback(workers=0)
                index.upgrade(new, workers=0)
            index.discard_earlier()

    def observe(self) -> Any:
        with open_index(self.index, loaded(self.new)) as index:
            found = [hit.id for hit in index.search(self.photos[0], k=3)]
            assert index.info()["generations"] == {"current": 1, "previous": None, "building": None}
            assert not list(self.index.glob("entries-0*"))
            return {"vectors": rows_of(index), "found": found}

    def check_interrupted(self, expected: Any) -> None:
        """All entries are there, with the descriptors of one model."""
        new = loaded(self.new)
        with open_index(self.index, device="cpu") as index:
            vectors = rows_of(index)
            assert vectors.keys() == expected["vectors"].keys()
            upgraded = index.header.model == new.fingerprint
            same = [vectors[name] == row for name, row in expected["vectors"].items()]
            assert all(same) if upgraded else not any(same)
            index.search(self.photos[0], k=3)


class Mark(IndexOperation):
    """Marks of a photo that is not an entry, one of them undone, and a label."""

    first = 3

    def __init__(self, work: Path, photos: Path) -> None:
        super().__init__(work, photos)
        self.notes = work.parent / "notes"  # marks that were stored; outlives the process

    def run(self) -> None:
        self.notes.write_text("")
        with open_index(self.index) as index:
            one, two, three = sorted(entry.id for entry in index)
            made = index.marks.add(self.photos[5], same=[one, two], by="ann")
            self._note(made)
            (wrong,) = index.marks.add(self.photos[5], different=three, by="ann")
            self._note([wrong])
            active = [mark.id for mark in index.marks.read() if mark.entry == three]
            index.marks.undo(active)
            index.label([one, two], "tower")

    def _note(self, marks: Any) -> None:
        with self.notes.open("a") as file:
            file.write("".join(f"{mark.id}\n" for mark in marks))

    def observe(self) -> Any:
        with open_index(self.index) as index:
            marks = [
                (mark.query.digest, mark.entry, mark.same, mark.by) for mark in index.marks.read()
            ]
            labels = {entry.id: dict(entry.attributes) for entry in index}
        return {"marks": marks, "labels": labels, "photos": names(self.index / "queries")}

    def check_interrupted(self, expected: Any) -> None:
        """What was stored is in the log, and everything in the log can be read."""
        with open_index(self.index) as index:
            known = {mark.id for mark in index.marks.read().history}
            assert set(self.notes.read_text().split()) <= known
            assert not index.marks.read().missing
            assert index.check().ok


class Serve(IndexOperation):
    """`listwise serve`, while a client adds two photos and removes the first of them."""

    first = 2

    def __init__(self, work: Path, photos: Path) -> None:
        super().__init__(work, photos)
        self.uploads = self.index / "uploads"
        self.notes = work.parent / "notes"  # what the client knows; outlives the server

    def run(self) -> None:
        self.notes.write_text("")
        settings = ServeSettings(token="token", uploads=self.uploads)
        headers = {"Authorization": "Bearer token"}
        with open_index(self.index, loaded(self.model)) as index:
            app = create_app(index, settings)
            with TestClient(app, "http://127.0.0.1", headers=headers) as client:
                keys = [self._send(client, photo) for photo in self.photos[4:6]]
                self._note(f"removing {keys[0]}")
                self._body(client.delete(f"/api/entries/{keys[0]}"))
                self._note(f"removed {keys[0]}")

    def _send(self, client: TestClient, photo: str) -> str:
        files = {"photos": Path(photo).read_bytes()}
        body = self._body(client.post("/api/entries", files=files))
        (key,) = [*body["added"], *body["unchanged"]]
        self._note(f"added {key}")
        return key

    def _body(self, answer: Any) -> Any:
        if answer.status_code != 200:
            raise OSError(answer.text)
        return answer.json()

    def _note(self, line: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{line}\n")

    def observe(self) -> Any:
        return super().observe() | {"uploads": names(self.uploads)}

    def check_interrupted(self, expected: Any) -> None:
        """What was answered is in the index, and every entry has its photo."""
        super().check_interrupted(expected)
        with open_index(self.index) as index:
            keys = {str(entry.key) for entry in index}
            for entry in index:
                assert Path(entry.path).exists(), f"{entry.path} is lost"
        known: dict[str, set[str]] = {"added": set(), "removing": set(), "removed": set()}
        for line in self.notes.read_text().splitlines():
            what, key = line.split()
            known[what].add(key)
        assert known["added"] - known["removing"] <= keys
        assert not known["removed"] & keys


class Extract:
    """`listwise extract`."""

    def __init__(self, work: Path, photos: Path) -> None:
        self.work, self.photos = work, photos
        self.model, self.file = work / "model", work / "descriptors.parquet"

    def prepare(self) -> None:
        save_model(self.model)

    def run(self) -> None:
        images = read_images(self.photos)
        extract(load_model(self.model, "cpu"), images, self.file, workers=0)

    def observe(self) -> Any:
        file = DescriptorFile.open(self.file)
        return {"ids": list(file.ids), "rows": sha(file.read()), "files": names(self.work)}

    def check_interrupted(self, expected: Any) -> None:
        """A file under the final name is whole."""
        if self.file.exists():
            assert sha(DescriptorFile.open(self.file).read()) == expected["rows"]


class Whiten(Extract):
    """`listwise whiten` of a whitened and calibrated model; a copy of it lies beside it."""

    def __init__(self, work: Path, photos: Path) -> None:
        super().__init__(work, photos)
        self.old = work / "old"

    def prepare(self) -> None:
        super().prepare()
        model = load_model(self.model, "cpu")
        rows = model.encode(sorted(self.photos.rglob("*.jpg")), workers=0)
        model = replace(model, whitening=Whitening.learn([rows], dim=2))
        model.calibrate(self.photos, workers=0).save(self.model)
        shutil.copytree(self.model, self.old)

    def run(self) -> None:
        learn_whitening(self.model, self.photos, dim=4, device="cpu")

    def observe(self) -> Any:
        assert model_in(self.model) != model_in(self.old)
        return {"model": model_in(self.model), "files": names(self.work)}

    def check_interrupted(self, expected: Any) -> None:
        """The model is exactly the old one or the new one."""
        assert model_in(self.model) in (model_in(self.old), expected["model"])


class Tune(Whiten):
    """`listwise tune` of this model, with new scales, GeM power, whitening and query expansion."""

    def run(self) -> None:
        if model_in(self.model) != model_in(self.old):
            return  # the killed command had finished; tuning starts from the model as it is
        Gain.clear = property(lambda gain: True)  # keep the best value of each setting
        tuning = listwise.tune(self.model, self.photos, device="cpu", workers=0)
        assert [step.taken for step in tuning.steps] == [True] * 4


class Train(Extract):
    """`listwise train`, resumed."""

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        folder = self.work / "run"
        if (folder / "config.yaml").exists():
            resume(folder).fit()
            return
        shutil.rmtree(folder, ignore_errors=True)
        settings = {"crops": {"size": 32}, "batch_size": 12, "val_fraction": 0.25, "workers": 0}
        settings |= {"validate_every": 1, "checkpoint_every": 1, "device": "cpu", "updates": 2}
        listwise.train(self.photos, folder, backbone=MODEL, weights="random", **settings)

    def observe(self) -> Any:
        model = load_model(self.work / "run" / "model", "cpu")
        state = {name: sha(value.numpy()) for name, value in model.net.state_dict().items()}
        files = [name for name in names(self.work) if "tfevents" not in name]
        return {"weights": state, "files": files}

    def check_interrupted(self, expected: Any) -> None:
        """Nothing can be said before the run is resumed."""


MODEL_KINDS = (Extract, Whiten, Tune, Train)
KINDS = (Build, Add, Remove, Tidy, Limits, Local, Upgrade, Mark, Serve, *MODEL_KINDS)
OPERATIONS = {kind.__name__.lower(): kind for kind in KINDS}


def in_child(function: Callable[[], Any], allowed: tuple[type, ...] = ()) -> tuple[int, Any]:
    """Run a function in a forked process: the signal that ended it, and its result.

    An error of the kinds `allowed` is a result: its message.
    """
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            try:
                result: Any = ("result", function())
            except allowed as error:
                result = ("result", f"{type(error).__name__}: {error}")
            except BaseException:
                result = ("error", traceback.format_exc())
            file.write(pickle.dumps(result))
            file.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        file.seek(0)
        data = file.read()
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    kind, value = pickle.loads(data)
    if kind == "error":
        raise AssertionError(value)
    return 0, value


class Shim:
    """What crash_point.c offers, for one folder."""

    def __init__(self, folder: Path) -> None:
        self.library = ctypes.CDLL(None)
        self.folder = os.fsencode(folder)

    def arm(self, at: int, error: int) -> None:
        self.library.crash_arm(self.folder, ctypes.c_long(at), error)

    def set_clock(self, ahead: int, returns: bool = False) -> None:
        self.library.crash_clock(ctypes.c_long(ahead), int(returns))

    def keep_disk(self, disk: Path) -> None:
        self.library.crash_disk(os.fsencode(disk))

    def put_clock_back(self) -> None:
        self.arm(-1, 0)
        self.library.crash_clock_back()

    def calls(self) -> int:
        return int(self.library.crash_calls())


def prepared(operation: Any, ahead: int, folder: Path, bases: dict[Any, Path]) -> Path:
    """What an operation starts with, made once for all operations that start with the same."""
    work, same = folder / "work", (type(operation).prepare, getattr(operation, "first", 0), ahead)
    if same not in bases:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        in_child(operation.prepare)
        bases[same] = work.rename(folder / f"base{len(bases)}")
    return bases[same]


def main(
    name: str, folder: Path, photos: str, wanted: int, fault: str, bases: dict[Any, Path]
) -> dict[str, Any]:
    """Disturb an operation at `wanted` of its points, evenly spread (all if it is 0).

    Returns the number of calls that change files, the points tried, and what went wrong.
    """
    work = folder / "work"
    shim, error = Shim(work), ERRORS.get(fault, 0)
    ahead = HOUR if fault == "clock" else 0
    operation = OPERATIONS[name](work, Path(photos))
    shim.set_clock(ahead)
    disk = folder / "disk"
    base = prepared(operation, ahead, folder, bases)

    def restore() -> None:
        for place in (work, disk) if fault == "power" else (work,):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(base, place)

    def run(at: int, clock_returns: bool = False) -> int:
        shim.arm(at, error)
        if fault == "power":
            shim.keep_disk(disk)
        shim.set_clock(ahead, clock_returns)
        started = time.time()
        operation.run()
        assert (time.time() < started) == clock_returns, "the clock is not as it should be"
        return shim.calls()

    def lose_power() -> None:
        if fault == "power":
            shutil.rmtree(work)
            disk.rename(work)

    def run_undisturbed() -> tuple[int, Any]:
        return run(-1), operation.observe()

    def repeat() -> None:
        operation.check_interrupted(expected)
        operation.run()
        assert_same()

    def disturb(point: int, clock_returns: bool) -> bool:
        """Whether the operation was disturbed at the point; then it is repeated without."""
        restore()
        shim.set_clock(ahead)
        # What the command line reports in one line.
        allowed = () if clock_returns else (InputError, OSError)
        signalled, result = in_child(lambda: run(point, clock_returns), allowed)
        finished = isinstance(result, int)
        assert finished or signalled == (0 if error else signal.SIGKILL)
        assert finished or "\n" not in str(result), result
        if ahead and not clock_returns:
            in_child(shim.put_clock_back)
        shim.set_clock(0)
        lose_power()
        in_child(repeat)
        return clock_returns or not finished

    def assert_same() -> None:
        observed = operation.observe()
        assert observed == expected, f"{observed} instead of {expected}"

    def read() -> None:
        shim.arm(0, error)
        assert_same()

    restore()
    _, (total, expected) = in_child(run_undisturbed)
    # Errors from the first call on are usual; the other faults happen in the midst of an operation.
    if wanted and not error:
        wanted = max(1, wanted // 2)
    step = max(1, -(-total // wanted)) if wanted else 1
    points = list(range(0 if error else step // 2, total, step))
    failures, disturbed = [], 0
    for point in points:
        for clock_returns in (True, False) if ahead else (False,):
            try:
                disturbed += disturb(point, clock_returns)
            except AssertionError as failed:
                failures.append(f"point {point}: {failed}")
    if fault == "power":  # after the operation has finished, nothing is lost
        restore()
        in_child(lambda: run(-1))
        lose_power()
        try:
            in_child(assert_same)
        except AssertionError as failed:
            failures.append(f"finished: {failed}")
    if fault in ("readonly", "denied"):
        try:  # what was written can be read where nothing can be changed
            in_child(read)
        except AssertionError as failed:
            failures.append(f"read-only: {failed}")
    shim.set_clock(0)
    return {"calls": total, "points": len(points), "interrupted": disturbed, "failures": failures}
