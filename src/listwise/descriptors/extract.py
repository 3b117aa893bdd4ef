"""Extract the descriptors of photos into a file, with resume, by one or several processes."""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from listwise.data import Images
from listwise.descriptors.model import Model
from listwise.descriptors.parts import Parts
from listwise.descriptors.settings import Precision
from listwise.descriptors.storage import DescriptorFile, DescriptorHeader, DescriptorWriter
from listwise.errors import InputError
from listwise.models.embed import MIXED

# Photos per part. An interruption loses at most one part: seconds on a GPU, a minute on a CPU.
PART = {"cpu": 64, "cuda": 8192}


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
        max_side: long side that larger photos are reduced to; 0 for their original size. By default
            that of a tuned model, or the original size.
        scales: sizes at which each photo is described, as factors; by default those of a tuned
            model, or (1.0,).
        power: power of the mean over the scales (see `power_mean`); 3 by default.
        precision: "float32" or "bfloat16"; by default bfloat16 on a GPU that supports it.
        strict: stop at the first photo that cannot be read.
        workers: processes that decode photos; chosen from the number of cores by default.
        on_progress: called with the number of photos just finished.
        on_note: called with a sentence when earlier parts are used or discarded, or when the
            network needs batches of photos of one shape on a GPU.

    Raises:
        InputError: no photo can be read, `out` cannot be written, or another process writes it.
    """
    if model.device.type == "cuda":  # while the GPU computes
        threading.Thread(target=_import_pyarrow, name="pyarrow").start()
    settings = model.settings(max_side, scales, power, precision)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    how = f"{model.fingerprint} {settings.model_dump_json()}"
    parts = Parts(DescriptorFile, Path(out), images, size, how)
    with parts.locked():
        missing = parts.start(strict, on_progress, on_note)
        if MIXED.get(model.device.type) and not model.mixes_shapes(settings):
            on_note(
                "this network can only take photos of one shape in a batch: photos of many shapes "
                "take longer"
            )
        described = model.describe_parts(
            [images.file(i) for part in missing for i in part.photos],
            [len(part.photos) for part in missing],
            settings,
            photos=len(images),
            workers=workers,
            on_progress=on_progress,
        )
        with closing(described):
            for part, found in zip(missing, described, strict=True):
                if strict and found.errors:
                    raise InputError(found.errors[0])
                header = DescriptorHeader(
                    model=model.fingerprint,
                    whitened=model.whitening is not None,
                    settings=settings,
                    unreadable=tuple(found.errors),
                )
                with DescriptorWriter(part.path, model.dim, header) as writer:
                    ids = [images.ids[part.photos[i]] for i in found.kept]
                    writer.write(ids, found.sizes, found.descriptors)
        return parts.join()


def _import_pyarrow() -> None:
    """Import what writes the file, which takes a while; a missing package is reported later."""
    with suppress(ImportError):
        import pyarrow.parquet

        pyarrow.array([0.0])  # imports pandas if it is installed


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
