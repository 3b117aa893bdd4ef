"""Every setting of a training run as a command-line flag."""

import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from listwise.settings import TrainConfig

# How `preset="auto"` chooses a setting (training/choices.py).
CHOSEN = {
    "backbone": "resnet101 on a GPU, else tf_efficientnet_lite0",
    "batch_size": "from the number of photos",
    "class_weights": "off if the largest class has more than twice the photos of the smallest, "
    "except with --adapter",
    "crops.size": "from the size of the photos",
    "learning_rate": "from the batch size",
    "patience": "5",
    "precision": "bfloat16 on a GPU that supports it, else float32",
    "updates": "from the number of photos",
    "val_max_side": "twice the crop size",
    "validate_every": "about 15 validations per run",
    "warmup": "a tenth of the updates, at most 5",
    "workers": "from the number of CPU cores",
}
# Chosen settings for which the paper gives a value (section 4.2).
PAPER = {"backbone", "batch_size", "class_weights", "crops.size", "learning_rate", "updates"}
KINDS = {int: "INTEGER", float: "FLOAT", str: "TEXT", type(None): "none"}


def flag_of(setting: str) -> str:
    """Return the flag of a setting: --crops-size for crops.size."""
    return "--" + setting.replace(".", "-").replace("_", "-")


def with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with `**flags` a flag for every setting; `given_settings` reads them."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [_parameter(path, field) for path, field in _fields(TrainConfig)]
    command.__signature__ = signature.replace(parameters=own + flags)  # type: ignore[attr-defined]
    return command


def given_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the settings given on the command line, nested as in a config file."""
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
    name = flag_of(".".join(path))
    names = [f"{name}/--no-{name.removeprefix('--')}"] if kind is bool else [name]
    option = typer.Option(
        *names,
        help=f"{field.description}.",
        metavar=metavar,
        show_default=_default(".".join(path), field.default),
        rich_help_panel=_panel(path),
    )
    return inspect.Parameter(
        "_".join(path),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _panel(path: tuple[str, ...]) -> str:
    """The heading under which the help shows a setting."""
    if len(path) == 1:
        return "Settings"
    return (
        "Settings of the crops"
        if path[0] == "crops"
        else f"Settings of the {path[0].replace('_', '-')} loss"
    )


def _default(name: str, value: Any) -> str:
    """What the help shows as the default."""
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    shown = {"[]": "none", "None": "none", "True": "on", "False": "off"}.get(shown, shown)
    if name in PAPER:
        return f"{CHOSEN[name]}; paper: {shown}"
    return CHOSEN.get(name, shown)


def _kind(annotation: Any) -> tuple[type, str | None]:
    """The type of a flag's value, and what the help writes for the value."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return str, "|".join(map(str, arguments))
    if origin in (Union, UnionType):
        return str, "|".join(_kind(each)[1] or "" for each in arguments)
    if origin is list:
        return str, "INTEGER,..."
    return annotation, KINDS.get(annotation)
