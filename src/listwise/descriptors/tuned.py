"""The settings that `listwise tune` chose for a model, kept in the model folder."""

from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from listwise.descriptors.settings import check_scales
from listwise.errors import InputError
from listwise.files import write_text
from listwise.models import RetrievalNet

SETTINGS_FILE: Final = "settings.json"


class Expansion(BaseModel):
    """α query expansion: the number of neighbors and the power of their similarities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    k: int = Field(10, ge=1)
    alpha: float = Field(2.0, ge=0)


class TunedSettings(BaseModel):
    """Settings of a model that apply wherever a user gives none.

    Attributes:
        network: the fingerprint of the network that they were chosen for.
        max_side: the long side that larger photos are reduced to; None for the original size.
        scales: the sizes at which each photo is described, as factors.
        power: the power of the mean over the scales.
        expansion: α query expansion; None for a search without it.
        source: the validation photos.
        photos: the number of validation photos that were searched for.
        start_map: validation mAP before.
        validation_map: validation mAP with these settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    network: str
    max_side: int | None = Field(None, ge=1)
    scales: tuple[float, ...] = (1.0,)
    power: float = Field(3.0, gt=0)
    expansion: Expansion | None = None
    source: str = ""
    photos: int = 0
    start_map: float = 0.0
    validation_map: float = 0.0

    _usable = field_validator("scales")(check_scales)

    def save(self, folder: str | Path) -> None:
        """Write `settings.json` into a model folder."""
        write_text(Path(folder) / SETTINGS_FILE, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, net: RetrievalNet) -> Self | None:
        """Read the settings of a model folder; None without any, or if the network is another.

        Args:
            folder: the model folder.
            net: the network of the folder. Settings of other weights do not apply.
        """
        path = Path(folder) / SETTINGS_FILE
        if not path.is_file():
            return None
        try:
            found = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise InputError(
                f"{path} is damaged, or from a newer Listwise: delete it, and tune the model again"
            ) from error
        return found if found.network == net.fingerprint() else None
