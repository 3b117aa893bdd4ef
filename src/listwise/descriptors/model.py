"""`Model`: a network and its whitening, which turn photos into descriptors."""

import hashlib
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from listwise.blocks import unit_rows
from listwise.calibration import Calibration, fit_calibration
from listwise.data import (
    DecodedPhoto,
    Decoding,
    Images,
    LabelledImages,
    PhotoFile,
    decode_photos,
    read_labelled,
    whole_image,
)
from listwise.data.catalog import Photos, image_files, is_one_photo, list_photos
from listwise.data.images import ORIGINAL_SIDE, ImageError, check_original_side
from listwise.data.photos import open_photo
from listwise.data.workers import explain_lost_workers
from listwise.descriptors.card import Results, shorten_paths, write_card
from listwise.descriptors.scales import describe_scales
from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError, ListwiseWarning
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.embed import (
    Describe,
    Described,
    PhotoNet,
    embed_decoded,
    embed_parts,
    network_state,
)
from listwise.models.net import Network
from listwise.models.storage import (
    ModelFile,
    ModelInfo,
    ModelSettings,
    default_max_side,
    write_model,
)
from listwise.progress import FEW, counting
from listwise.settings import ExtractSettings, Precision, as_options, make_settings

QUANTIZED_FROM = 100  # photos on which the ranges of int8 are measured


