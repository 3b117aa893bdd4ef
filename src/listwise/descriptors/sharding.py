"""One job in several processes: each takes its share of the photos."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from listwise.data import Images


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
