"""Photos to a descriptor file, in parts, so that an interrupted run can be continued."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

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
        on_note: called with a sentence when earlier work is used, or discarded.
    """
    settings = model.settings(max_side, scales, power, precision)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    how = f"{model.fingerprint} {settings.model_dump_json()}"
    parts = Parts(DescriptorFile, Path(out), images, size, how)
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
