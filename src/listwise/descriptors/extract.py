"""Photos to a descriptor file, in parts, so that an interrupted run can go on."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from listwise.data import Images
from listwise.descriptors.model import Model
from listwise.descriptors.parts import open_parts, parts_key, remove_parts
from listwise.descriptors.settings import Precision
from listwise.descriptors.storage import (
    DescriptorFile,
    DescriptorWriter,
    Header,
    is_descriptor_file,
)
from listwise.errors import InputError
from listwise.files import publish

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
        workers: processes that decode, or threads that read files where the GPU decodes; from
            the cores by default.
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
    how = f"{model.fingerprint} {settings.model_dump_json()} {size}"
    open_parts(partial, ".parquet", parts_key(how, images), on_note)

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
    # Beside the parts, so that what a kill leaves of it goes with them.
    joined = partial / "joined.parquet"
    _join([DescriptorFile.open(file) for file in files], joined)
    publish(joined, out)
    remove_parts(partial, ".parquet")
    return DescriptorFile.open(out)


def _usable(part: Path, strict: bool) -> bool:
    """Whether a part is done; it is in its place only when it is whole."""
    return part.exists() and not (strict and DescriptorFile.open(part).header.unreadable)


def _join(parts: list[DescriptorFile], out: Path) -> None:
    errors = tuple(error for part in parts for error in part.header.unreadable)
    if not any(len(part) for part in parts):
        raise InputError(f"none of the {len(errors)} photos can be read; the first: {errors[0]}")
    header = parts[0].header.model_copy(update={"unreadable": errors})
    with DescriptorWriter(out, parts[0].dim, header) as writer:
        for part in parts:
            writer.write(part.ids, part.sizes, part.read())
