"""Decode photos on a GPU: usual JPEG files on the GPU, all other files on the CPU."""

import io
import math
import struct
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from listwise.data.headers import MAX_PARTS
from listwise.data.images import ORIENTATION_TAG, ImageError, clip_box, exif_orientation, opened
from listwise.data.photos import (
    THUMBNAIL_SIDE,
    DecodedPhoto,
    Decoding,
    PhotoFile,
    decode_or_error,
    reduced_size,
    thumbnail,
)
from listwise.errors import InputError
from listwise.machine import submit_ahead
from listwise.optional import runs_triton

GROUP = 8  # files that a thread reads at a time
GROUPS_AHEAD = 32
# Photos decoded at a time: enough to use all decoders of a GPU, few enough for its memory.
CHUNK = 128
FIRST_CHUNK = 16  # so that the network starts early
CHUNK_PIXELS = 2**26

# Chroma subsamplings that every JPEG decoder supports.
_SAMPLINGS = {((h, v), (1, 1), (1, 1)) for h, v in ((1, 1), (2, 1), (1, 2), (2, 2))} | {((1, 1),)}

# Segments of a JPEG file before its pixels that do not change the colors, and others.
_HARMLESS = {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xEE), 0xEF}
_EXIF, _MORE_PICTURES, _ADOBE, _FRAME, _SCAN = 0xE1, 0xE2, 0xEE, 0xC0, 0xDA
# How EXIF data, with either byte order, and XMP name the orientation.
_ORIENTATIONS = (b"\x01\x12", b"\x12\x01", b"tiff:Orientation")

