"""Extract the descriptors of photos into a file, with resume, by one or several processes."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from listwise.data import Images
from listwise.data.images import printable
from listwise.descriptors.model import Model
from listwise.descriptors.storage import (
    DescriptorFile,
    DescriptorHeader,
    DescriptorWriter,
    is_descriptor_file,
)
from listwise.errors import InputError
from listwise.files import publish
from listwise.models.embed import MIXED
from listwise.settings import Precision

# Photos per part. An interruption loses at most one part: seconds on a GPU, a minute on a CPU.
PART = {"cpu": 64, "cuda": 8192}
LOCK_FILE = "listwise.lock"
_OURS = re.compile(r"[0-9a-f]{32}-\d{9}\.parquet")


def extract(
    model: Model,
    images: Images,
    out: str | Path,
    *,
    max_side: int | None = None,
    scales: Sequence[float] | None = None,
    power: float | None = None,
    precision: Precision | None = None,
    strict: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> DescriptorFile:
    """Write the descriptors of N photos into a file: float32 [N, dim], with ids and sizes.

    Finished parts are kept in `OUT.partial/` until the end. The same call resumes after an
    interruption, and the resulting values equal those of an uninterrupted run. Photos that cannot
    be read are left out and listed in the file's `header.unreadable`.

    Args:
        model: the model that describes the photos.
        images: the photos; only the box of a photo is used if it has one.
        out: path of the descriptor file.
        max_side: reduce photos whose longer side has more pixels than this; 0 keeps the original
            size. By default the size that the model records, or 1024 on a GPU and 512 on a CPU.
        scales: scales at which each photo is described, such as 1,0.7071,0.5; by default those of a
            tuned model, or 1.
        power: power of the generalized mean over the descriptors of several scales; by default 3.
        precision: precision in which the network computes; by default bfloat16 on a GPU that
            supports it.
        strict: stop at the first photo that cannot be read.
        workers: number of processes that decode photos; by default from the number of CPU cores.
        on_progress: called with the number of photos just finished.
        on_note: called with a sentence when earlier parts are used or discarded, or when the
            network needs batches of photos of one shape on a GPU.

    Raises:
        InputError: no photo can be read, `out` cannot be written, or another process writes it.
    """
    out, settings = Path(out), model.settings(max_side, scales, power, precision)
    check_out(out, images, "descriptor file", is_descriptor_file)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    parts = _Parts(out, images, size, f"{model.fingerprint} {settings.model_dump_json()}")
    with lock_folder(parts.folder, f"another process is extracting into {out}"):
        missing = parts.missing(strict, on_note)
        done = len(images) - sum(map(len, missing))
        if done:
            on_note(f"resuming: {done} of {len(images)} photos are already done")
            on_progress(done)
        if MIXED.get(model.device.type) and not model.mixes_shapes(settings):
            on_note(
                "this network can only take photos of one shape in a batch: photos of many shapes "
                "take longer"
            )
        described = model.describe_parts(
            [images.file(i) for photos in missing for i in photos],
            [len(photos) for photos in missing],
            settings,
            workers=workers,
            on_progress=on_progress,
        )
        with closing(described):
            for (photos, path), found in zip(missing.items(), described, strict=True):
                if strict and found.errors:
                    raise InputError(found.errors[0])
                header = DescriptorHeader(
                    model=model.fingerprint,
                    whitened=model.whitening is not None,
                    settings=settings,
                    unreadable=tuple(found.errors),
                )
                with DescriptorWriter(path, model.dim, header) as writer:
                    ids = [images.ids[photos[i]] for i in found.kept]
                    writer.write(ids, found.sizes, found.descriptors)
        return parts.join()


class _Parts:
    """The parts of one extraction, in `OUT.partial/`, which survive an interruption.

    The file of a part exists only when it is complete, and its name begins with a hash of the
    photos and settings. The next run with the same ones uses the finished parts; a run with others
    discards them. Other files in the folder stay.

    Args:
        out: the file of the extraction.
        images: the photos.
        size: the number of photos in a part.
        how: identifies the model and its settings.

    Attributes:
        folder: the folder of the parts.
        files: the positions of the photos of each part, and its file.
    """

    def __init__(self, out: Path, images: Images, size: int, how: str) -> None:
        self.folder = out.with_name(f"{out.name}.partial")
        self._out, self._key = out, photos_key(f"{how} {size}", images)[:32]
        count = len(images)
        starts = range(0, count, size)
        self.files = {
            range(i, min(i + size, count)): self.folder / f"{self._key}-{i:09d}.parquet"
            for i in starts
        }

    def missing(self, strict: bool, on_note: Callable[[str], object]) -> dict[range, Path]:
        """Return the parts to extract; with `strict` also those that lack unreadable photos."""
        if any(not file.name.startswith(self._key) for file in self._kept()):
            on_note(
                f"{self.folder} is from another model, other settings or other photos: "
                "discarding it"
            )
            self._remove()
        return {
            photos: path
            for photos, path in self.files.items()
            if not path.exists() or (strict and DescriptorFile.open(path).header.unreadable)
        }

    def join(self) -> DescriptorFile:
        """Join all parts into the file, and remove them."""
        files = [DescriptorFile.open(path) for path in self.files.values()]
        unreadable = tuple(line for file in files for line in file.header.unreadable)
        if not any(len(file) for file in files):
            raise none_readable(unreadable)
        if len(files) == 1:
            publish(files[0].path, self._out)
        else:
            header = files[0].header.model_copy(update={"unreadable": unreadable})
            with DescriptorWriter(self._out, files[0].dim, header) as writer:
                for file in files:
                    writer.write(file.ids, file.sizes, file.read())
        self._remove()
        (self.folder / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # it has other files, or another process has started in it
            self.folder.rmdir()
        return DescriptorFile.open(self._out)

    def _kept(self) -> list[Path]:
        """Return the files that extractions have left in the folder."""
        return [file for file in self.folder.iterdir() if _OURS.match(file.name)]

    def _remove(self) -> None:
        for file in self._kept():
            file.unlink(missing_ok=True)


def check_out(out: Path, images: Images, name: str, matches: Callable[[Path], bool]) -> None:
    """Refuse a file to extract into before the extraction; an earlier one `matches`."""
    if not len(images):
        raise InputError("no photos to extract from: give at least one")
    if re.match(r"\w{2,}:/", str(out)):  # as pathlib writes a URL; one letter is a drive
        raise InputError(
            f"{out} is not a file: `out` must be the name of a {name}; listwise index build "
            "adds photos to Milvus"
        )
    if printable(out) != str(out):
        raise InputError(f"the path {printable(out)} is not UTF-8: give another name")
    if out.exists() and not matches(out):
        raise InputError(f"{out} exists and is not a {name}: give another name")


def none_readable(errors: tuple[str, ...]) -> InputError:
    """Make the error for an extraction without any photo."""
    return InputError(f"none of the {len(errors)} photos can be read; the first: {errors[0]}")


@contextmanager
def lock_folder(folder: Path, busy: str) -> Iterator[None]:
    """Create and lock a folder; `busy` is the beginning of the error if another process has it."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        while not (folder / LOCK_FILE).exists() or not lock.is_locked:
            lock.release()  # another process has just removed the folder
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"{busy}: wait until it ends, or give another name") from None
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def photos_key(how: str, images: Images) -> str:
    """Return a hash of the photos and of how they are extracted; equal for equal parts."""
    digest = hashlib.sha256(how.encode())
    for index in range(len(images)):
        entry = (images.ids[index], images.paths[index], images.box(index))
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Shard:
    """One of `count` equal shares of some photos, number `index` from 0; all photos by default.

    Example, in a script that `torchrun` starts:

        shard = Shard.from_torchrun()
        model = load_model("runs/a/model", shard.device())
        extract(model, shard.images(photos), shard.file("photos.parquet"))
    """

    index: int = 0
    count: int = 1

    @classmethod
    def from_torchrun(cls) -> "Shard":
        """Return the share of this process, by its rank among the processes of `torchrun`."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def images(self, images: Images) -> Images:
        """Return the photos of this share, which are consecutive."""
        if self.count == 1:
            return images
        first, past = (len(images) * i // self.count for i in (self.index, self.index + 1))
        return images.subset(range(first, past))

    def file(self, out: str | Path) -> Path:
        """Return the file of this share: `out`, or out-00001-of-00008 and so on."""
        out = Path(out)
        if self.count == 1:
            return out
        return out.with_name(f"{out.stem}-{self.index + 1:05d}-of-{self.count:05d}{out.suffix}")

    def device(self, device: str = "auto") -> str:
        """Return the device to use; with `auto` each process on a machine gets a different GPU."""
        gpus = torch.cuda.device_count()
        if device != "auto" or self.count == 1 or not gpus:
            return device
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % gpus}"
