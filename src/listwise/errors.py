"""The exception for errors that the user can fix, and the category of warnings."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

Model = TypeVar("Model", bound="BaseModel")


class InputError(ValueError):
    """Invalid input; the message tells what is wrong, where, and what to do.

    It is a subclass of `ValueError`. The message names arguments in backticks, as in "lower
    `learning_rate`"; the command line shows the flag instead, prints the message as one line and
    exits with code 2.
    """


class ListwiseWarning(UserWarning):
    """Something that works, but probably not as intended; the command line prints it as a note."""


# What other libraries call settings and options that have another name here.
OTHER_NAMES = {
    "batch": ("batch_size",),
    "bs": ("batch_size",),
    "epochs": ("updates", "fine_tune_updates"),
    "filter": ("where",),
    "image_size": ("crops", "crops_size", "max_side"),
    "imgsz": ("crops", "crops_size", "max_side"),
    "iterations": ("updates",),
    "limit": ("k", "count"),
    "lr": ("learning_rate",),
    "num_workers": ("workers",),
    "output": ("out",),
    "steps": ("updates",),
    "top": ("k", "count"),
    "top_k": ("k", "count"),
    "topk": ("k", "count"),
    "wd": ("weight_decay",),
}


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that an unknown one probably stands for, at most three.

    They are what other libraries call by this name, or else those with a similar spelling.
    """
    from difflib import get_close_matches

    names = list(known)
    meant = [each for each in OTHER_NAMES.get(name, ()) if each in names]
    return meant or get_close_matches(name, names, cutoff=0.7)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= 160 else f"{line[:157]}..."


def validated(model: type[Model], values: Mapping[str, Any], file: str | None = None) -> Model:
    """Check settings or options by name, and return them as a model.

    Args:
        model: the pydantic model, which may contain others as groups.
        values: by name, with groups as dictionaries.
        file: the file they were read from, for error messages.

    Raises:
        InputError: a name is unknown or has a wrong value.
    """
    from pydantic import BaseModel, ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors()
        inside = first.get("ctx", {}).get("error")
        named = not first["loc"] or f"`{first['loc'][0]}`" in str(inside)
        if isinstance(inside, InputError) and named and file is None:
            raise inside from None
        kind = getattr(model.model_fields.get(str(first["loc"][0])), "annotation", None)
        inner = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        name = ".".join(str(part) for part in first["loc"][: 2 if inner else 1])
        if first["type"] == "extra_forbidden":
            known = (inner or model).model_fields
            near = nearest_names(name.rpartition(".")[2], known)
            # Backticks mark an argument, which the command line shows as a flag; a file has names.
            mark, where = ("`", "") if file is None else ("", f"{file}: ")
            advice = f"did you mean {mark}{near[0]}{mark}?" if near else "the settings are "
            advice += "" if near else ", ".join(known)
            raise InputError(f"{where}unknown setting {name!r}; {advice}") from error
        # A setting of several types has an error for each of them.
        same = [other for other in others if other["loc"][:1] == first["loc"][:1] and not inner]
        reasons = [fault["msg"].removeprefix("Value error, ") for fault in (first, *same)]
        shown = f"`{name}`" if file is None else f"{file}: {name}"
        expected = "Input should be "
        if not all(reason.startswith(expected) for reason in reasons):
            raise InputError(f"{shown}: {'; '.join(reasons)}") from error
        # Pydantic adds how it failed: "a valid integer, unable to parse string as an integer".
        kinds = [reason.removeprefix(expected).partition(", ")[0] for reason in reasons]
        value = f"{first['input']!r:.80}"
        expected = " or ".join(dict.fromkeys(kinds))
        raise InputError(f"{shown} must be {expected}, not {value}") from error
