"""The generations of an index: which one is searched, and which others exist.

An upgrade to another model does not change descriptors in place. It fills a new generation, which
has a store of its own, while searches use the current one. Then one small record is replaced.
"""

import hashlib

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from listwise.errors import InputError


class IndexUpgradedError(InputError):
    """The index has another generation now: open it again, and repeat the change."""


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

    def begun(self) -> "GenerationRecord":
        """The record of an upgrade that begins with an empty generation."""
        number = self.latest + 1
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

    def write(self) -> str:
        """The record as text, with a checksum."""
        content = self.model_dump_json()
        return f"{content}\n{_checksum(content)}\n"

    @classmethod
    def read(cls, text: str) -> "GenerationRecord | None":
        """Read a record from its text; None if the text is damaged."""
        content, _, checksum = text.rstrip("\n").partition("\n")
        if checksum != _checksum(content):
            return None
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return None


def _checksum(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
