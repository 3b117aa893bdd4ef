"""Photos to a descriptor file, in parts that survive an interruption, by several processes."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from listwise.data import Images
from listwise.descriptors.model import Model
from listwise.descriptors.parts import Parts
from listwise.descriptors.settings import Precision
from listwise.descriptors.storage import DescriptorFile, DescriptorHeader, DescriptorWriter
from listwise.errors import InputError

# Photos in a part, which is what a kill can cost: some seconds on a GPU, a minute without.
PART = {"cpu": 64, "cuda": 2048}


def extract(
    model: Model,
    images: Images,
    out: str | Path,
    *,
    max_side: int | None = None,
    scales: Sequence[float] = (1.0,),
    power: float = 3.0,
    precision: Precision | None = None,
    strict: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> DescriptorFile:
    """Put the descriptors of photos into a file; an interrupted run continues where it stopped.

    What is done is kept in `OUT.partial/` until the end, and is used by the next run of the same
    model, settings and photos. The values are those of an unbroken run. Photos that cannot be read
    are left out and named in the file's `header.unreadable`.

    The settings are those of `Model.encode`. Each photo's box is cut out first, if it has one. With
    `strict` the first photo that cannot be read stops it. `on_progress` is called with the number
    of photos just done, `on_note` with a sentence when earlier work is used, or discarded.
    """
    settings = model.settings(max_side, scales, power, precision)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    how = f"{model.fingerprint} {settings.model_dump_json()}"
    parts = Parts(DescriptorFile, Path(out), images, size, how)
    with parts.locked():
        missing = parts.start(strict, on_progress, on_note)
        described = model.describe_parts(
            [images.file(i) for part in missing for i in part.photos],
            [len(part.photos) for part in missing],
            settings,
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


@dataclass(frozen=True)
class Shard:
    """Share number `index`, from 0, of `count` equal ones; the only one by default.

    In a script that `torchrun` started:

        shard = Shard.from_torchrun()
        model = load_model("runs/a/model", shard.device())
        extract(model, shard.images(photos), shard.file("photos.parquet"))
    """

    index: int = 0
    count: int = 1

    @classmethod
    def from_torchrun(cls) -> "Shard":
        """The share of this process: its rank among those that `torchrun` started."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def images(self, images: Images) -> Images:
        """The photos of this share: consecutive ones."""
        if self.count == 1:
            return images
        first, past = (len(images) * i // self.count for i in (self.index, self.index + 1))
        return images.subset(range(first, past))

    def file(self, out: str | Path) -> Path:
        """The file of this share: `out`, or out-00001-of-00008 and so on."""
        out = Path(out)
        if self.count == 1:
            return out
        return out.with_name(f"{out.stem}-{self.index + 1:05d}-of-{self.count:05d}{out.suffix}")

    def device(self, device: str = "auto") -> str:
        """The device to use: `auto` gives each process on a machine a GPU of its own."""
        gpus = torch.cuda.device_count()
        if device != "auto" or self.count == 1 or not gpus:
            return device
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % gpus}"
