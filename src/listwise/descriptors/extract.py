"""Photos to a descriptor file, in parts, so that an interrupted run can go on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from listwise.data import Images
from listwise.descriptors.model import Model
from listwise.descriptors.settings import ExtractSettings, Precision
from listwise.descriptors.storage import (
    DescriptorFile,
    DescriptorWriter,
    Header,
    is_descriptor_file,
)
from listwise.errors import InputError
from listwise.files import write_text

# Photos in a part, which is what a kill can cost: some seconds on a GPU, a minute without.
PART = {"cpu": 64, "cuda": 2048}
KEY_FILE = "listwise.key"


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
    """Put the descriptors of photos into a file; an interrupted run goes on where it was.

    What is done lies in `OUT.partial/` until the end, and is used by the next run of the same
    model, settings and photos. The values are those of an unbroken run. Photos that cannot be read
    are left out and named in the file's `header.unreadable`.

    Args:
        model: the network, with or without whitening.
        images: photos; each one's box is cut out first, if it has one.
        out: the file, conventionally `.parquet`.
        max_side: as for `Model.describe`, like the next three.
        scales: sizes at which each photo is seen, as factors.
        power: of the mean over the scales.
        precision: bfloat16 on a GPU that has it, else float32, by default.
        strict: stop at the first photo that cannot be read.
        workers: processes that decode; from the cores by default.
        on_progress: called with the number of photos just done.
        on_note: called with a sentence when earlier work is used, or thrown away.
    """
    out = Path(out)
    settings = model.settings(max_side, scales, power, precision)
    if not len(images):
        raise InputError("there are no photos to extract descriptors from")
    if out.exists() and not is_descriptor_file(out):
        raise InputError(f"{out} exists and is no descriptor file: give another name")
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    parts = [range(i, min(i + size, len(images))) for i in range(0, len(images), size)]
    partial = out.with_name(f"{out.name}.partial")
    _open_partial(partial, _key(model, images, settings, size), on_note)

    files = [partial / f"{part.start:09d}.parquet" for part in parts]
    missing = [number for number, file in enumerate(files) if not _usable(file, strict)]
    done = len(images) - sum(len(parts[number]) for number in missing)
    if done:
        on_note(f"{done} of {len(images)} photos were done before")
        on_progress(done)
    described = model.describe_parts(
        images, [parts[number] for number in missing], settings, workers, on_progress
    )
    with closing(described):
        for number, found in zip(missing, described, strict=True):
            if strict and found.errors:
                raise InputError(found.errors[0])
            header = Header(
                model=model.fingerprint,
                whitened=model.whitening is not None,
                settings=settings,
                unreadable=tuple(found.errors),
            )
            with DescriptorWriter(files[number], model.dim, header) as writer:
                ids = [images.ids[i] for i in found.kept]
                writer.write(ids, found.sizes, found.descriptors)
    result = _join([DescriptorFile.open(file) for file in files], out)
    _remove(partial)
    return result


def _usable(part: Path, strict: bool) -> bool:
    """Whether a part is done; it is in its place only when it is whole."""
    return part.exists() and not (strict and DescriptorFile.open(part).header.unreadable)


def _join(parts: list[DescriptorFile], out: Path) -> DescriptorFile:
    errors = tuple(error for part in parts for error in part.header.unreadable)
    if not any(len(part) for part in parts):
        raise InputError(f"none of the {len(errors)} photos can be read; the first: {errors[0]}")
    header = parts[0].header.model_copy(update={"unreadable": errors})
    with DescriptorWriter(out, parts[0].dim, header) as writer:
        for part in parts:
            writer.write(part.ids, part.sizes, part.read())
    return DescriptorFile.open(out)


def _key(model: Model, images: Images, settings: ExtractSettings, size: int) -> str:
    """Names a run: what has the same key has the same parts."""
    digest = hashlib.sha256(f"{model.fingerprint} {settings.model_dump_json()} {size}".encode())
    for index in range(len(images)):
        entry = (images.ids[index], images.paths[index], images.box(index))
        digest.update(json.dumps(entry).encode())
    return digest.hexdigest()


def _open_partial(folder: Path, key: str, on_note: Callable[[str], object]) -> None:
    """Make the folder of a run's parts, emptied if they are another run's."""
    name = folder / KEY_FILE
    try:
        if name.exists() and name.read_text(encoding="utf-8") != key:
            on_note(f"{folder} is of another model, other settings or photos: starting over")
            _remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not name.exists():
            if any(folder.glob("*.parquet")):
                raise InputError(f"{folder} is in the way: move it, or give another name")
            write_text(name, key)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def _remove(folder: Path) -> None:
    """Remove a run's parts and nothing else, the key last: with it, a rest is known for ours."""
    for file in [*folder.glob("*.parquet*"), *folder.glob(f"{KEY_FILE}*")]:
        file.unlink(missing_ok=True)
    folder.rmdir()
