"""A model: a network and its whitening, which always go together."""

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from listwise.data import Images, whole_image
from listwise.data.workers import naming_lost_workers
from listwise.descriptors.scales import describe_scales
from listwise.descriptors.settings import ExtractSettings, Precision, make_settings
from listwise.descriptors.whitening import Whitening
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.embed import BATCH_PIXELS, embed_parts, inference_network


class Described(NamedTuple):
    """Descriptors float32 [n, D] of the photos at positions `kept`, and the errors of the others.

    `sizes` are widths and heights, int32 [n, 2], of the photo or of its box.
    """

    descriptors: npt.NDArray[np.float32]
    kept: list[int]
    errors: list[str]
    sizes: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Model:
    """A network with the whitening that its descriptors get, if any."""

    net: RetrievalNet
    whitening: Whitening | None = None

    @property
    def dim(self) -> int:
        """Dimensions of a descriptor."""
        return self.net.dim if self.whitening is None else self.whitening.dim

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.net.parameters()).device

    @cached_property
    def fingerprint(self) -> str:
        """Of network and whitening: equal if the descriptors must be. The net's own without one."""
        network = self.net.fingerprint()
        if self.whitening is None:
            return network
        return hashlib.sha256(f"{network} {self.whitening.fingerprint()}".encode()).hexdigest()

    def settings(
        self,
        max_side: int | None,
        scales: Sequence[float],
        power: float,
        precision: Precision | None,
    ) -> ExtractSettings:
        """Checked settings, the precision chosen if it is None."""
        half = self._machine.bfloat16
        chosen = precision or ("bfloat16" if half else "float32")
        return make_settings(max_side, tuple(scales), power, chosen)

    @property
    def _machine(self) -> Machine:
        return Machine.detect(str(self.device))

    def describe(
        self,
        images: Images,
        *,
        max_side: int | None = None,
        scales: Sequence[float] = (1.0,),
        power: float = 3.0,
        precision: Precision | None = None,
        workers: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> Described:
        """Whitened descriptors of photos, in memory; `extract` puts them into a file.

        Args:
            images: photos; each one's box is cut out first, if it has one.
            max_side: long side that larger photos are reduced to.
            scales: sizes at which each photo is seen, as factors.
            power: of the mean over the scales (see `power_mean`).
            precision: bfloat16 on a GPU that has it, else float32, by default. The two give
                descriptors with a cosine of 0.999 or more between them (ResNet-50, photos).
            workers: processes that decode, or threads that read files where the GPU decodes; from
                the cores by default.
            on_progress: called with the number of photos just done, unreadable ones too.
        """
        settings = self.settings(max_side, scales, power, precision)
        everything = [range(len(images))]
        (found,) = self.describe_parts(images, everything, settings, workers, on_progress)
        return found

    def describe_parts(
        self,
        images: Images,
        parts: Sequence[range],
        settings: ExtractSettings,
        workers: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> Generator[Described, None, None]:
        """`describe` part by part; a part's descriptors depend on its own photos alone."""
        network, autocast = self._computing(settings.precision)
        with naming_lost_workers():
            for found in embed_parts(
                self.net,
                images,
                parts,
                describe=partial(
                    describe_scales, network, scales=settings.scales, power=settings.power
                ),
                max_side=settings.max_side,
                workers=self._machine.workers() if workers is None else workers,
                autocast=autocast,
                on_progress=on_progress,
            ):
                rows = self._whitened(found.descriptors)
                sizes = np.array(found.sizes, dtype=np.int32).reshape(-1, 2)
                yield Described(rows, found.kept, found.errors, sizes)

    @torch.inference_mode()
    def describe_photos(
        self, photos: Sequence[Image.Image], settings: ExtractSettings
    ) -> npt.NDArray[np.float32]:
        """Whitened descriptors of upright RGB photos that are in memory: [n, D].

        They are those that `describe` gives of the photos' files, but for the little by which
        decoders differ where the GPU decodes these. The network must be in evaluation mode, as
        `load_model` leaves it.
        """
        rows = torch.empty(len(photos), self.net.dim)
        shapes: dict[torch.Size, list[tuple[int, torch.Tensor]]] = {}
        for position, photo in enumerate(photos):
            pixels = whole_image(photo, settings.max_side)
            shapes.setdefault(pixels.shape, []).append((position, pixels))
        device = self.device
        network, autocast = self._computing(settings.precision)
        for (_, height, width), group in shapes.items():
            size = max(1, BATCH_PIXELS[device.type] // (height * width))
            for start in range(0, len(group), size):
                positions, batch = zip(*group[start : start + size], strict=True)
                with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                    found = describe_scales(
                        network,
                        torch.stack(batch).to(device),
                        scales=settings.scales,
                        power=settings.power,
                    )
                rows[list(positions)] = found.float().cpu()
        return self._whitened(rows)

    def _computing(self, precision: Precision) -> tuple[RetrievalNet, torch.dtype | None]:
        """The network to compute with, and the dtype for autocast if there is to be any."""
        if precision == "float32":
            return self.net, None
        return self._half_network, torch.bfloat16

    @cached_property
    def _half_network(self) -> RetrievalNet:
        return inference_network(self.net, torch.bfloat16)

    def _whitened(self, descriptors: torch.Tensor) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = descriptors.float().numpy()
        return rows if self.whitening is None else self.whitening.apply(rows)


def load_model(folder: str | Path, device: str = "auto") -> Model:
    """Open a model folder: the network in evaluation mode, and the whitening if it has one.

    Args:
        folder: what `RetrievalNet.save` wrote, with what `listwise whiten` added.
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
    """
    net = load_network(folder, device)
    return Model(net, Whitening.load(folder, net.fingerprint()))


def load_network(folder: str | Path, device: str = "auto") -> RetrievalNet:
    """Open the network of a model folder without its whitening, laid out for its device."""
    machine = Machine.detect(device)
    net = RetrievalNet.load(folder, machine.device)
    if machine.device.startswith("cuda"):
        net.to(memory_format=torch.channels_last)
    return net
