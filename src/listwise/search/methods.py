"""The search method of a store: chosen for the limits of a user, measured, and remembered."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from listwise.errors import InputError, validated

Note = Callable[[str], object]
"""A function that is called with a sentence for the user."""


class SearchIntent(BaseModel):
    """The requirements of a user for search. None leaves the choice to the library.

    Attributes:
        memory: the maximum memory in bytes.
        milliseconds: the maximum latency per query.
        recall: the minimum recall@10, from 0 to 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory: ByteSize | None = Field(None, ge=1)
    milliseconds: float | None = Field(None, gt=0)
    recall: float | None = Field(None, gt=0, le=1)


def search_intent(
    memory: int | str | None = None,
    milliseconds: float | None = None,
    recall: float | None = None,
) -> SearchIntent:
    """Make a `SearchIntent`; a value out of range is an `InputError`.

    Args:
        memory: maximum memory for search, such as 500MB or 2GB, or a number of bytes.
        milliseconds: maximum latency per query, in milliseconds.
        recall: minimum share of the ten nearest photos that a search finds, from 0 to 1.
    """
    given = {"memory": memory, "milliseconds": milliseconds, "recall": recall}
    try:
        return validated(SearchIntent, given)
    except InputError as error:
        if "`memory`" not in str(error):
            raise
        raise InputError(f"`memory` must be a size such as 500MB or 2GB, not {memory}") from None


@dataclass(frozen=True)
class TuningResult:
    """A search method and its measurements.

    Attributes:
        method: a description of the method.
        recall: recall@10, against exact search.
        milliseconds: the median latency per query.
        memory: bytes of memory.
    """

    method: str
    recall: float
    milliseconds: float
    memory: int


class MethodState(BaseModel):
    """What a store remembers of its search method.

    Attributes:
        intent: the requirements of the user.
        tuned: the method and what was measured; None if nothing was measured yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    intent: SearchIntent = SearchIntent()
    tuned: TuningResult | None = None

    @property
    def name(self) -> str:
        """The method in words."""
        return "exact"


class SearchMethod(ABC):
    """The search method of a store."""

    @property
    @abstractmethod
    def state(self) -> MethodState:
        """What is remembered now."""

    @abstractmethod
    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice."""

    def facts(self) -> dict[str, Any]:
        """The intent, the method and its measurements as JSON values."""
        state = self.state
        unknown = {"method": f"{state.name}, not measured", "recall": None, "milliseconds": None}
        measured = asdict(state.tuned) if state.tuned else {**unknown, "memory": None}
        return {"intent": state.intent.model_dump(mode="json"), **measured}
