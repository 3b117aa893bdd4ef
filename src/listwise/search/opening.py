"""Open, create and check indexes in folders and in Milvus."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from listwise.data import Images
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.search.checking import CheckResult
from listwise.search.engines import create_store, engine_of, open_store, store_exists
from listwise.search.generation import Generation, header_of, open_model
from listwise.search.index import Index, NewIndex
from listwise.settings import ExtractSettings, as_options

if TYPE_CHECKING:
    from listwise.descriptors import DescriptorFile, Model


def open_index(
    uri: str | Path,
    model: "Model | str | Path | None" = None,
    *,
    max_side: int | None = None,
    scales: Sequence[float] | None = None,
    power: float | None = None,
    device: str = "auto",
    create: bool = True,
    on_note: Callable[[str], object] = lambda note: None,
) -> Index:
    """Open an index; one that does not exist is created when photos are added to it.

    Args:
        uri: a folder, `milvus://host:port/name`, or a `.db` file of milvus-lite.
        model: the model that computes descriptors: a `Model`, its folder, or the name of a timm
            backbone. An existing index knows its model. A new index without `model` uses a
            pretrained backbone that suits this machine.
        max_side: reduce photos whose longer side has more pixels than this; 0 keeps the original
            size. By default the size that the model records, or 1024 on a GPU and 512 on a CPU.
        scales: scales at which each photo is described, such as 1,0.7071,0.5; by default those of a
            tuned model, or 1.
        power: power of the generalized mean over the descriptors of several scales; by default 3.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        create: if False, an index that does not exist is an error.
        on_note: called with a sentence about what was chosen.
    """
    place = str(uri)
    given: dict[str, Any] = {"max_side": max_side, "scales": scales, "power": power}
    if not create or store_exists(place):
        store = open_store(place)
        try:
            another = "build another index with listwise index build INDEX PHOTOS"
            _check_settings(place, store.header.settings, given, another)
            return Index(store, None if model is None else open_model(model, device), device)
        except BaseException:
            store.close()
            raise
    if model is None:
        from listwise.models.backbone import choose_backbone

        model, reason = choose_backbone(Machine.detect(device))
        on_note(
            f"using the pretrained model {model}, because {reason}; choose another with `model`"
        )
    opened = open_model(model, device)
    on_note(opened.size_note(max_side))
    header = header_of(opened, **given)

    def create_index() -> Generation:
        if store_exists(place):  # another process has created it meanwhile
            return open_index(uri, opened, **given, device=device).generation
        return Generation(create_store(place, header), opened, device)

    return Index(NewIndex(place, opened, header, create_index))


def open_index_for(
    uri: str | Path,
    sources: "Sequence[Images | DescriptorFile]",
    model: str | Path | None = None,
    **settings: Any,
) -> Index:
    """Open or create an index for these sources, with the settings of descriptor files."""
    from listwise.descriptors import DescriptorFile

    files = [source for source in sources if isinstance(source, DescriptorFile)]
    if not files or store_exists(str(uri)):
        return open_index(uri, model, **settings)
    if model is None:
        raise InputError(
            f"{files[0].path} holds descriptors: give the model that computed them as `model`"
        )
    opened = open_model(model, settings.get("device", "auto"))
    for file in files:
        if file.model != opened.fingerprint:
            raise InputError(
                f"{file.path} holds descriptors of the model {file.model[:12]}, not of {model}: "
                "give the model that computed them as `model`"
            )
    file = files[0]
    made = file.settings.arguments()
    del made["precision"]
    given = {name: settings.get(name) for name in made}
    again = f"extract the photos again with listwise extract {model} PHOTOS {file.path}"
    _check_settings(f"{file.path}", file.settings, given, again)
    return open_index(uri, opened, **{**settings, **made})


def check_index(
    uri: str | Path,
    model: "Model | str | Path | None" = None,
    *,
    photos: bool = False,
    repair: bool = False,
    device: str = "auto",
    progress: bool | None = None,
) -> CheckResult:
    """Check an index, even one that is too damaged to be opened, and repair it if requested.

    If files are damaged and `repair` is False, its entries are not read.

    Args:
        uri: a folder, `milvus://host:port/name`, or a `.db` file of milvus-lite.
        model: the model of the index if its folder has moved.
        photos: read the photos too, and report those that have changed.
        repair: repair what is damaged; see `Index.check`.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        progress: show a progress bar; by default on a terminal.

    Example:
        >>> check_index("shop", repair=True).ok              # doctest: +SKIP
        True
    """
    engine, place = engine_of(str(uri))
    files = engine.check_files(place, repair) if engine.exists(place) else []
    if files and not repair:
        return CheckResult(damaged=files)
    with open_index(uri, model, device=device, create=False) as index:
        result = index.check(photos=photos, repair=repair, progress=progress)
    return replace(result, damaged=files + result.damaged, repaired=files + result.repaired)


def _check_settings(
    source: str, settings: ExtractSettings, given: dict[str, Any], instead: str
) -> None:
    """Refuse settings other than those of an index or a descriptor file."""
    for name, value in given.items():
        has = getattr(settings, name)
        if value is not None and (tuple(value) if name == "scales" else value or None) != has:
            raise InputError(
                f"{source} was created with {as_options(**{name: has})}: leave `{name}` out, or "
                f"{instead} {as_options(**{name: value})}"
            )
