"""What a study varies, and nothing else about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from listwise.errors import InputError


@dataclass(frozen=True)
class TrainingSet:
    """How much there is to train on."""

    photos: int
    classes: int


@dataclass(frozen=True)
class Variant:
    """One of the things compared: its settings beside those that all share.

    `value` is its place on the study's axis, if it has one.
    """

    name: str
    settings: dict[str, Any]
    value: int | None = None


@dataclass(frozen=True)
class Study:
    """A comparison of training runs that differ in one thing.

    Args:
        name: of the command and in the tables.
        title: of the table and the plot.
        varies: settings that the study gives itself, dotted where nested.
        usual: words for the variants compared unless asked otherwise.
        variant: makes a variant of a word.
        axis: what the numbers are, where variants are numbers.
        known: every word there is, where they are no numbers.
    """

    name: str
    title: str
    varies: tuple[str, ...]
    usual: Callable[[TrainingSet], Sequence[str]]
    variant: Callable[[str, TrainingSet], Variant]
    axis: str | None = None
    known: tuple[str, ...] = ()

    def variants(self, words: Sequence[str] | None, photos: TrainingSet) -> list[Variant]:
        """The variants that words name; None stands for the usual ones, "all" for every one."""
        if words is None:
            words = self.usual(photos)
        elif self.known and list(words) == ["all"]:
            words = self.known
        for word in words:
            if self.known and word not in self.known:
                raise InputError(
                    f"{self.name} has no variant {word!r}; there are {', '.join(self.known)}"
                )
        found = [self.variant(word, photos) for word in words]
        if len({variant.name for variant in found}) < len(found):
            raise InputError(f"a variant is named twice: {', '.join(words)}")
        return found


def whole_number(word: str) -> int:
    """The number that a word is."""
    try:
        return int(word)
    except ValueError:
        raise InputError(f"this study varies a whole number, not {word!r}") from None


def words_of(settings: dict[str, dict[str, Any]]) -> Callable[[str, TrainingSet], Variant]:
    """Makes variants of which each word has its settings."""
    return lambda word, photos: Variant(word, settings[word])
