"""The results of a study: the outcome of each training run, and all of them."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from listwise.errors import InputError
from listwise.files import read_json, write_text

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training run; mAP values are from 0 to 1.

    Attributes:
        variant: name of the variant.
        value: number of the variant on the axis of the study.
        seed: seed of the run.
        learning_rate: learning rate of the run.
        validation_map: best validation mAP.
        untrained_map: validation mAP before the first update.
        best_update: update of the best validation mAP.
        updates: number of updates.
        backwards: number of images with a gradient.
        forwards: number of images that went through the network.
        hyper_parameters: number of settings of the loss, its batches and its mining.
        seconds: duration of the run.
        kept: False if another learning rate was better in validation.
        judged: mAP of the best network on the benchmark, such as "Medium whitened".
    """

    variant: str
    value: int | None
    seed: int
    learning_rate: float
    validation_map: float
    untrained_map: float
    best_update: int
    updates: int
    backwards: int
    forwards: int
    hyper_parameters: int
    seconds: float
    kept: bool = True
    judged: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the row of `results.csv`: names and values without nesting."""
        row = asdict(self)
        judged: dict[str, float] = row.pop("judged")
        return row | {column_name(name): value for name, value in judged.items()}


# `kept` depends on the other runs, and the benchmark's results have their own file.
_OF_THE_RUN = {entry.name for entry in fields(Outcome)} - {"kept", "judged"}


@dataclass
class StudyResults:
    """All results so far: the finished runs, and the untrained network on the benchmark."""

    outcomes: list[Outcome] = field(default_factory=list)
    untrained: dict[str, float] = field(default_factory=dict)

    @property
    def untrained_map(self) -> float:
        """Mean over the runs of the validation mAP before the first update."""
        return sum(run.untrained_map for run in self.outcomes) / len(self.outcomes)

    def kept(self, variant: str) -> list[Outcome]:
        """Return the runs of a variant with the chosen learning rate, by seed."""
        return [run for run in self.outcomes if run.kept and run.variant == variant]


def column_name(name: str) -> str:
    """Return the column of a benchmark result in `results.csv`."""
    return f"{name.lower().replace(' ', '_')}_map"


def write_outcome(run: Path, outcome: Outcome) -> None:
    """Write `outcome.json`, which marks a run as finished."""
    content = {name: value for name, value in asdict(outcome).items() if name in _OF_THE_RUN}
    write_text(run / OUTCOME_FILE, json.dumps(content, indent=2) + "\n")


def read_outcome(run: Path) -> Outcome | None:
    """Read the outcome of a run; None if the run is not finished."""
    path = run / OUTCOME_FILE
    if not path.exists():
        return None
    content = read_study_json(path)
    if content.keys() != _OF_THE_RUN:
        raise InputError(f"{path} was not written by this version: give another `out`")
    return Outcome(**content)


def read_study_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that a study wrote."""
    return read_json(path, "was not written by a study: remove it")
