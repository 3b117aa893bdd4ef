"""Opening an index, or making one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from listwise.data import Images
from listwise.descriptors import DescriptorFile, Model, load_model
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.models.choice import choose_backbone
from listwise.search.engines import create_store, open_store, store_exists
from listwise.search.header import check_settings, header_of
from listwise.search.index import Index


def open_index(
    uri: str | Path,
    model: Model | str | Path | None = None,
    *,
    max_side: int | None = None,
    scales: Sequence[float] | None = None,
    power: float | None = None,
    device: str = "auto",
    create: bool = True,
    on_note: Callable[[str], object] = lambda note: None,
) -> Index:
    """Open an index, or make one where there is none.

    Args:
        uri: a folder, `milvus://host:port/name`, or a `.db` file of milvus-lite.
        model: the model that describes photos: a `Model`, its folder, or the name of a timm
            backbone. An index remembers its model, so one that exists needs none; without one a
            new index takes a backbone off the shelf that suits this machine.
        max_side: of a new index: long side that larger photos are reduced to.
        scales: of a new index: sizes at which photos are described; (1.0,) by default.
        power: of a new index: of the mean over the scales; 3 by default.
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
        create: make an index where there is none.
        on_note: called with a sentence about what was chosen.

    Raises:
        InputError: the index holds descriptors of another model, or of other settings.
    """
    place = str(uri)
    if not create or store_exists(place):
        store = open_store(place)
        try:
            check_settings(store, max_side, scales, power)
            return Index(store, _open_model(model, device), device)
        except BaseException:
            store.close()
            raise
    if model is None:
        model, reason = choose_backbone(Machine.detect(device))
        on_note(f"the model is {model}, off the shelf: {reason}; `model` names another")
    opened = _open_model(model, device)
    assert opened is not None
    header = header_of(
        opened,
        max_side=max_side,
        scales=(1.0,) if scales is None else scales,
        power=3.0 if power is None else power,
    )
    return Index(create_store(place, header), opened, device)


def open_index_for(
    uri: str | Path,
    sources: Sequence[Images | DescriptorFile],
    model: str | Path | None = None,
    **settings: Any,
) -> Index:
    """`open_index` for what will be added: a new index takes the settings of descriptor files.

    Raises:
        InputError: a descriptor file was made by another model.
    """
    files = [source for source in sources if isinstance(source, DescriptorFile)]
    if not files or store_exists(str(uri)):
        return open_index(uri, model, **settings)
    if model is None:
        raise InputError(f"{files[0].path} needs the model that made it: give it as `model`")
    opened = load_model(model, settings.get("device", "auto"))
    for file in files:
        if file.model != opened.fingerprint:
            raise InputError(
                f"{file.path} holds descriptors of the model {file.model[:12]}, not of {model}: "
                "give the model that made them with `model`"
            )
    made = files[0].settings.model_dump(include={"max_side", "scales", "power"})
    return open_index(uri, opened, **{**settings, **made})


def _open_model(model: Model | str | Path | None, device: str) -> Model | None:
    return model if model is None or isinstance(model, Model) else load_model(model, device)
