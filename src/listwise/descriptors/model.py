"""`Model`: a network and its whitening, which turn photos into descriptors."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

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
from listwise.data.given import Photos, image_files, is_one_photo, list_photos, open_photo
from listwise.data.images import ImageError
from listwise.data.workers import explain_lost_workers
from listwise.descriptors.card import Results, shorten_paths, write_card
from listwise.descriptors.scales import describe_scales
from listwise.descriptors.settings import ExtractSettings, Precision, make_settings
from listwise.descriptors.tuned import SETTINGS_FILE, TunedSettings
from listwise.descriptors.whitening import WHITENING_FILE, Whitening
from listwise.errors import InputError
from listwise.files import write_text
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.calibration import CALIBRATION_FILE, Calibration, fit_calibration
from listwise.models.embed import (
    FOLDED_PHOTOS,
    Describe,
    PhotoNet,
    embed_decoded,
    embed_parts,
    inference_network,
)
from listwise.models.onnx_net import Network, OnnxNet
from listwise.progress import FEW, counting

QUANTIZED_FROM = 100  # photos on which the ranges of int8 are measured
IN_MEMORY = 64  # photos given as images or arrays that are described together


class Described(NamedTuple):
    """Descriptors of the photos that could be read, and the errors of the others.

    Attributes:
        descriptors: float32 [n, D], unit rows.
        kept: positions of the n photos.
        errors: a message for each photo that could not be read.
        sizes: widths and heights of the photos or their boxes, int32 [n, 2].
        thumbnails: a small JPEG file of each photo, empty if not requested.
        local: encoded local features of each photo, empty if not requested.
    """

    descriptors: npt.NDArray[np.float32]
    kept: list[int]
    errors: list[str]
    sizes: npt.NDArray[np.int32]
    thumbnails: list[bytes]
    local: list[bytes]


@dataclass(frozen=True, eq=False)
class Model:
    """A network and the whitening of its descriptors; `load_model` loads one.

    Attributes:
        net: the network, images [B, 3, H, W] -> [B, C]: a `RetrievalNet`, or an `OnnxNet` for an
            ONNX file.
        whitening: applied to the network's descriptors, [n, C] -> [n, dim]; None for none.
        folder: the folder or ONNX file that the model was loaded from, or was saved to.
        name: the timm backbone, if the model was loaded by its name.
        calibration: turns scores into the probability that two photos show the same thing; None
            for a model that is not calibrated.
        tuned: the settings that `listwise.tune` chose, which apply where you give none; None for a
            model that is not tuned.

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
    tuned: TunedSettings | None = None

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
        workers: int | None = None,
        progress: bool | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the descriptors of photos: float32 [n, dim], unit rows; [dim] for a single photo.

        Args:
            photos: one photo (an image file, a Pillow image, or pixels uint8 [height, width, 3]),
                a list of them, or a folder, table, text list or data set of photos.
            max_side: long side that larger photos are reduced to; 0 for their original size. By
                default that of a tuned model, or the original size.
            scales: sizes at which each photo is described, as factors; by default those of a tuned
                model, or (1.0,).
            power: power of the mean over the scales (see `power_mean`); 3 by default.
            precision: "float32" or "bfloat16"; by default bfloat16 on a GPU that supports it. The
                cosine between the two descriptors of a photo is 0.999 or more (ResNet-50, photos).
            workers: processes that decode photos, or threads that read files if the GPU decodes
                them; chosen from the number of cores by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.

        Raises:
            ImageError: photos cannot be read; the message names them.
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
        # Starting processes takes longer than decoding a few photos.
        workers = 0 if workers is None and len(images) <= FEW else workers
        found = self._describe(images, settings, workers, advance)
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
        """Write the network, whitening and settings into a folder that `load_model` can load."""
        self._trainable("saved as a folder").save(folder)
        if self.whitening is not None:
            self.whitening.save(folder, self.net.fingerprint())
        else:
            (Path(folder) / WHITENING_FILE).unlink(missing_ok=True)
        if self.calibration is not None:
            self.calibration.save(folder)
        else:
            (Path(folder) / CALIBRATION_FILE).unlink(missing_ok=True)
        if self.tuned is not None:
            self.tuned.save(folder)
        else:
            (Path(folder) / SETTINGS_FILE).unlink(missing_ok=True)
        object.__setattr__(self, "folder", Path(folder).absolute())

    def _trainable(self, purpose: str) -> RetrievalNet:
        """Return the network, or refuse that of an ONNX file."""
        if isinstance(self.net, OnnxNet):
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
        opset: int = 18,
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
            max_side: long side to which users of the file reduce larger photos unless they choose
                another; by default that of a tuned model, or the original size (512 with `web`).
            int8: about 100 photos like those to be described, to quantize the network to int8: a
                folder, table, list or data set. The file is smaller and faster, and its
                descriptors are those of another model.
            opset: the version of ONNX's operators, from 18 to 23.
            web: write a folder with the file `model.onnx`, its settings and an example page that
                compares two photos in a browser.

        Returns:
            The path of the file.

        Raises:
            InputError: the path cannot be written, or the network cannot be exported.

        Examples:
            >>> model.export("model.onnx")                                  # doctest: +SKIP
            >>> listwise.load("model.onnx").encode("chair.jpg").shape       # doctest: +SKIP
            (2048,)
        """
        from listwise.descriptors.exporting import export_network

        net = self._trainable("exported again")
        if web:
            from listwise.descriptors.web_folder import MAX_SIDE, add_page, make_folder

            path = make_folder(path)
            if max_side is None and self.tuned is None:
                max_side = MAX_SIDE
        settings = self.settings(max_side)
        tuned = self.tuned
        if settings.max_side != (tuned and tuned.max_side):
            tuned = tuned or TunedSettings(network="")
            tuned = tuned.model_copy(update={"max_side": settings.max_side})
        photos = None if int8 is None else self._decoded(int8, settings)
        info = export_network(
            path, net, self.whitening, tuned, self.calibration, opset=opset, photos=photos
        )
        if web:
            add_page(Path(path).parent, info)
        return Path(path)

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
        folder = self.folder
        run = None if folder is None else folder.parent
        known = run.name if run and folder and folder.name == "model" else folder and folder.name
        return write_card(
            name or known or self.name or "model",
            self.net.config,
            self.dim,
            self.whitening,
            self.tuned,
            run=run,
            license=license,
            results=results,
        )

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

        The files are those of `save`: safetensors and JSON, no pickles. Paths of this machine are
        shortened to the names of files and folders. `load_model("hub:owner/name")` loads the model.

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
        from listwise.descriptors.hub import CARD_FILE, upload

        self._trainable("uploaded")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            replace(self).save(folder)
            for path in folder.glob("*.json"):
                content = shorten_paths(json.loads(path.read_text(encoding="utf-8")))
                write_text(path, json.dumps(content, indent=2) + "\n")
            card = self.card(repository, license=license, results=results)
            write_text(folder / CARD_FILE, card)
            return upload(folder, repository, private, token)

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
            max_side: the long side that larger photos are reduced to, as in `encode`.
            workers: the number of processes that decode; chosen from the cores by default.
            progress: show a progress bar; by default on a terminal.

        Raises:
            InputError: no two photos have the same label, or all have the same one.

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
        fitted = fit_calibration(found.descriptors, labels, self.fingerprint, source)
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

        The defaults are the tuned settings of the model, or else the original size, one scale and
        the power 3. A `max_side` of 0 stands for the original size.
        """
        default = self.tuned or TunedSettings(network="")
        if isinstance(self.net, OnnxNet) and precision not in (None, "float32"):
            raise InputError(
                f"{self.folder} computes in the precision that it was exported with: leave out "
                "`precision`"
            )
        return make_settings(
            default.max_side if max_side is None else max_side,
            default.scales if scales is None else tuple(scales),
            default.power if power is None else power,
            precision or ("bfloat16" if self._machine.bfloat16 else "float32"),
        )

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
        settings = self.settings(max_side, scales, power, precision)
        return self._describe(images, settings, workers, on_progress)

    def _describe(
        self,
        images: Images,
        settings: ExtractSettings,
        workers: int | None,
        on_progress: Callable[[int], object],
    ) -> Described:
        (found,) = self.describe_parts(
            images.files(),
            [len(images)],
            settings,
            photos=len(images),
            workers=workers,
            on_progress=on_progress,
        )
        return found

    def describe_parts(
        self,
        files: Iterable[PhotoFile],
        sizes: Iterable[int],
        settings: ExtractSettings,
        *,
        photos: int = 1,
        thumbnails: bool = False,
        local: Callable[[Image.Image, tuple[int, int], float], bytes] | None = None,
        workers: int | None = None,
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> Generator[Described, None, None]:
        """Describe photos part by part; the result of a part depends only on its own photos.

        `sizes` are the numbers of photos in the parts. `Described.kept` has positions within the
        part. `photos` is the number of all photos: a CPU describes many with a faster copy of the
        network, whose descriptors differ in the last digits. `local` encodes local features, as in
        `Decoding`.
        """
        network = self._network(settings, photos)
        with (
            explain_lost_workers(),
            closing(
                embed_parts(
                    self.net,
                    files,
                    sizes,
                    Decoding(settings.max_side, thumbnail=thumbnails, local=local),
                    describe=self._describing(settings, network),
                    mixed=network.mixed,
                    workers=self._machine.workers() if workers is None else workers,
                    autocast=_autocast(settings),
                    on_progress=on_progress,
                )
            ) as parts,
        ):
            for found in parts:
                rows = self._whitened(found.descriptors)
                shapes = np.array(found.sizes, dtype=np.int32).reshape(-1, 2)
                yield Described(
                    rows, found.kept, found.errors, shapes, found.thumbnails, found.local
                )

    def describe_photos(
        self, photos: Sequence[Image.Image], settings: ExtractSettings
    ) -> npt.NDArray[np.float32]:
        """Describe upright RGB photos that are in memory: float32 [n, dim], unit rows.

        The descriptors equal those of the photos' files, except for the small differences between
        decoders if a GPU decodes the files. The network must be in evaluation mode, in which
        `load_model` returns it.
        """
        found = embed_decoded(
            (
                DecodedPhoto(whole_image(photo, settings.max_side), photo.size, photo.size)
                for photo in photos
            ),
            self._describing(settings, self._network(settings)),
            self.net.dim,
            self.device,
            _autocast(settings),
            mixed=self._network(settings).mixed,
        )
        return self._whitened(found.descriptors)

    def mixes_shapes(self, settings: ExtractSettings) -> bool:
        """Return whether photos of different shapes are described in one batch.

        This needs a GPU, and a network for which it does not change the descriptors.
        """
        return self._network(settings).mixed

    @staticmethod
    def _describing(settings: ExtractSettings, network: PhotoNet) -> Describe:
        """Return a function that computes the descriptors [B, C] of photos."""
        return partial(describe_scales, network, scales=settings.scales, power=settings.power)

    def _network(self, settings: ExtractSettings, photos: int = 1) -> PhotoNet:
        if settings.precision != "float32":
            return self._half_network
        if photos < FOLDED_PHOTOS or self.device.type != "cpu":
            return self._full_network
        return PhotoNet(self.net, None, inference_network(self.net, None, photos))

    @cached_property
    def _full_network(self) -> PhotoNet:
        return PhotoNet(self.net, None)

    @cached_property
    def _half_network(self) -> PhotoNet:
        return PhotoNet(self.net, torch.bfloat16)

    def _decoded(self, photos: Photos, settings: ExtractSettings) -> list[torch.Tensor]:
        """Decode some photos, spread over all: uint8 [3, H, W] each."""
        given = list_photos(photos)
        step = max(1, len(given) // QUANTIZED_FROM)
        rows = range(0, len(given), step)[:QUANTIZED_FROM]
        if isinstance(given, Images):
            chosen = given.subset(list(rows))
            decoded = decode_photos(chosen.files(), Decoding(settings.max_side))
            found = [photo.pixels for photo in decoded if isinstance(photo, DecodedPhoto)]
        else:
            opened = (open_photo(given[row]) for row in rows)
            found = [whole_image(photo, settings.max_side) for photo in opened]
        if not found:
            raise InputError("`int8` has no photo that can be read: give photos to quantize with")
        return found

    def _whitened(self, descriptors: torch.Tensor) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = descriptors.float().numpy()
        return rows if self.whitening is None else self.whitening.apply(rows)


def _autocast(settings: ExtractSettings) -> torch.dtype | None:
    return None if settings.precision == "float32" else torch.bfloat16
