"""The settings of an extraction, which a descriptor file records."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from listwise.errors import InputError

Precision = Literal["float32", "bfloat16"]


def check_scales(scales: tuple[float, ...]) -> tuple[float, ...]:
    """Raise a `ValueError` unless the scales can be used."""
    if not scales or not all(0 < scale <= 4 and math.isfinite(scale) for scale in scales):
        raise ValueError("give one or more numbers above 0 and up to 4")
    return scales


class ExtractSettings(BaseModel):
    """Everything that the descriptor of a photo depends on besides the model.

    The defaults are those of the paper. `model.describe(images, **settings.arguments())` repeats an
    extraction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_side: int | None = Field(None, ge=1)
    scales: tuple[float, ...] = (1.0,)
    power: float = Field(3.0, gt=0)
    precision: Precision = "float32"

    _usable = field_validator("scales")(check_scales)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Model.encode` and `Model.describe` for these settings."""
        return {**dict(self), "max_side": self.max_side or 0}

    def without_precision(self) -> str:
        """Format the settings except the precision, such as "max_side 1024, scales (1.0,), ...".

        Descriptors can be compared if this text is equal: the precision depends on the machine and
        hardly changes them.
        """
        return ", ".join(f"{name} {value}" for name, value in self if name != "precision")


def make_settings(
    max_side: int | None, scales: tuple[float, ...], power: float, precision: Precision
) -> ExtractSettings:
    """Check the settings; raise an `InputError` of one line if one is wrong.

    A `max_side` of 0 or None stands for the original size.
    """
    try:
        return ExtractSettings(
            max_side=max_side or None, scales=scales, power=power, precision=precision
        )
    except ValidationError as error:
        first = error.errors()[0]
        name, given, reason = first["loc"][0], first["input"], first["msg"]
        if reason.startswith("Input should be "):
            wanted = reason.removeprefix("Input should be ").partition(", ")[0]
            raise InputError(f"`{name}` must be {wanted}, not {given!r}") from error
        reason = reason.removeprefix("Value error, ")
        raise InputError(f"`{name}` {given!r}: {reason}") from error
