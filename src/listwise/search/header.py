"""What an index remembers of its model: writing it down, and finding the model again."""

from collections.abc import Sequence
from pathlib import Path

from listwise.descriptors import Model, load_model
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.search.store import IndexHeader, Store


def header_of(
    model: Model,
    *,
    max_side: int | None = None,
    scales: Sequence[float] = (1.0,),
    power: float = 3.0,
) -> IndexHeader:
    """The header of a new index of a model's descriptors; the settings are those of `extract`.

    In which precision a network computes is a matter of the machine, not of the index.
    """
    return IndexHeader(
        model=model.fingerprint,
        model_folder="" if model.folder is None else str(model.folder),
        # With a whitening it is no longer the one off the shelf.
        model_name="" if model.folder or model.whitening else model.name,
        whitened=model.whitening is not None,
        dim=model.dim,
        settings=model.settings(max_side, scales, power, "float32"),
    )


def settings_here(header: IndexHeader, model: Model) -> ExtractSettings:
    """How this machine makes descriptors for an index."""
    settings = header.settings
    return model.settings(settings.max_side, settings.scales, settings.power, None)


def check_settings(
    store: Store, max_side: int | None, scales: Sequence[float] | None, power: float | None
) -> None:
    """Refuse settings other than those that the index was made with."""
    has = store.header.settings
    wanted = {
        "max_side": has.max_side if max_side is None else max_side,
        "scales": has.scales if scales is None else tuple(scales),
        "power": has.power if power is None else power,
    }
    for name, value in wanted.items():
        if value != getattr(has, name):
            raise InputError(
                f"{store.uri} was made with other settings, {name} {getattr(has, name)}: leave "
                f"`{name}` out, or make another index"
            )


def remembered_model(store: Store, device: str) -> Model:
    """The model that an index was made with, from its folder or by its name."""
    header = store.header
    source = header.model_folder or header.model_name
    if not source:
        raise InputError(f"the model of {store.uri} was never saved: give it as `model`")
    if header.model_folder and not Path(source).is_dir():
        raise InputError(
            f"the model of {store.uri} was in {source} and is gone: say where it is with `model`"
        )
    model = load_model(source, device)
    if model.fingerprint != header.model:
        raise InputError(
            f"the model in {source} has changed since {store.uri} was made: give the one that made "
            "it as `model`, or build another index"
        )
    return model
