"""Every setting of a training run as a command-line flag."""

import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from listwise.settings import TrainConfig

# Settings that are chosen from the photos and the machine where they are not given.
CHOSEN = {"device", "patience", "precision", "val_max_side", "validate_every", "warmup", "workers"}
CHOSEN_OR_PAPER = {"backbone", "batch_size", "crops.size", "learning_rate", "updates"}


def with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with `**flags` a flag for every setting; `given_settings` reads them."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [_parameter(path, field) for path, field in _fields(TrainConfig)]
    command.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    return command


def given_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings named on the command line, nested as in a config file."""
    settings: dict[str, Any] = {}
    for path, field in _fields(TrainConfig):
        value = flags["_".join(path)]
        if value is None:
            continue
        if value == "none" and type(None) in get_args(field.annotation):
            value = None
        target = settings
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value
    return settings


def _fields(
    model: type[BaseModel], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, (*above, name))
        else:
            yield (*above, name), field


def _parameter(path: tuple[str, ...], field: FieldInfo) -> inspect.Parameter:
    kind, metavar = _kind(field.annotation)
    name = "--" + "-".join(path).replace("_", "-")
    names = [f"{name}/--no-{name.removeprefix('--')}"] if kind is bool else [name]
    option = typer.Option(
        *names,
        help=f"{field.description}.",
        metavar=metavar,
        show_default=_default(".".join(path), field.default),
        rich_help_panel=path[0].capitalize() if len(path) > 1 else "Settings",
    )
    return inspect.Parameter(
        "_".join(path),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _default(name: str, value: Any) -> str:
    """What the help shows as the default."""
    if name in CHOSEN:
        return "chosen for you"
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    if name in CHOSEN_OR_PAPER:
        return f"chosen for you; paper: {shown}"
    return {"None": "none", "True": "on", "False": "off"}.get(shown, shown)


def _kind(annotation: Any) -> tuple[type, str | None]:
    """The type of a flag's value and how help names it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        words = "|".join(str(choice) for choice in arguments)
        return str, words if len(words) <= 30 else "str"  # the description names them then
    if origin in (Union, UnionType):
        kinds = [_kind(a)[1] or getattr(a, "__name__", "") for a in arguments]
        return str, "|".join(
            "none" if a is type(None) else k for a, k in zip(arguments, kinds, strict=True)
        )
    return annotation, None if annotation is bool else annotation.__name__