# For each EXIF orientation above 4 the photo is transposed; then these sides are mirrored.
_MIRRORED = {1: (), 2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


class _ReadFile(NamedTuple):
    """A file that was read, its width and height; `usual` if the GPU can decode it."""

    file: PhotoFile
    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    usual: bool = False


Result = DecodedPhoto | ImageError


class _JpegDecoder(NamedTuple):
    """A function that decodes a list of JPEG files, and whether it applies their orientation."""

    decode: Callable[[list[Tensor], torch.device], list[Tensor]]
    turns: bool


def gpu_decodes(device: torch.device) -> bool:
    """Return whether a device can decode and resample photos; tests it once."""
    return device.type == "cuda" and runs_triton(device) and _jpeg_decoder(device) is not None


def decode_on_gpu(
    files: Iterable[PhotoFile], how: Decoding, device: torch.device, threads: int
) -> Generator[list[Result], None, None]:
    """Decode photos onto a device, a chunk at a time, in order; errors take a photo's place.

    A chunk is ready on the CUDA stream that is current when the chunk is requested. Its memory may
    have been freed on that stream before. Files are read ahead.

    The device decodes JPEG files with the usual colors and layout. Threads read the files, and
    decode all others; only these use `how.min_side`.
    """
    pool = ThreadPoolExecutor(threads, "photos")
    try:
        started: list[tuple[_ReadFile, Future[Result] | None]] | None = None
        for chunk in _chunks(_read_ahead(pool, iter(files))):
            # The CPU decodes its photos of a chunk while the GPU decodes the previous chunk.
            upcoming = [
                (each, None if each.usual else pool.submit(decode_or_error, each.file, how))
                for each in chunk
            ]
            if started is not None:
                yield _finish(started, pool, how, device)
            started = upcoming
        if started is not None:
            yield _finish(started, pool, how, device)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(pool: ThreadPoolExecutor, files: Iterator[PhotoFile]) -> Iterator[_ReadFile]:
    def read(group: list[PhotoFile]) -> list[_ReadFile]:
        return list(map(_read_file, group))

    groups = iter(lambda: list(islice(files, GROUP)), [])
    return chain.from_iterable(submit_ahead(pool, read, groups, GROUPS_AHEAD))


def _chunks(files: Iterator[_ReadFile]) -> Iterator[list[_ReadFile]]:
    chunk: list[_ReadFile] = []
    pixels, size = 0, min(FIRST_CHUNK, CHUNK)
    for file in files:
        more = math.prod(file.size)
        if chunk and (len(chunk) == size or pixels + more > CHUNK_PIXELS):
            yield chunk
            chunk, pixels = [], 0
            size = min(2 * size, CHUNK)
        chunk.append(file)
        pixels += more
    if chunk:
        yield chunk


def _read_file(file: PhotoFile) -> _ReadFile:
    """Read a file, and decide whether the GPU decodes it as the CPU would (`usual`)."""
    try:
        file = file.read()
        content = file.content or b""
        usual = usual_jpeg(content)
        if usual is not None and not usual[1] and math.prod(usual[0]) <= CHUNK_PIXELS:
            return _ReadFile(file, usual[0], usual=True)
        with opened(io.BytesIO(content)) as image:
            if usual is None or math.prod(image.size) > CHUNK_PIXELS:
                return _ReadFile(file, image.size)
            return _ReadFile(file, image.size, exif_orientation(image), usual=True)
    except ImageError:
        return _ReadFile(file)  # decoding reports the error


def usual_jpeg(content: bytes) -> tuple[tuple[int, int], bool] | None:
    """Read the header of a whole baseline JPEG file in gray or YCbCr, as every decoder does.

    Returns its width and height, and whether it may have an orientation; None for any other file.
    Pillow takes several times as long, in Python code that keeps other threads from running.
    """
    place, turned, size = 2, False, (0, 0)
    # The decoder of a GPU does not report a truncated file.
    whole = content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")
    for _ in range(MAX_PARTS if whole else 0):
        try:
            start, marker, length = struct.unpack_from(">BBH", content, place)
            segment = content[place + 4 : place + 2 + length]
            if marker == _FRAME and size == (0, 0):
                bits, height, width, _ = struct.unpack_from(">BHHB", segment)
                samplings = tuple((each >> 4, each & 15) for each in segment[7::3])
                known = samplings in _SAMPLINGS and segment[6::3] != b"RGB"
                size = (width, height) if known and bits == 8 else (0, 0)
        except struct.error:
            break
        if start == 0xFF and marker == _SCAN:
            return (size, turned) if all(size) else None
        usual = marker in _HARMLESS or (marker == _FRAME and all(size))
        usual |= marker == _ADOBE and segment[11:12] == b"\x01"  # YCbCr
        if start != 0xFF or not usual:
            break
        if marker == _MORE_PICTURES and segment.startswith(b"MPF\0"):
            break
        # A segment without these bytes has no orientation.
        turned |= marker == _EXIF and any(each in segment for each in _ORIENTATIONS)
        place += 2 + length
    return None


def _finish(
    started: list[tuple[_ReadFile, Future[Result] | None]],
    pool: ThreadPoolExecutor,
    how: Decoding,
    device: torch.device,
) -> list[Result]:
    """Return the photos of a chunk; the CPU is already decoding some of them."""
    decoded = iter(_decode([each for each, decoding in started if decoding is None], device))
    photos: list[Result | Future[Result]] = []
    for each, decoding in started:
        photo = next(decoded) if decoding is None else decoding
        photos.append(photo or pool.submit(decode_or_error, each.file, how))
    on_gpu = [i for i, photo in enumerate(photos) if isinstance(photo, DecodedPhoto)]
    finished = _reduce([photos[i] for i in on_gpu], how, pool)  # type: ignore[misc]
    for i, photo in zip(on_gpu, finished, strict=True):
        photos[i] = photo
    return [_moved(each.result(), device) if isinstance(each, Future) else each for each in photos]


def _decode(files: list[_ReadFile], device: torch.device) -> list[Result | None]:
    """Decode upright photos and cut out their boxes; None where the decoder failed."""
    if not files:
        return []
    contents = [_to_tensor(each.file.content or b"") for each in files]
    try:
        decoded = decode_jpegs(contents, device)
    except RuntimeError:
        if len(files) == 1:
            return [None]
        # One bad file makes the whole call fail, so decode the files one by one.
        return [photo for file in files for photo in _decode([file], device)]
    decoder = _jpeg_decoder(device)
    turned = decoder is not None and decoder.turns
    return [_cut(file, photo, turned) for file, photo in zip(files, decoded, strict=True)]


def _cut(read: _ReadFile, photo: Tensor, turned: bool) -> Result | None:
    width, height = read.size
    if turned and read.orientation > 4:
        width, height = height, width
    if photo.shape != (3, height, width):
        return None
    if not turned and read.orientation > 1:
        photo = photo.transpose(1, 2) if read.orientation > 4 else photo
        photo = photo.flip(_MIRRORED[read.orientation]).contiguous()
    whole = photo.shape[2], photo.shape[1]
    if read.file.box is None:
        return DecodedPhoto(photo, whole, whole)
    try:
        left, top, right, bottom = clip_box(read.file.path, read.file.box, whole)
    except ImageError as error:
        return error
    box = photo[:, top:bottom, left:right]
    return DecodedPhoto(box, (right - left, bottom - top), whole, (left, top))


def _reduce(
    photos: list[DecodedPhoto], how: Decoding, pool: ThreadPoolExecutor
) -> list[DecodedPhoto]:
    """Reduce photos on their GPU, and add thumbnails."""
    if how.thumbnail:
        small = _resized([photo.pixels for photo in photos], THUMBNAIL_SIDE)
        photos = [
            photo._replace(thumbnail=content)
            for photo, content in zip(photos, pool.map(_jpeg, small), strict=True)
        ]
    if how.max_side is None:
        return photos
    reduced = _resized([photo.pixels for photo in photos], how.max_side)
    return [photo._replace(pixels=pixels) for photo, pixels in zip(photos, reduced, strict=True)]


def _resized(photos: list[Tensor], max_side: int) -> list[Tensor]:
    """Reduce the long sides of photos to `max_side`; equal target sizes together."""
    found = list(photos)
    sizes: dict[tuple[int, int], list[int]] = {}
    for position, photo in enumerate(photos):
        _, height, width = photo.shape
        size = reduced_size(width, height, max_side)
        if size != (width, height):
            sizes.setdefault(size, []).append(position)
    for (width, height), group in sizes.items():
        from listwise.data.gpu_resample import resize_photos  # needs Triton

        made = resize_photos([photos[position] for position in group], width, height)
        for position, photo in zip(group, made, strict=True):
            found[position] = photo
    return found


def _jpeg(photo: Tensor) -> bytes:
    return thumbnail(Image.fromarray(photo.cpu().permute(1, 2, 0).contiguous().numpy()))


def decode_jpegs(contents: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decode JPEG files, given as uint8 tensors on the CPU, to RGB photos uint8 [3, H, W]."""
    decoder = _jpeg_decoder(device)
    if decoder is None:
        raise RuntimeError(f"neither torchcodec nor torchvision can decode JPEG files on {device}")
    if device.type == "cuda":
        # The decoder of a GPU may write into memory that kernels of this stream have yet to read:
        # it does not wait for them.
        torch.cuda.current_stream(device).synchronize()
        # torchvision creates a new decoder whenever the device name changes.
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    return decoder.decode(contents, device)


@cache
def _jpeg_decoder(device: torch.device) -> _JpegDecoder | None:
    """Find a decoder that works on a device with a trial: torchcodec's, then torchvision's."""
    sideways = Image.Exif()
    sideways[ORIENTATION_TAG] = 6
    file = io.BytesIO()
    Image.new("RGB", (32, 16)).save(file, "JPEG", exif=sideways)
    for load in (_load_torchcodec, _load_torchvision):
        try:
            decode = load()
            (photo,) = decode([_to_tensor(file.getvalue())], device)
        except Exception:  # one of several parts may be missing, each with its own error
            continue
        return _JpegDecoder(decode, turns=photo.shape == (3, 32, 16))
    return None


def _load_torchcodec() -> Callable[[list[Tensor], torch.device], list[Tensor]]:
    # Version 0.16 or later; it replaces torchvision's decoder.
    from torchcodec.decoders import decode_jpeg

    return lambda contents, device: decode_jpeg(contents, mode="RGB", device=device)


def _load_torchvision() -> Callable[[list[Tensor], torch.device], list[Tensor]]:
    from torchvision.io import ImageReadMode, decode_jpeg

    settings: dict[str, Any] = {"mode": ImageReadMode.RGB}
    return lambda contents, device: decode_jpeg(contents, device=device, **settings)


def _to_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _moved(photo: Result, device: torch.device) -> Result:
    if isinstance(photo, ImageError):
        return photo
    try:
        return photo._replace(pixels=photo.pixels.to(device))
    except torch.OutOfMemoryError as error:
        _, height, width = photo.pixels.shape
        raise InputError(
            f"a photo of {width} × {height} does not fit into the memory of the GPU: "
            "use a smaller `micro_batch`, or smaller photos"
        ) from error