@dataclass(frozen=True, eq=False)
class Model:
    """A network and the whitening of its descriptors; `load_model` loads one.

    Attributes:
        net: the network, images [B, 3, H, W] -> [B, C]: a `RetrievalNet`, or an `OnnxNet` for an
            ONNX file.
        whitening: applied to the network's descriptors, [n, C] -> [n, dim]; None for none.
        folder: the folder or file that the model was loaded from.
        name: the timm backbone, if the model was loaded by its name.
        calibration: turns scores into the probability that two photos show the same thing; None
            for a model that is not calibrated.
        tuned: the settings that the model is used with where you give none: training chooses the
            size of photos, `listwise.tune` the others; None for a model that records none.

    Examples:
        >>> model = load_model("resnet50")                  # doctest: +SKIP
        >>> model.encode(["a.jpg", "b.jpg"]).shape          # doctest: +SKIP
        (2, 2048)
    """

    net: Network
    whitening: Whitening | None = None
    folder: Path | None = None
    name: str = ""
    calibration: Calibration | None = None
    tuned: ModelSettings | None = None

    def __post_init__(self) -> None:
        if isinstance(self.net, str | Path):
            raise InputError("`net` must be a network: load a model with listwise.load(NAME)")

    def __repr__(self) -> str:
        source = self.name if self.folder is None else str(self.folder)
        return f"Model({source!r}, dim={self.dim}, device={str(self.device)!r})"

    def encode(
        self,
        photos: Photos,
        *,
        max_side: int | None = None,
        scales: Sequence[float] | None = None,
        power: float | None = None,
        precision: Precision | None = None,
        batch_size: int | None = None,
        workers: int | None = None,
        progress: bool | None = None,
        show_progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the descriptors of photos: float32 [n, dim], unit rows; [dim] for a single photo.

        Args:
            photos: one photo, a list of photos, or a folder, table, text list or data set. A photo
                is an image file, a Pillow image, the bytes of an image file, or an array or tensor
                [height, width, 3] or [3, height, width], uint8 or float from 0 to 1; an array with
                one more dimension is a batch. A table can also be a DataFrame.
            max_side: long side that larger photos are reduced to; 0 for their original size. By
                default the size that the model records, or 1024 on a GPU and 512 on a CPU.
            scales: sizes at which each photo is described, as factors; by default those of a tuned
                model, or (1.0,).
            power: power of the mean over the scales (see `power_mean`); 3 by default.
            precision: "float32" or "bfloat16"; by default bfloat16 on a GPU that supports it. The
                cosine between the two descriptors of a photo is 0.999 or more (ResNet-50, photos).
            batch_size: maximum number of photos that the network takes at a time; by default as
                many as suit its device.
            workers: processes that decode photos, or threads that read files if the GPU decodes
                them; chosen from the number of cores by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.
            show_progress: the same as `progress`, as other libraries name it.

        Raises:
            ImageError: photos cannot be read; the message names them.
        """
        given = list_photos(photos)
        settings = self.settings(max_side, scales, power, precision)
        if batch_size is not None and batch_size < 1:
            raise InputError(f"`batch_size` must be 1 or more, not {batch_size}")
        size = batch_size or max(1, len(given))
        rows = np.empty((len(given), self.dim), np.float32)
        shown = show_progress if progress is None else progress
        with counting("encoding", len(given), shown) as advance:
            if isinstance(given, Images):
                rows[:] = self._encode_files(given, settings, size, workers, advance)
            else:
                files = [i for i, photo in enumerate(given) if isinstance(photo, str | Path)]
                named = image_files([given[i] for i in files])  # type: ignore[misc]
                rows[files] = self._encode_files(named, settings, size, workers, advance)
                others = sorted(set(range(len(given))) - set(files))
                opened = (open_photo(given[i], max_side=settings.max_side) for i in others)
                for start in range(0, len(others), size):
                    some = islice(opened, size)
                    found = self.describe_photos(some, settings, advance)
                    rows[others[start : start + size]] = found
        row: npt.NDArray[np.float32] = rows[0] if is_one_photo(photos) else rows
        return row

    def _encode_files(
        self,
        images: Images,
        settings: ExtractSettings,
        size: int,
        workers: int | None,
        advance: Callable[[int], object],
    ) -> npt.NDArray[np.float32]:
        files, count = images.files(), len(images)
        # Starting processes takes longer than decoding a few photos.
        workers = 0 if workers is None and count <= FEW else workers
        starts = range(0, count, size)
        parts = self.describe_parts(
            files, [size] * len(starts), settings, workers=workers, on_progress=advance
        )
        rows = np.empty((count, self.dim), np.float32)
        kept: list[int] = []
        errors: list[str] = []
        for start, found in zip(starts, parts, strict=True):
            places = [start + i for i in found.kept]
            rows[places] = found.descriptors
            kept += places
            errors += found.errors
        missing = sorted(set(range(count)) - set(kept))
        if missing:
            path = images.paths[missing[0]]
            reason = errors[0].removeprefix(f"{path}: ")
            if len(missing) > 1:
                reason += f"; {len(missing) - 1} more cannot be read: "
                reason += ", ".join(images.ids[i] for i in missing[1:6])
                reason += ", ..." if len(missing) > 6 else ""
            raise ImageError(path, reason)
        return rows

    def similarity(self, first: npt.ArrayLike, second: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return the cosine similarity of descriptors: [n, dim], [m, dim] -> [n, m].

        Examples:
            >>> model.similarity(vectors, model.encode("chair.jpg"))  # doctest: +SKIP
            array([[0.93], [0.12]], dtype=float32)
        """
        found: npt.NDArray[np.float32] = unit_rows(first) @ unit_rows(second).T
        return found

    def to(self, device: str) -> "Model":
        """Move the network to a device: "cpu", "cuda", "cuda:1" or "auto"; return this model."""
        wanted = Machine.detect(str(device)).device
        if wanted != "cpu":
            self.trainable("moved to a GPU")
        on_device(self.net, wanted)
        self._networks.clear()
        return self

    def save(self, folder: str | Path) -> "Model":
        """Write the model to `model.safetensors` in a folder, or to a file with this ending.

        The file holds everything that `load_model` needs. An earlier one is replaced atomically.

        Returns:
            This model with its new folder, which an index and a later `save` of `tune` use.
        """
        write_model(folder, self.content().with_info(tuned=self.recorded))
        return replace(self, folder=Path(folder).absolute())

    def content(self) -> ModelFile:
        """Return what the file of the model holds."""
        net, white = self.trainable("saved as a folder"), self.whitening
        whitening = None if white is None else (white.mean, white.projection)
        return ModelFile(self._info, net.plain_state(), whitening)

    @property
    def _info(self) -> ModelInfo:
        info = None if self.whitening is None else self.whitening.info
        settings = {"tuned": self.tuned, "calibration": self.calibration}
        return ModelInfo(network=self.net.config, whitening=info, **settings)

    def trainable(self, purpose: str) -> RetrievalNet:
        """Return the network, or refuse that of an ONNX file."""
        if not isinstance(self.net, RetrievalNet):
            raise InputError(
                f"{self.folder} is an ONNX file and cannot be {purpose}: use the model that it was "
                "exported from"
            )
        return self.net

    def export(
        self,
        path: str | Path,
        *,
        max_side: int | None = None,
        int8: Photos | None = None,
        web: bool = False,
    ) -> Path:
        """Write an ONNX file, which `load_model` loads and which runs without PyTorch.

        The file has normalization, pooling and whitening inside, and takes any number of images of
        any height and width: input `images`, float32 [batch, 3, height, width] in [0, 1]; output
        `descriptors`, float32 [batch, dim] with unit rows. The settings of the model are in the
        metadata. Before any quantization, the network in the file is compared with this one on
        images of two shapes, and a difference of more than 1e-4 is an error.

        Args:
            path: the file to write, whose name ends with .onnx; with `web`, a folder.
            max_side: programs that use the file reduce photos whose longer side has more pixels
                than this; 0 keeps the original size. By default the size that the model records, or
                512.
            int8: about 100 photos like those to be described, to quantize the network to int8: a
                folder, table, list or data set. The file is smaller and faster, and its
                descriptors are those of another model.
            web: write a folder with `model.onnx`, its settings and an example page that compares
                two photos in a browser.

        Returns:
            The path of the file.

        Raises:
            InputError: the path cannot be written, or the network cannot be exported.

        Examples:
            >>> model.export("model.onnx")                                  # doctest: +SKIP
            >>> listwise.load("model.onnx").encode("chair.jpg").shape       # doctest: +SKIP
            (2048,)
        """
        from listwise.descriptors.exporting import export_model

        if max_side is None and self.tuned is None:
            max_side = default_max_side("cpu")  # where the file runs
        settings = self.settings(max_side)
        photos = None if int8 is None else _decoded(int8, settings.max_side)
        tuned = self.recorded.model_copy(update={"max_side": settings.max_side or 0})
        info = self._info.model_copy(update={"tuned": tuned})
        net = self.trainable("exported again")
        return export_model(net, self.whitening, info, path, photos, web)

    def card(
        self, name: str = "", *, license: str = "unknown", results: Results | None = None
    ) -> str:
        """Return a model card in Markdown: data, settings, training curve, results and license.

        It is written from the files of the model and of its training run, and has no paths of this
        machine, only the names of files and folders.

        Args:
            name: the name of the model; by default that of its folder or backbone.
            license: the identifier of its license, such as apache-2.0.
            results: metrics by benchmark, such as `listwise.evaluate(...).figures`.
        """
        if self.folder is None:
            name = name or self.name
        return write_card(self._info, self.dim, self.folder, name, license, results)

    def push_to_hub(
        self,
        repository: str,
        *,
        license: str = "unknown",
        results: Results | None = None,
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload the model and its card to the Hugging Face Hub; return the address.

        The file is that of `save`: safetensors, no pickles. Paths of this machine are shortened to
        the names of files and folders. `load_model("hub:owner/name")` loads the model.

        Args:
            repository: owner/name; the repository is created if it does not exist.
            license: the identifier of the license of the model, such as apache-2.0.
            results: metrics by benchmark for the card, such as `listwise.evaluate(...).figures`.
            private: whether a new repository is private.
            token: an access token; by default that of `hf auth login`.

        Raises:
            InputError: the hub cannot be reached, or refuses the upload.

        Examples:
            >>> model.push_to_hub("owner/name", license="apache-2.0")       # doctest: +SKIP
            'https://huggingface.co/owner/name'
        """
        from listwise.descriptors.hub import upload

        self.trainable("uploaded")
        content = self.content().with_info(tuned=self.recorded)
        info = ModelInfo.model_validate(shorten_paths(content.info.model_dump(mode="json")))
        card = self.card(repository, license=license, results=results)
        return upload(content._replace(info=info), card, repository, private, token)

    def calibrate(
        self,
        photos: str | Path | LabelledImages,
        *,
        max_side: int | None = None,
        workers: int | None = None,
        progress: bool | None = None,
    ) -> "Model":
        """Return this model with a calibration fitted on labelled photos.

        Use photos of things that the model was not trained on. `listwise.train` calibrates the
        model of a run on its validation photos. `save` writes the calibration with the model.

        Args:
            photos: a folder of class folders, or a table or list with labels.
            max_side: reduce photos whose longer side has more pixels than this; by default the size
                that the model records.
            workers: number of processes that decode photos; by default from the number of CPU
                cores.
            progress: show a progress bar; by default on a terminal.

        Raises:
            InputError: fewer than two labels have several photos, or the probabilities are off by
                more than 0.1 for classes that are left out of the fit.

        Examples:
            >>> model = model.calibrate("validation")       # doctest: +SKIP
            >>> model.calibration.probability(0.8)          # doctest: +SKIP
            array(0.93)
        """
        labelled = photos if isinstance(photos, LabelledImages) else read_labelled(photos)
        with counting("describing", len(labelled), progress) as advance:
            found = self.describe(labelled, max_side=max_side, workers=workers, on_progress=advance)
        labels = labelled.subset(found.kept).labels
        source = "photos" if isinstance(photos, LabelledImages) else str(Path(photos).resolve())
        fitted = fit_calibration(found.descriptors, labels, source)
        return replace(self, calibration=fitted)

    def truncate(self, dim: int) -> "Model":
        """Return a model whose descriptors are the first dimensions of this one's, as unit rows.

        Use it after training with `matryoshka`, or with a whitening, whose first directions have
        the most variance. The calibration of this model does not hold for other descriptors, so
        the new model has none. `save` stores it in a folder of its own.

        Args:
            dim: number of dimensions to keep.

        Examples:
            >>> model.truncate(128).encode("chair.jpg").shape          # doctest: +SKIP
            (128,)
        """
        whole = self.whitening or Whitening.prefix(self.net.dim, self.net.dim)
        return replace(self, whitening=whole.truncate(dim), folder=None, calibration=None)

    @property
    def dim(self) -> int:
        """Number of dimensions of a descriptor."""
        return self.net.dim if self.whitening is None else self.whitening.dim

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.net.mean.device

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of network and whitening: models with the same one give the same descriptors."""
        network = self.net.fingerprint()
        if self.whitening is None:
            return network
        return hashlib.sha256(f"{network} {self.whitening.fingerprint()}".encode()).hexdigest()

    @property
    def teacher(self) -> str | None:
        """Fingerprint of the model whose descriptors this one computes; None for other models."""
        return self.net.config.teacher if self.whitening is None else None

    def settings(
        self,
        max_side: int | None = None,
        scales: Sequence[float] | None = None,
        power: float | None = None,
        precision: Precision | None = None,
    ) -> ExtractSettings:
        """Check the settings, and choose those that are None.

        The defaults are the settings that the model records, or else a long side of 1024 on a GPU
        and 512 on a CPU, one scale and the power 3. A `max_side` of 0 stands for the original size.
        """
        default = self.recorded
        if not isinstance(self.net, RetrievalNet) and precision not in (None, "float32"):
            raise InputError(
                f"{self.folder} computes in the precision that it was exported with: leave out "
                "`precision`"
            )
        found = make_settings(
            default.max_side if max_side is None else max_side,
            default.scales if scales is None else tuple(scales),
            default.power if power is None else power,
            precision or ("bfloat16" if self._machine.bfloat16 else "float32"),
        )
        if self.device.type == "cpu" and (found.max_side or 0) > ORIGINAL_SIDE:
            raise InputError(
                f"photos with a long side of {found.max_side} pixels need too much memory on a "
                f"CPU: give a `max_side` of at most {ORIGINAL_SIDE}, or use a GPU"
            )
        info = None if self.whitening is None else self.whitening.info
        if info is not None and info.max_side is not None:
            same = found.power, found.precision
            learned = make_settings(info.max_side, info.scales, *same)
            # What the model records was validated with this whitening.
            recorded = make_settings(default.max_side, default.scales, *same)
            if found != learned and (self.tuned is None or found != recorded):
                warnings.warn(
                    f"the whitening was learned from {learned.size_text()}, and is used with "
                    f"{found.size_text()}: use the same, or learn it again with listwise whiten "
                    f"{self.folder or 'MODEL'} PHOTOS "
                    f"{as_options(max_side=found.max_side, scales=found.scales)}",
                    ListwiseWarning,
                    stacklevel=3,
                )
        return found

    @property
    def recorded(self) -> ModelSettings:
        """The settings that the model is used with where none are given, with a size."""
        found = self.tuned or ModelSettings()
        if found.max_side is not None:
            return found
        return found.model_copy(update={"max_side": default_max_side(self.device.type)})

    def size_note(self, max_side: int | None = None) -> str:
        """Describe the size of photos that is used for a `max_side`, and where it comes from."""
        side = self.settings(max_side).max_side
        if max_side is not None:
            reason = "as given"
        elif self.tuned is None:
            reason = f"the default on a {'GPU' if self.device.type == 'cuda' else 'CPU'}"
        else:
            reason = "as recorded in the model"
        size = f"reduced to a long side of {side} pixels" if side else "used at their original size"
        if not side and self.device.type == "cpu":
            size += f" of up to {ORIGINAL_SIDE} pixels"
        return f"photos are {size}, {reason}; change it with `max_side`"

    @property
    def _machine(self) -> Machine:
        return Machine.detect(str(self.device))

    def describe(
        self,
        images: Images,
        *,
        max_side: int | None = None,
        scales: Sequence[float] | None = None,
        power: float | None = None,
        precision: Precision | None = None,
        workers: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> Described:
        """Describe N photos in memory, and report those that cannot be read.

        Unlike `encode`, this returns errors instead of raising them. The arguments are those of
        `encode`. Only the box of a photo is used if it has one. `on_progress` is called with the
        number of photos just finished, unreadable ones included.
        """
        settings, count = self.settings(max_side, scales, power, precision), len(images)
        files = images.files()
        (found,) = self.describe_parts(
            files, [count], settings, workers=workers, on_progress=on_progress
        )
        return found

    def describe_parts(
        self,
        files: Iterable[PhotoFile],
        sizes: Iterable[int],
        settings: ExtractSettings,
        *,
        thumbnails: bool = False,
        local: Callable[[Image.Image, tuple[int, int], float], bytes] | None = None,
        workers: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> Generator[Described, None, None]:
        """Describe photos part by part; the result of a part depends only on its own photos.

        `sizes` are the numbers of photos in the parts. `Described.kept` has positions within the
        part. `local` encodes local features, as in `Decoding`.
        """
        network = self._network(settings)
        parts = embed_parts(
            network,
            files,
            sizes,
            Decoding(settings.max_side, thumbnail=thumbnails, local=local),
            describe=_at_scales(network, settings),
            workers=self._machine.workers() if workers is None else workers,
            on_progress=on_progress,
        )
        with explain_lost_workers(), closing(parts):
            for found in parts:
                yield found._replace(descriptors=self._whitened(found.descriptors))

    def describe_photos(
        self,
        photos: Iterable[Image.Image],
        settings: ExtractSettings,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> npt.NDArray[np.float32]:
        """Describe upright RGB photos that are in memory: float32 [n, dim], unit rows.

        The descriptors equal those of the photos' files, except for the small differences between
        decoders if a GPU decodes the files. The network must be in evaluation mode, in which
        `load_model` returns it.
        """
        network = self._network(settings)
        decoded = (self._decoded(photo, settings.max_side) for photo in photos)
        found = embed_decoded(network, decoded, on_progress, _at_scales(network, settings))
        return self._whitened(found.descriptors)

    def _decoded(self, photo: Image.Image, max_side: int | None) -> DecodedPhoto:
        if max_side is None and self.device.type == "cpu":
            check_original_side("the photo", photo.size)
        return DecodedPhoto(whole_image(photo, max_side), photo.size, photo.size)

    def mixes_shapes(self, settings: ExtractSettings) -> bool:
        """Return whether photos of different shapes are described in one batch."""
        return self._network(settings).mixed

    def _network(self, settings: ExtractSettings) -> PhotoNet:
        """Return the network for a precision; it is made again after a change of `net`."""
        state = network_state(self.net)
        known, network = self._networks.get(settings.precision, (None, None))
        if network is None or known != state:
            network = PhotoNet(
                self.net, torch.bfloat16 if settings.precision != "float32" else None
            )
            self._networks[settings.precision] = state, network
        return network

    @cached_property
    def _networks(self) -> dict[Precision, tuple[Hashable, PhotoNet]]:
        return {}

    def _whitened(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return rows if self.whitening is None else self.whitening.apply(rows)


def on_device(net: Network, device: str) -> None:
    """Move a network to a device, in the memory layout that is fastest there."""
    net.to(device)
    if device.startswith("cuda"):
        net.to(memory_format=torch.channels_last)


def _decoded(photos: Photos, max_side: int | None) -> list[torch.Tensor]:
    """Decode some photos, spread over all: uint8 [3, H, W] each."""
    given = list_photos(photos)
    rows = range(0, len(given), max(1, len(given) // QUANTIZED_FROM))[:QUANTIZED_FROM]
    if isinstance(given, Images):
        decoded = decode_photos(given.subset(list(rows)).files(), Decoding(max_side))
        found = [photo.pixels for photo in decoded if isinstance(photo, DecodedPhoto)]
    else:
        found = [whole_image(open_photo(given[row]), max_side) for row in rows]
    if not found:
        raise InputError("`int8` has no photo that can be read: give photos to quantize with")
    return found


def _at_scales(network: PhotoNet, settings: ExtractSettings) -> Describe:
    return partial(describe_scales, network, scales=settings.scales, power=settings.power)
