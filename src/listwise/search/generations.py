"""The generations of an index: its stores of descriptors of different models, and which is current.

An upgrade fills another generation, and a switch makes it the current one by replacing a record.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.search.store import IndexHeader, Store


class IndexUpgradedError(InputError):
    """The index has another generation now: open it again, and repeat the change."""

    def __init__(self, uri: str) -> None:
        super().__init__(f"{uri} was upgraded or rolled back meanwhile: run the command again")


class GenerationRecord(BaseModel):
    """The numbers of the generations of an index; a new index has only generation 0.

    Attributes:
        current: the generation that is searched and changed.
        previous: the generation before the last upgrade, to which a rollback returns.
        building: the generation of an unfinished upgrade.
        latest: the highest number that was ever used; numbers are not used again.
        paused: a mark of the process that holds back changes for the moment of a switch. Only
            Milvus needs it; a folder has a lock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    current: int = Field(0, ge=0)
    previous: int | None = Field(None, ge=0)
    building: int | None = Field(None, ge=0)
    latest: int = Field(0, ge=0)
    paused: str = ""

    @property
    def numbers(self) -> set[int]:
        """The numbers of all generations."""
        known = (self.current, self.previous, self.building)
        return {number for number in known if number is not None}

    def begun(self, number: int) -> "GenerationRecord":
        """The record of an upgrade that begins with an empty generation."""
        return GenerationRecord(current=self.current, building=number, latest=number)

    def switched(self, to: int) -> "GenerationRecord":
        """The record after a switch to another generation."""
        building = None if self.building == to else self.building
        return GenerationRecord(
            current=to, previous=self.current, building=building, latest=self.latest
        )

    def alone(self) -> "GenerationRecord":
        """The record of the current generation without the others."""
        return GenerationRecord(current=self.current, latest=self.latest)


class Generations(ABC):
    """The generations of an index, as the store of one of them uses them.

    Attributes:
        uri: the name of the index.
        number: the generation of the store.
        aside: whether the store may be changed although another generation is the current one;
            only an upgrade and a rollback do this.
    """

    uri: str
    number: int
    aside: bool

    @staticmethod
    @abstractmethod
    def exists(place: str) -> bool:
        """Whether an index exists at a place; an unfinished one does not count."""

    @staticmethod
    @abstractmethod
    def open_index(place: str) -> "Store":
        """Open the current generation of an index that exists."""

    @staticmethod
    @abstractmethod
    def create_index(place: str, header: "IndexHeader") -> "Store":
        """Create an empty index; it replaces an unfinished one."""

    @staticmethod
    def check_files(place: str, repair: bool = False) -> list[str]:
        """Names of the damaged files of an index; with `repair`, they are restored.

        An engine without files has none.

        Raises:
            DamagedIndexError: a file cannot be restored.
        """
        return []

    @abstractmethod
    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""

    @abstractmethod
    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record in one step."""

    @abstractmethod
    def open(self, number: int, *, aside: bool = False) -> "Store":
        """Open another generation of the index."""

    @abstractmethod
    def create(self, number: int, header: "IndexHeader") -> "Store":
        """Create an empty generation and open it with `aside`; it replaces an unfinished one."""

    @abstractmethod
    def drop_unused(self) -> None:
        """Delete the data of the generations that the record does not name."""

    def free_bytes(self) -> int | None:
        """Free space where the index is stored; None if it is not known."""
        return None

    @abstractmethod
    def upgrading(self) -> AbstractContextManager[None]:
        """Allow one upgrade at a time.

        Raises:
            IndexUpgradedError: another generation is the current one.
        """

    @abstractmethod
    def pausing(self) -> AbstractContextManager[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch.

        Raises:
            IndexUpgradedError: another generation is the current one.
        """

    def switch(self, to: int) -> None:
        """Make another generation the current one, in one step; call it within `pausing`."""
        self.save_record(self.record().switched(to))

    def is_current(self) -> bool:
        """Whether searches use this generation; if not, the index was upgraded or rolled back."""
        return self.record().current == self.number

    def check_current(self) -> None:
        """Raise an `IndexUpgradedError` if another generation is the current one."""
        if not self.is_current():
            raise IndexUpgradedError(self.uri)
