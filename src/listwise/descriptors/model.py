"""A model: a network and its whitening, which always go together."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from listwise.data import DecodedPhoto, Decoding, Images, PhotoFile, whole_image
from listwise.data.given import Photos, image_files, is_one_photo, list_photos, open_photo
from listwise.data.images import ImageError
from listwise.data.workers import explain_lost_workers
from listwise.descriptors.scales import describe_scales
from listwise.descriptors.settings import ExtractSettings, Precision, make_settings
from listwise.descriptors.whitening import WHITENING_FILE, Whitening
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.embed import embed_decoded, embed_parts, inference_network
from listwise.progress import FEW, counting

IN_MEMORY = 64  # photos in memory that are described together


class Described(NamedTuple):
    """Descriptors float32 [n, D] of the photos at positions `kept`, and the errors of the others.

    `sizes` are widths and heights, int32 [n, 2], of the photo or of its box; `thumbnails` are
    small JPEG files, empty if none were wanted.
    """

    descriptors: npt.NDArray[np.float32]
    kept: list[int]
    errors: list[str]
    sizes: npt.NDArray[np.int32]
    thumbnails: list[bytes]


@dataclass(frozen=True, eq=False)
class Model:
    """A network with the whitening that its descriptors get, if any; `load_model` opens one.

    `folder` is where it was opened from or saved to; `name` is the timm backbone of a network that
    was taken off the shelf.

    Examples:
        >>> model = load_model("resnet50")                  # doctest: +SKIP
        >>> model.encode(["a.jpg", "b.jpg"]).shape          # doctest: +SKIP
        (2, 2048)
    """

    net: RetrievalNet
    whitening: Whitening | None = None
    folder: Path | None = None
    name: str = ""

    def __repr__(self) -> str:
        source = self.name if self.folder is None else str(self.folder)
        return f"Model({source!r}, dim={self.dim}, device={str(self.device)!r})"

    def encode(
        self,
        photos: Photos,
        *,
        max_side: int | None = None,
        scales: Sequence[float] = (1.0,),
        power: float = 3.0,
        precision: Precision | None = None,
        workers: int | None = None,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Descriptors of photos, unit rows: [n, dim]; of a single photo [dim].

        Photos that cannot be read raise an `ImageError` that names them.

        Args:
            photos: one photo (an image file, a Pillow image, or pixels uint8 [height, width, 3]),
                a list of them, or a folder, table, text list or data set of photos.
            max_side: long side that larger photos are reduced to; their own size by default.
            scales: sizes at which each photo is described, as factors.
            power: of the mean over the scales (see `power_mean`).
            precision: bfloat16 on a GPU that has it, else float32, by default. The two give
                descriptors with a cosine of 0.999 or more between them (ResNet-50, photos).
            workers: processes that decode, or threads that read files where the GPU decodes; from
                the cores by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.
        """
        given = list_photos(photos)
        settings = self.settings(max_side, scales, power, precision)
        rows = np.empty((len(given), self.dim), np.float32)
        with counting("encoding", len(given), progress) as advance:
            if isinstance(given, Images):
                rows[:] = self._encode_files(given, settings, workers, advance)
            else:
                files = [i for i, photo in enumerate(given) if isinstance(photo, str | Path)]
                named = image_files([given[i] for i in files])  # type: ignore[misc]
                rows[files] = self._encode_files(named, settings, workers, advance)
                others = sorted(set(range(len(given))) - set(files))
                for start in range(0, len(others), IN_MEMORY):
                    some = others[start : start + IN_MEMORY]
                    opened = [open_photo(given[i]) for i in some]
                    rows[some] = self.describe_photos(opened, settings)
                    advance(len(some))
        row: npt.NDArray[np.float32] = rows[0] if is_one_photo(photos) else rows
        return row

    def _encode_files(
        self,
        images: Images,
        settings: ExtractSettings,
        workers: int | None,
        advance: Callable[[int], object],
    ) -> npt.NDArray[np.float32]:
        if not len(images):
            return np.empty((0, self.dim), np.float32)
        # Processes take longer to start than a few photos to decode.
        workers = 0 if workers is None and len(images) <= FEW else workers
        found = self.describe(images, **dict(settings), workers=workers, on_progress=advance)
        missing = sorted(set(range(len(images))) - set(found.kept))
        if missing:
            path = images.paths[missing[0]]
            reason = found.errors[0].removeprefix(f"{path}: ")
            if len(missing) > 1:
                others = ", ".join(images.ids[i] for i in missing[1:6])
                reason += f"; {len(missing) - 1} more cannot be read: {others}"
                reason += ", ..." if len(missing) > 6 else ""
            raise ImageError(path, reason)
        return found.descriptors

    def save(self, folder: str | Path) -> None:
        """Write the network and its whitening into a folder, from which `load_model` opens it."""
        self.net.save(folder)
        if self.whitening is not None:
            self.whitening.save(folder, self.net.fingerprint())
        else:
            (Path(folder) / WHITENING_FILE).unlink(missing_ok=True)
        object.__setattr__(self, "folder", Path(folder).absolute())

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

        The settings are those of `encode`. Each photo's box is cut out first, if it has one.
        `on_progress` is called with the number of photos just done, unreadable ones too.
        """
        settings = self.settings(max_side, scales, power, precision)
        (found,) = self.describe_parts(
            images.files(), [len(images)], settings, workers=workers, on_progress=on_progress
        )
        return found

    def describe_parts(
        self,
        files: Iterable[PhotoFile],
        sizes: Iterable[int],
        settings: ExtractSettings,
        *,
        thumbnails: bool = False,
        workers: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> Generator[Described, None, None]:
        """`describe` part by part; a part's descriptors depend on its own photos alone.

        `sizes` are the numbers of photos in the parts; `Described.kept` has positions in the part.
        """
        with (
            explain_lost_workers(),
            closing(
                embed_parts(
                    self.net,
                    files,
                    sizes,
                    Decoding(settings.max_side, thumbnail=thumbnails),
                    describe=self._describing(settings),
                    workers=self._machine.workers() if workers is None else workers,
                    autocast=_autocast(settings),
                    on_progress=on_progress,
                )
            ) as parts,
        ):
            for found in parts:
                rows = self._whitened(found.descriptors)
                shapes = np.array(found.sizes, dtype=np.int32).reshape(-1, 2)
                yield Described(rows, found.kept, found.errors, shapes, found.thumbnails)

    def describe_photos(
        self, photos: Sequence[Image.Image], settings: ExtractSettings
    ) -> npt.NDArray[np.float32]:
        """Whitened descriptors of upright RGB photos that are in memory: [n, D].

        They are those that `describe` gives of the photos' files, but for the little by which
        decoders differ where the GPU decodes these. The network must be in evaluation mode, as
        `load_model` leaves it.
        """
        found = embed_decoded(
            (
                DecodedPhoto(whole_image(photo, settings.max_side), photo.size, photo.size)
                for photo in photos
            ),
            self._describing(settings),
            self.net.dim,
            self.device,
            _autocast(settings),
        )
        return self._whitened(found.descriptors)

    def _describing(self, settings: ExtractSettings) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes descriptors [B, C] of photos uint8 [B, 3, H, W]."""
        net = self.net if settings.precision == "float32" else self._half_network
        return partial(describe_scales, net, scales=settings.scales, power=settings.power)

    @cached_property
    def _half_network(self) -> RetrievalNet:
        return inference_network(self.net, torch.bfloat16)

    def _whitened(self, descriptors: torch.Tensor) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = descriptors.float().numpy()
        return rows if self.whitening is None else self.whitening.apply(rows)


def _autocast(settings: ExtractSettings) -> torch.dtype | None:
    return None if settings.precision == "float32" else torch.bfloat16
