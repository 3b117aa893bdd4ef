"""Kills one operation at each of its writes in turn, then repeats it and compares the results.

Runs as a process of its own with crash_point.c preloaded:
    python scenarios.py FOLDER PHOTOS POINTS FAULT:OPERATION ...
FAULT is "kill", or "full": from that call on the disk is full, and there is space again afterwards.
It prints a JSON object for each: the calls that change files, the points tried, what went wrong.
Each step runs in a forked process, so that the imports are paid for once.
"""

import ctypes
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported before the forks, though not used by name.
import faiss  # noqa: F401
import lancedb  # noqa: F401
import numpy as np
import pyarrow.parquet  # noqa: F401
import timm.models  # noqa: F401
import torch
import torch.utils.tensorboard
from starlette.testclient import TestClient

import listwise
import listwise.search.folder.store
from listwise.data import read_images
from listwise.descriptors import extract, learn_whitening, load_model
from listwise.descriptors.storage import DescriptorFile
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.search import SearchIntent, open_index
from listwise.search.opening import store_exists
from listwise.serving.app import create_app
from listwise.serving.settings import ServeSettings
from listwise.training import resume

MODEL = "test_resnet.r160_in1k"


def sha(data: np.ndarray | bytes) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.tobytes()).hexdigest()


def names(folder: Path) -> list[str]:
    """Files below a folder, whose number and names must not grow with crashes."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    RetrievalNet(MODEL, weights="random").save(folder)


class IndexOperation:
    """What is done to an index of photos; the model lies beside it."""

    first = 0  # photos that the index has before

    def __init__(self, work: Path, photos: Path) -> None:
        self.index, self.model = work / "shop", work / "model"
        self.photos = sorted(map(str, photos.rglob("*.jpg")))[:9]

    def prepare(self) -> None:
        save_model(self.model)
        if self.first:
            with open_index(self.index, load_model(self.model, "cpu")) as index:
                index.add(self.photos[: self.first], workers=0)

    def run(self) -> None:
        with open_index(self.index, load_model(self.model, "cpu")) as index:
            index.add(self.photos, workers=0)

    def observe(self) -> Any:
        with open_index(self.index, load_model(self.model, "cpu")) as index:
            entries = {entry.id: [entry.digest, entry.width, entry.path] for entry in index}
            assert len(index) == len(entries)
            rows = index.store.vectors([entry.key for entry in index])
            found = [hit.id for hit in index.search(self.photos[0], k=3)]
        vectors = dict(zip(entries, map(sha, rows), strict=True))
        return {"entries": entries, "vectors": vectors, "found": found}

    def check_interrupted(self, expected: Any) -> None:
        """After a crash, every entry that is there is whole."""
        if store_exists(str(self.index)):
            with open_index(self.index, load_model(self.model, "cpu")) as index:
                rows = index.store.vectors([entry.key for entry in index])
                for entry, row in zip(index, rows, strict=True):
                    known = expected["vectors"].get(entry.id)
                    assert known is None or sha(row) == known, f"{entry.id} is damaged"
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
        with open_index(self.index, load_model(self.model, "cpu")) as index:
            rows = index.store.vectors([entry.key for entry in index])
            return {"vectors": {entry.id: sha(row) for entry, row in zip(index, rows, strict=True)}}


class Tune(IndexOperation):
    """`listwise index tune` with a memory budget, and back."""

    first = 9

    def run(self) -> None:
        with open_index(self.index) as index:
            index.tune(SearchIntent(memory=1))


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
        with open_index(self.index, load_model(self.model, "cpu")) as index:
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
    """`listwise whiten`."""

    def run(self) -> None:
        learn_whitening(self.model, self.photos, dim=4, device="cpu")

    def observe(self) -> Any:
        vectors = load_model(self.model, "cpu").encode(sorted(self.photos.rglob("*.jpg"))[:3])
        return {"vectors": sha(vectors), "files": names(self.work)}

    def check_interrupted(self, expected: Any) -> None:
        """The model can be loaded, with the whitening or without it."""
        load_model(self.model, "cpu")


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


KINDS = (Build, Add, Remove, Tune, Serve, Extract, Whiten, Train)
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


def main(name: str, folder: Path, photos: str, wanted: int, fault: str) -> dict[str, Any]:
    """Interrupt an operation at `wanted` of its points, evenly spread (all if it is 0)."""
    shim = ctypes.CDLL(None)
    error = errno.ENOSPC if fault == "full" else 0
    base, work = folder / "base", folder / "work"
    operation = OPERATIONS[name](work, Path(photos))

    def restore() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)

    def run(at: int) -> int:
        shim.crash_arm(os.fsencode(work), ctypes.c_long(at), error)
        operation.run()
        return int(shim.crash_calls())

    work.mkdir(parents=True)
    in_child(operation.prepare)
    work.rename(base)
    restore()
    _, total = in_child(lambda: run(-1))
    _, expected = in_child(operation.observe)
    step = max(1, -(-total // wanted)) if wanted else 1
    points, failures, interrupted = list(range(0, total, step)), [], 0
    for point in points:
        restore()
        try:
            # What the command line reports in one line.
            signalled, result = in_child(lambda point=point: run(point), (InputError, OSError))
            assert signalled == (0 if error else signal.SIGKILL) or isinstance(result, int)
            interrupted += not isinstance(result, int)
            in_child(lambda: operation.check_interrupted(expected))
            in_child(operation.run)
            _, observed = in_child(operation.observe)
            assert observed == expected, f"{observed} instead of {expected}"
        except AssertionError as failed:
            failures.append(f"point {point}: {failed}")
    return {
        "calls": total,
        "points": len(points),
        "interrupted": interrupted,
        "failures": failures,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[4:]:
        fault, operation = case.split(":")
        report = main(
            operation, Path(sys.argv[1], fault, operation), sys.argv[2], int(sys.argv[3]), fault
        )
        print(json.dumps({"case": case, **report}))
